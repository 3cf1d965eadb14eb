//! Ranks as processes with a GPU each that communicate by NCCL, or by RCCL, which has the same interface.
//!
//! The library is loaded at run time (`library`). A group has a communicator of NCCL, made by splitting the one of the whole
//! job, and a side stream on which its transfers run ([`kintsugi_tensor::SideStream`]). Starting a transfer makes the side stream
//! wait for the stream of the operations, and waiting for it makes the stream of the operations wait for the side stream. The
//! host waits for neither. Messages between stages have communicators of their own ([`links`]).
//!
//! NCCL chooses the algorithm of a collective. What is counted as traffic is what a ring would send.
//!
//! The processes find each other, and exchange settings and results, by MPI or by a [rendezvous](crate::rendezvous). A watchdog
//! (`job_state`) turns errors of NCCL, the death of a rank and timeouts into the failure of the job.

#[allow(unsafe_code, reason = "it calls a C library")]
mod communicator;
#[allow(unsafe_code, reason = "it calls a C library")]
mod group;
#[allow(unsafe_code, reason = "it ends a process that hangs in a C library")]
mod job_state;
#[allow(unsafe_code, reason = "it calls a C library")]
mod library;
pub mod links;
#[allow(unsafe_code, reason = "it sets environment variables")]
mod settings;
mod world;

pub use group::NcclGroup;
pub use library::{LoadError, NcclError, SHARED_GPU_VERSION, VARIABLE, Version};
pub use settings::NcclSettings;
pub use world::NcclWorld;

/// The library of this machine: its version and name.
pub fn find() -> Result<(Version, String), LoadError> {
    library::api().map(|api| (api.version, api.name.clone()))
}

//! What a device needs beside the tensors, by formula: a plan for a GPU is made on machines without one.

mod attention_scratch;

pub use attention_scratch::{
    AttentionPass, AttentionScratch, AttentionWorkspace, asks_library, fits_library,
};

/// The properties of a device that decide how much memory it needs beside the tensors. A device and its paper backend
/// share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A CPU rank.
    Cpu {
        /// Threads that share the work of one operation.
        threads: usize,
    },
    /// A GPU, with one stream.
    Gpu {
        /// Bytes of the workspace.
        workspace: u64,
        /// The scratch of attention beside it.
        attention: AttentionScratch,
    },
}

impl Device {
    /// An NVIDIA GPU. With `deterministic` the same inputs give the same bits, and the backward of attention needs more
    /// scratch memory.
    pub const fn cuda(deterministic: bool) -> Self {
        // NVIDIA recommends 32 MiB for cuBLASLt on Hopper. Our kernels and the libraries share it, which is safe because
        // the stream runs them in order.
        Device::Gpu { workspace: 32 << 20, attention: AttentionScratch::Cudnn { deterministic } }
    }

    /// An AMD GPU. The workspace holds what our kernels keep between two launches, and is rocBLAS's too.
    pub const fn hip() -> Self {
        Device::Gpu { workspace: 32 << 20, attention: AttentionScratch::Portable }
    }

    /// The device for a plan in which no attention runs on a library's kernel, without the scratch of these.
    #[must_use]
    pub fn without_attention_library(self) -> Self {
        match self {
            Device::Gpu { workspace, .. } => Device::Gpu { workspace, attention: AttentionScratch::Portable },
            cpu @ Device::Cpu { .. } => cpu,
        }
    }

    /// Bytes of the one fixed workspace per stream.
    pub fn workspace_bytes(self) -> u64 {
        match self {
            Device::Cpu { threads } => crate::cpu::workspace_bytes(threads),
            Device::Gpu { workspace, .. } => workspace,
        }
    }
}

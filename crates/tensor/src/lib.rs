//! Memory and the training operations, behind one trait.
//!
//! A [`Backend`] owns the memory of one rank and runs the fused operations of [`ops`] on it. The layers of the model
//! are written once against this trait. [`cpu`] and the crate `gpu` execute the operations; [`paper`] only records
//! which kernels would run.

mod backend;
mod buffer;
mod dtype;
mod fetch;
mod float8;
mod mark;
mod memory;
mod notice;
mod replay_step;
mod side_stream;

pub mod cpu;
pub mod device;
pub mod ops;
pub mod paper;

pub use backend::Backend;
pub use buffer::{Buffer, DividedBuffer, View};
pub use device::Device;
pub use dtype::DType;
pub use fetch::Fetch;
pub use float8::Float8;
pub use mark::{DeviceTimestamp, Launch, LaunchedTransfer, Mark};
pub use memory::{AddressSpace, Arena, Block, CATEGORIES, Category, Foreign, Ledger, Memory, Usage};
pub use notice::Notice;
pub use replay_step::{ReplayOutcome, ReplayRequest};
pub use side_stream::{SideEvent, SideStream, SideTransfer, StreamWatch};

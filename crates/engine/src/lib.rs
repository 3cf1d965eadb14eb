//! Runs programs with real tensors: a thread per rank, the training loop, and the check that layouts agree.
#![forbid(unsafe_code)]

mod error;
mod job;
mod report;
mod source;
mod start;
mod trace;
mod train;
pub mod verify;

pub use error::{JobError, TrainError};
pub use job::{Job, MemoryChoice, Worker, device, run_job};
pub use report::{Outcome, StepReport};
pub use start::Start;
pub use trace::Span;
pub use train::{Event, Saves, TrainOptions, dataset, train};

//! Runs programs with real tensors: a thread per rank, the training loop, and the check that layouts agree.
#![forbid(unsafe_code)]

mod error;
mod job;
mod source;
mod train;
pub mod verify;

pub use error::{JobError, TrainError};
pub use job::{Job, MemoryChoice, Worker, device, run_job};
pub use train::{Event, Outcome, Span, StepReport, TrainOptions, dataset, train};

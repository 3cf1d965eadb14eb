//! What can go wrong in a run, as a sentence.

use kintsugi_checkpoint::CheckpointError;
use kintsugi_data::DataError;
use kintsugi_rank::Bad;
use thiserror::Error;

/// A rank failed and took the job down.
pub use kintsugi_comm::threads::Failure as JobError;

/// Why training ended early.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum TrainError {
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A rank failed.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The checkpoint that it should go on from is none for this plan.
    #[error(transparent)]
    Start(#[from] CheckpointError),
    /// Too many steps in a row had a loss or gradient that was not finite.
    #[error(
        "{steps} steps in a row, up to step {step}, had a loss or a gradient that is not finite: {}; lower \
         optimizer.lr or a fixed precision.loss_scale, or raise run.max_skipped if this passes by itself",
        origin(*first)
    )]
    NotFinite {
        /// Steps in a row.
        steps: u64,
        /// The last of them, 1-based.
        step: u64,
        /// Where it began: the rank, and what on it. Nowhere if every part is finite and only the sum is not.
        first: Option<(usize, Bad)>,
    },
}

fn origin(first: Option<(usize, Bad)>) -> String {
    match first {
        Some((rank, Bad { what, unit })) => format!("first the {what} of {unit} on rank {rank}"),
        None => "each rank's gradient is, but not the sum of all".into(),
    }
}

//! What can go wrong in a run, as a sentence.

use kintsugi_plan::Unit;
use thiserror::Error;

/// A rank failed and took the job down.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("rank {rank} failed in {during}: {reason}")]
pub struct JobError {
    /// The rank that failed first.
    pub rank: usize,
    /// The op it was in.
    pub during: String,
    /// Why.
    pub reason: String,
}

/// Why training ended early.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum TrainError {
    /// A rank failed.
    #[error(transparent)]
    Job(#[from] JobError),
    /// Too many steps in a row had a loss or gradient that was not finite.
    #[error(
        "{steps} steps in a row, up to step {step}, had a loss or a gradient that is not finite: first the {what} \
         of {unit} on rank {rank}; lower optimizer.lr, or raise run.max_skipped if this passes by itself"
    )]
    NotFinite {
        /// Steps in a row.
        steps: u64,
        /// The last of them, 1-based.
        step: u64,
        /// The rank where it began.
        rank: usize,
        /// Weights or gradient.
        what: &'static str,
        /// The unit of the model.
        unit: Unit,
    },
    /// The model cannot represent the data.
    #[error("model.vocab = {model} is smaller than the data's vocabulary of {data}; use at least {data}")]
    Vocabulary {
        /// The model's.
        model: usize,
        /// The data's.
        data: usize,
    },
}

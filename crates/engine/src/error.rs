//! What can go wrong in a run, as a sentence.

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
        "{steps} steps in a row had a loss or a gradient that is not finite, first in {unit} on rank {rank} \
         (step {step}); lower optimizer.lr, or raise run.max_skipped if this passes by itself"
    )]
    NotFinite {
        /// Steps in a row.
        steps: u64,
        /// The last of them.
        step: u64,
        /// The first rank with such a gradient of its own.
        rank: usize,
        /// The unit of the model, first in the order of the backward pass.
        unit: String,
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

//! What can go wrong in a run, as a sentence.

use kintsugi_checkpoint::{CheckpointError, WriterEnded};
use kintsugi_comm::threads::Failure;
use kintsugi_data::DataError;
use kintsugi_rank::{Bad, StoreError};
use kintsugi_tensor::cpu::memory::OutOfMemory;
use kintsugi_tensor::cuda::CudaError;
use thiserror::Error;

use crate::ThreadError;

/// Why a rank cannot go on: a disk, a file, a device or the operating system.
#[derive(Clone, Debug, Error)]
pub enum RankError {
    /// Its tokens cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Its weights or states cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The system refuses it memory.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// Its GPU cannot be used.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// Its threads cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// Its copy cannot be handed to the thread that writes checkpoints.
    #[error(transparent)]
    Writer(#[from] WriterEnded),
}

/// Why a job failed.
#[derive(Clone, Debug, Error)]
pub enum JobError {
    /// A rank could not go on, and so the others could not either.
    #[error("rank {rank} failed in {during}: {source}")]
    Rank {
        /// The first rank that failed.
        rank: usize,
        /// What it was doing.
        during: String,
        /// Why.
        source: RankError,
    },
    /// A rank panicked, or waited too long for another.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// A thread beside the ranks' cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
}

/// Why training ended early.
#[derive(Clone, Debug, Error)]
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
    /// The tokens of the next step cannot be read.
    #[error("training ended after step {step} because of its data: {source}")]
    NextBatch {
        /// The last step that was done, 1-based.
        step: u64,
        /// What is wrong with the data.
        source: DataError,
    },
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

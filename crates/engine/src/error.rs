//! The errors of a run.

use kintsugi_checkpoint::{CheckpointError, WriterEnded};
use kintsugi_comm::RankFailure;
use kintsugi_data::DataError;
use kintsugi_gpu::GpuError;
use kintsugi_rank::{NonFinite, StoreError};
use kintsugi_run::Spike;
use kintsugi_spec::Cause;
use kintsugi_tensor::cpu::memory::OutOfMemory;
use thiserror::Error;

use crate::ThreadError;

/// Why a rank cannot continue: a disk, a file, a device or the operating system.
#[derive(Clone, Debug, Error)]
pub enum RankError {
    /// The rank's tokens cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The rank's weights or states cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The checkpoint to go back to after a spike cannot be read, or a copy of states cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The system has no memory for the rank.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// The rank's GPU cannot be used.
    #[error(transparent)]
    Device(#[from] GpuError),
    /// The rank's threads cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// A transfer with another rank failed.
    #[error(transparent)]
    Transfer(Box<RankFailure>),
    /// The memory of the rank has changed what it must keep.
    #[error(
        "{what} are not those that step {step} has written, and nothing writes them in between; the memory of this rank is not sound"
    )]
    Corrupted {
        /// Weights or states, and their unit.
        what: String,
        /// 1-based.
        step: u64,
    },
    /// The thread that writes checkpoints has ended, so the rank cannot save.
    #[error(transparent)]
    Writer(#[from] WriterEnded),
}

impl From<RankFailure> for RankError {
    fn from(failure: RankFailure) -> Self {
        RankError::Transfer(Box::new(failure))
    }
}

/// Why a job failed.
#[derive(Clone, Debug, Error)]
pub enum JobError {
    /// A rank failed, and the others were stopped.
    #[error("rank {rank}{} failed in {during}: {source}", on(host.as_deref()))]
    Rank {
        /// The first rank that failed.
        rank: usize,
        /// Its host, if ranks may be on several.
        host: Option<Box<str>>,
        /// What it was doing.
        during: Box<str>,
        /// Why.
        source: RankError,
    },
    /// A rank panicked, or waited too long for another.
    #[error(transparent)]
    Failure(Box<RankFailure>),
    /// A thread of the job, other than a rank's, cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
}

impl From<RankFailure> for JobError {
    fn from(failure: RankFailure) -> Self {
        JobError::Failure(Box::new(failure))
    }
}

fn on(host: Option<&str>) -> String {
    host.map(|host| format!(" on {host}")).unwrap_or_default()
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
    /// This plan cannot resume from the checkpoint.
    #[error(transparent)]
    Start(#[from] CheckpointError),
    /// The tokens of the next step cannot be read.
    #[error("training ended after step {step} because of its data: {source}")]
    NextBatch {
        /// The last finished step, 1-based.
        step: u64,
        /// What is wrong with the data.
        source: Cause,
    },
    /// A spike follows the last return to a checkpoint that was allowed.
    #[error(
        "step {step}: {spike}; the run has gone back to a checkpoint {rollbacks} times, and run.max_rollbacks = {rollbacks} allows no \
         more; lower optimizer.lr, or raise run.spike_limit if such steps do no harm"
    )]
    Spike {
        /// The step, from 1.
        step: u64,
        /// What is wrong with it.
        spike: Spike,
        /// How often the run has gone back.
        rollbacks: u64,
    },
    /// Too many consecutive steps had a loss or gradient that was not finite.
    #[error(
        "{steps} steps in a row, up to step {step}, had a loss or a gradient that is not finite: {}; lower \
         optimizer.lr or a fixed precision.loss_scale, or raise run.max_skipped if this passes by itself",
        origin(*first)
    )]
    NotFinite {
        /// Consecutive steps.
        steps: u64,
        /// The last of them, 1-based.
        step: u64,
        /// The first rank with non-finite values, and which values. `None` if only the sum over all ranks is not finite.
        first: Option<(usize, NonFinite)>,
    },
}

fn origin(first: Option<(usize, NonFinite)>) -> String {
    match first {
        Some((rank, NonFinite { what, unit })) => {
            format!("first the {} of {unit} on rank {rank}", what.name())
        }
        None => "the gradient of every rank is finite, but their sum is not".into(),
    }
}

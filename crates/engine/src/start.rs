//! What a run starts from: the seed, given weights, or a checkpoint.

use std::fmt;
use std::sync::Arc;

use kintsugi_checkpoint::{Checkpoint, CheckpointError, RunProgress};
use kintsugi_plan::Plan;
use kintsugi_rank::{FiniteStore, Rank, Store, StoreError};
use kintsugi_tensor::ops::control;

use crate::job::RankActivity;
use crate::{CopiedStart, RankError, Worker};

/// What a run starts from.
#[derive(Clone, Default)]
pub enum Start {
    /// Initial weights from the plan's seed.
    #[default]
    Seed,
    /// Given weights, at step 0.
    Weights(Arc<dyn Store + Send>),
    /// The weights, states and step of a checkpoint.
    Checkpoint(Arc<Checkpoint>),
    /// The states of an earlier attempt of the same job, which are copied in the memory of the nodes.
    Copies(Arc<CopiedStart>),
}

impl fmt::Debug for Start {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Start::Seed => f.write_str("Seed"),
            Start::Weights(_) => f.write_str("Weights"),
            Start::Checkpoint(checkpoint) => write!(f, "Checkpoint({})", checkpoint.path().display()),
            Start::Copies(copied) => write!(f, "Copies({})", copied.folder.path().display()),
        }
    }
}

impl Start {
    /// The progress of the run before it starts.
    pub fn progress(&self) -> RunProgress {
        match self {
            Start::Seed | Start::Weights(_) => RunProgress::default(),
            Start::Checkpoint(checkpoint) => checkpoint.progress().clone(),
            Start::Copies(copied) => copied.set.progress.clone(),
        }
    }

    /// Where a run begins that goes back and finds no checkpoint: copies are those of the newest steps only.
    pub(crate) fn origin(&self) -> &Start {
        match self {
            Start::Copies(copied) => &copied.origin,
            Start::Seed | Start::Weights(_) | Start::Checkpoint(_) => self,
        }
    }

    /// The global batches that were consumed before, or why the plan cannot start from here.
    pub(crate) fn batches_consumed(&self, plan: &Plan) -> Result<u64, CheckpointError> {
        match self {
            Start::Seed | Start::Weights(_) => Ok(0),
            Start::Checkpoint(checkpoint) => checkpoint.batches_consumed(plan),
            Start::Copies(copied) => Ok(copied.set.progress.samples / plan.batch.global as u64),
        }
    }

    /// Sets a rank's weights and states, which are those of a later step.
    pub(crate) fn go_back(&self, worker: &mut Worker, plan: &Plan) -> Result<(), RankError> {
        worker.rank.reset_states();
        self.load(worker, plan)
    }

    /// Sets the weights and states of a rank that has not run a step.
    pub(crate) fn load(&self, worker: &mut Worker, plan: &Plan) -> Result<(), RankError> {
        RankActivity::Loading.set();
        match self {
            Start::Seed => worker.rank.initialise(plan.run.seed),
            Start::Weights(store) => {
                worker.load(&FiniteStore { store: &**store, compute: plan.precision.compute })?;
            }
            Start::Checkpoint(checkpoint) => resume(&worker.rank, plan, checkpoint)?,
            Start::Copies(copied) => {
                copied.load(worker, plan)?;
                let progress = &copied.set.progress;
                set_steps(&worker.rank, progress);
                set_loss_scale(&worker.rank, progress);
            }
        }
        Ok(())
    }
}

fn resume(rank: &Rank, plan: &Plan, checkpoint: &Checkpoint) -> Result<(), StoreError> {
    rank.load(checkpoint, checkpoint.stored_tensors())?;
    let progress = checkpoint.progress();
    set_steps(rank, progress);
    // The checkpoint's loss scale applies only if compute type and loss scaling are unchanged. A checkpoint that was
    // converted from other weights is at step 0 and has no loss scale.
    let scaling = |plan: &Plan| (plan.precision.compute, plan.precision.loss_scale);
    if progress.step > 0 && scaling(plan) == scaling(checkpoint.plan()) {
        set_loss_scale(rank, progress);
    }
    Ok(())
}

fn set_steps(rank: &Rank, progress: &RunProgress) {
    rank.set_control(control::STEP, progress.step as f64);
    rank.set_control(control::UPDATES, progress.updates as f64);
}

fn set_loss_scale(rank: &Rank, progress: &RunProgress) {
    rank.set_control(control::LOSS_SCALE, progress.loss_scale);
    rank.set_control(control::GOOD_STEPS, progress.good_steps as f64);
}

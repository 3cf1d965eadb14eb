//! What a run starts from: the seed, someone's weights, or a checkpoint.

use std::fmt;
use std::sync::Arc;

use kintsugi_checkpoint::{Checkpoint, CheckpointError, Progress};
use kintsugi_plan::Plan;
use kintsugi_rank::{Finite, Rank, Store, StoreError};
use kintsugi_tensor::ops::control;

use crate::Worker;
use crate::job::During;

/// What a run starts from.
#[derive(Clone, Default)]
pub enum Start {
    /// Weights from the plan's seed.
    #[default]
    Seed,
    /// Given weights, and otherwise the beginning.
    Weights(Arc<dyn Store + Send>),
    /// The step after a checkpoint's, with its states.
    Checkpoint(Arc<Checkpoint>),
}

impl fmt::Debug for Start {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Start::Seed => f.write_str("Seed"),
            Start::Weights(_) => f.write_str("Weights"),
            Start::Checkpoint(checkpoint) => write!(f, "Checkpoint({})", checkpoint.path().display()),
        }
    }
}

impl Start {
    /// How far the run is already.
    pub fn progress(&self) -> Progress {
        match self {
            Start::Seed | Start::Weights(_) => Progress::default(),
            Start::Checkpoint(checkpoint) => checkpoint.progress().clone(),
        }
    }

    /// Global batches that lie behind, or why the plan cannot start from here.
    pub(crate) fn batches_behind(&self, plan: &Plan) -> Result<u64, CheckpointError> {
        match self {
            Start::Seed | Start::Weights(_) => Ok(0),
            Start::Checkpoint(checkpoint) => checkpoint.batches_behind(plan),
        }
    }

    /// Sets a rank's weights and states.
    pub(crate) fn load(&self, worker: &Worker, plan: &Plan) -> Result<(), StoreError> {
        During::Loading.set();
        match self {
            Start::Seed => {
                worker.rank.initialise(plan.run.seed);
                Ok(())
            }
            Start::Weights(store) => {
                worker.load(&Finite { store: &**store, compute: plan.precision.compute })
            }
            Start::Checkpoint(checkpoint) => resume(&worker.rank, plan, checkpoint),
        }
    }
}

fn resume(rank: &Rank, plan: &Plan, checkpoint: &Checkpoint) -> Result<(), StoreError> {
    rank.load(checkpoint, checkpoint.kept())?;
    let progress = checkpoint.progress();
    rank.set_control(control::STEP, progress.step as f64);
    rank.set_control(control::UPDATES, progress.updates as f64);
    // A scale that was found for fp16 means nothing elsewhere, and a fixed one is the configuration's. Weights that were
    // converted into a checkpoint have come without any.
    let scaling = |plan: &Plan| (plan.precision.compute, plan.precision.loss_scale);
    if progress.step > 0 && scaling(plan) == scaling(checkpoint.plan()) {
        rank.set_control(control::LOSS_SCALE, progress.loss_scale);
        rank.set_control(control::GOOD_STEPS, progress.good_steps as f64);
    }
    Ok(())
}

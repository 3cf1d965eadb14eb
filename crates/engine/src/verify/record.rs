//! Records everything that `verify` compares of a short run.

use std::collections::BTreeSet;
use std::sync::Arc;

use kintsugi_comm::Connection;
use kintsugi_data::Split;
use kintsugi_plan::{Op, Plan};
use kintsugi_rank::{UnitValues, WholeParameters, assemble};
use kintsugi_tensor::ops::control;
use serde::{Deserialize, Serialize};

use crate::source::{BatchReader, StepTokens, dataset};
use crate::verify::Fault;
use crate::{Job, MemoryChoice, TrainError, run_job};

/// The recording of a layout's run.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Loss of every step.
    pub losses: Vec<f64>,
    /// Gradient norm of every step.
    pub norms: Vec<f64>,
    /// Every parameter's whole gradient at the first step, before clipping.
    pub gradients: WholeParameters,
    /// Every parameter at the end.
    pub weights: WholeParameters,
    /// Parameters whose copies on two ranks are not bit-identical, in their gradients or in their values at the end.
    pub diverged: BTreeSet<String>,
    /// The rotated features of a key, and all its features.
    pub rotated: [usize; 2],
}

#[derive(Serialize, Deserialize)]
struct RankRecording {
    losses: Vec<f64>,
    norms: Vec<f64>,
    gradients: Vec<UnitValues>,
    weights: Vec<UnitValues>,
}

/// Runs a plan for `plan.run.steps` steps and records it. If the ranks are processes, every process calls it, and the process
/// of rank 0 gets the recording.
pub fn record(
    plan: &Plan,
    memory: MemoryChoice,
    connection: Connection,
    fault: Option<Fault>,
) -> Result<Option<Recording>, TrainError> {
    let dataset = dataset(plan)?;
    let job = Job { connection, fault, ..Job::new(Arc::new(plan.clone()), memory) };
    let ranks = run_job(&job, |worker| {
        worker.rank.initialise(plan.run.seed);
        let program = worker.program(plan);
        let batches = BatchReader::new(plan, &*dataset, Split::Train, worker, &program);
        let mut tokens = StepTokens::default();
        let mut recording =
            RankRecording { losses: vec![], norms: vec![], gradients: vec![], weights: vec![] };
        for step in 0..plan.run.steps {
            batches.read(step, &mut tokens)?;
            worker.run(&program, &mut tokens, |rank, op| {
                if step == 0 && *op == Op::Measure {
                    let scale = rank.control(control::LOSS_SCALE) as f32;
                    recording.gradients = rank.gradients();
                    let values = recording.gradients.iter_mut().flat_map(|piece| &mut piece.values);
                    values.for_each(|value| *value /= scale);
                }
            })?;
            recording.losses.push(worker.rank.control(control::LOSS));
            recording.norms.push(worker.rank.control(control::NORM));
        }
        recording.weights = worker.rank.weights();
        Ok(recording)
    })?;
    let Some(ranks) = ranks else { return Ok(None) };
    let (losses, norms) = (ranks[0].losses.clone(), ranks[0].norms.clone());
    let all = |pieces: fn(&RankRecording) -> &Vec<UnitValues>| {
        ranks.iter().flat_map(pieces).cloned().collect::<Vec<_>>()
    };
    let gradients = assemble(plan, &all(|rank| &rank.gradients));
    let weights = assemble(plan, &all(|rank| &rank.weights));
    Ok(Some(Recording {
        losses,
        norms,
        gradients: gradients.whole,
        weights: weights.whole,
        diverged: &gradients.diverged | &weights.diverged,
        rotated: [plan.model.rotary_dims(), plan.model.head_dim],
    }))
}

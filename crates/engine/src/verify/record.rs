//! Records everything that `verify` compares of a short run.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use kintsugi_comm::Connection;
use kintsugi_data::Split;
use kintsugi_plan::{Op, Plan, StepOp};
use kintsugi_rank::{Purpose, UnitValues, WholeParameters, assemble};
use kintsugi_tensor::ops::control;
use serde::{Deserialize, Serialize};

use super::Bounds;
use super::weight_bounds::WeightBounds;
use crate::job::gather;
use crate::source::{BatchReader, StepTokens, dataset};
use crate::verify::Fault;
use crate::{Job, MemoryChoice, TrainError, run_ranks};

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

/// The recording of the one-rank run that layouts are compared with.
#[derive(Clone, Debug)]
pub struct Reference {
    /// What layouts have, too.
    pub recording: Recording,
    /// How far every weight of a layout may be from the reference at the end, if gradients may differ by
    /// [`Bounds::gradient`]. `None` in 16 bits, where weights are bounded together.
    pub weight_bounds: Option<WholeParameters>,
}

#[derive(Default, Serialize, Deserialize)]
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
    let job = Job { connection, ..Job::new(Arc::new(plan.clone()), memory) };
    run(&job, fault, None)
}

/// Runs a plan of one rank in this process and records it as the reference.
pub fn record_reference(plan: &Plan, memory: MemoryChoice) -> Result<Reference, TrainError> {
    let bounds = Bounds::of(plan).element_gradient().map(|bound| Mutex::new(WeightBounds::new(plan, bound)));
    let recording = run(&Job::new(Arc::new(plan.clone()), memory), None, bounds.as_ref())?;
    let recording = recording.expect("the only rank is here");
    let weight_bounds = bounds
        .map(|bounds| bounds.into_inner().unwrap_or_else(PoisonError::into_inner).of(&recording.weights));
    Ok(Reference { recording, weight_bounds })
}

/// Runs a job, perhaps with a fault, and records it. If `bounds` are given, the job has one rank, and its updates are added to
/// them.
fn run(
    job: &Job,
    fault: Option<Fault>,
    bounds: Option<&Mutex<WeightBounds>>,
) -> Result<Option<Recording>, TrainError> {
    let (plan, world) = (&*job.plan, job.world());
    let world = match fault {
        Some(fault) => fault.in_world(world, plan),
        None => world,
    };
    let dataset = dataset(plan)?;
    let ranks = run_ranks(Purpose::Training, job, &world, |worker| {
        worker.rank.initialise(plan.run.seed);
        let program = match fault {
            Some(fault) => fault.in_program(worker.program(plan)),
            None => worker.program(plan),
        };
        let (at, backend) = (worker.at, Rc::clone(&worker.backend));
        let mut batches = BatchReader::new(plan, &*dataset, Split::Train, worker, &program);
        if let Some(fault) = fault {
            batches = batches.of_part(plan, fault.read_part(plan, at));
            fault.in_rank(&mut worker.rank, plan, at);
        }
        let mut tokens = StepTokens::default();
        let mut recording = RankRecording::default();
        for step in 0..plan.run.steps {
            batches.read(step, &mut tokens)?;
            let (mut gradients, mut scale, mut has_measured) = (Vec::new(), 1.0, false);
            worker.run(&program, &mut tokens, |rank, op| {
                let is_after_measuring =
                    std::mem::replace(&mut has_measured, *op == Op::Step(StepOp::Measure));
                if let Some(fault) = fault.filter(|_| is_after_measuring) {
                    fault.after_measuring(rank, plan, at, &*backend);
                }
                if (step == 0 || bounds.is_some()) && *op == Op::Step(StepOp::Measure) {
                    scale = rank.control(control::LOSS_SCALE);
                    gradients = rank.gradients();
                    let values = gradients.iter_mut().flat_map(|piece| &mut piece.values);
                    values.for_each(|value| *value /= scale as f32);
                }
            })?;
            let control = |index| worker.rank.control(index);
            recording.losses.push(control(control::LOSS));
            recording.norms.push(control(control::NORM));
            if let Some(bounds) = bounds
                && control(control::SKIP) == 0.0
            {
                let whole = assemble(plan, &gradients).whole;
                let mut bounds = bounds.lock().unwrap_or_else(PoisonError::into_inner);
                let clip = control(control::FACTOR) * scale;
                bounds.add(&whole, clip, control(control::RATE));
            }
            if step == 0 {
                recording.gradients = gradients;
            }
        }
        recording.weights = worker.rank.weights();
        Ok(recording)
    })?;
    let Some(ranks) = gather(&*world, ranks)? else { return Ok(None) };
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

//! The largest peak of a plan's ranks, in microseconds: for a search over many plans of one model and one batch.
//!
//! There is no second set of formulas here either. What things weigh is read off a rank that runs each block once
//! on paper (`probe`), how many of them there are is counted along the program (`walk`), and what stays is read off
//! a rank that has just been made. Each is found once and kept for all plans that share it.

mod items;
mod probe;
mod walk;

use std::sync::Arc;

use kintsugi_plan::{Block, Mesh, Plan, Recompute};
use kintsugi_tensor::Device;

use crate::memo::Memo;
use items::ITEMS;
use probe::Weights;
use walk::{Moment, Structure, worst_moments};

/// Answers for plans that differ in their strategy only.
pub struct Screen {
    device: Device,
    blocks: Memo<(usize, usize, bool, Recompute), Weights>,
    units: Memo<(usize, usize), [u64; ITEMS]>,
    resident: Memo<(Mesh, [usize; 2], [usize; 3], usize), u64>,
    stages: Memo<(usize, [usize; 2]), Arc<Vec<usize>>>,
    moments: Memo<Structure, Arc<Vec<(usize, Vec<Moment>)>>>,
}

impl Screen {
    /// A screen for plans on `device`.
    pub fn new(device: Device) -> Self {
        Screen {
            device,
            blocks: Memo::default(),
            units: Memo::default(),
            resident: Memo::default(),
            stages: Memo::default(),
            moments: Memo::default(),
        }
    }

    /// The bytes that stay on the fullest rank throughout: less than its peak, and quicker to know.
    pub fn resident(&self, plan: &Plan) -> u64 {
        self.stages(plan).iter().map(|&stage| self.resident_on(plan, stage)).max().unwrap_or(0)
    }

    /// The bytes of the fullest rank at its worst moment: the largest `total` of the full play.
    pub fn peak(&self, plan: &Plan) -> u64 {
        let weights = self.weights(plan);
        let moments = self.moments.get(Structure::of(plan), || {
            let one = |&stage: &usize| (stage, worst_moments(plan, stage));
            Arc::new(self.stages(plan).iter().map(one).collect())
        });
        let of_stage = |(stage, moments): &(usize, Vec<Moment>)| {
            let worst = moments.iter().map(|moment| weigh(moment, &weights)).max();
            self.resident_on(plan, *stage) + worst.unwrap_or(0)
        };
        moments.iter().map(of_stage).max().unwrap_or(0)
    }

    fn weights(&self, plan: &Plan) -> Weights {
        let key = (plan.mesh.tp, plan.batch.micro, plan.sequence_parallel, plan.memory.recompute);
        let blocks = self.blocks.get(key, || probe::blocks(plan, self.device));
        let units = self.units.get((plan.mesh.tp, plan.mesh.dp), || probe::units(plan, self.device));
        let mut weights = blocks;
        for (bytes, of_unit) in weights.items.iter_mut().zip(units.iter()) {
            *bytes += of_unit;
        }
        weights
    }

    fn resident_on(&self, plan: &Plan, stage: usize) -> u64 {
        let sharding = &plan.sharding;
        let sharding = [sharding.weights, sharding.gradients, sharding.states];
        let key = (plan.mesh, cut(plan), sharding, stage);
        self.resident.get(key, || probe::resident(plan, stage, self.device))
    }

    /// The stages among which the fullest is.
    fn stages(&self, plan: &Plan) -> Arc<Vec<usize>> {
        self.stages.get((plan.mesh.pp, cut(plan)), || Arc::new(ends_of_runs(plan)))
    }
}

/// What decides, with pp, which layers a stage holds: chunks per stage, and the layers of the last.
fn cut(plan: &Plan) -> [usize; 2] {
    [plan.pipeline.virtual_stages, plan.last_layers()]
}

/// The first and the last of every run of stages that hold the same blocks. Along such a run, what is in flight
/// grows or shrinks evenly from stage to stage, so that none between its ends holds the most.
fn ends_of_runs(plan: &Plan) -> Vec<usize> {
    let chunk = |chunk: usize| -> Vec<bool> {
        plan.chunk_blocks(chunk).into_iter().map(|block| matches!(block, Block::Layer(_))).collect()
    };
    let shape = |stage: usize| -> Vec<Vec<bool>> {
        (stage..plan.chunks()).step_by(plan.mesh.pp).map(chunk).collect()
    };
    let shapes: Vec<Vec<Vec<bool>>> = (0..plan.mesh.pp).map(shape).collect();
    let differs = |a: Option<usize>, b: usize| a.and_then(|a| shapes.get(a)) != shapes.get(b);
    let end = |&stage: &usize| differs(stage.checked_sub(1), stage) || differs(Some(stage + 1), stage);
    (0..plan.mesh.pp).filter(end).collect()
}

fn weigh(moment: &Moment, weights: &Weights) -> u64 {
    let held = moment.held.iter().zip(&weights.items).map(|(&count, &bytes)| count as u64 * bytes);
    held.sum::<u64>() + weights.works[moment.work.index()]
}

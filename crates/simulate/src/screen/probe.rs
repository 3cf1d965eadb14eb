//! What things weigh: a rank with one layer runs each computation once, on paper, and a gauge is read around it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::paper::Log;
use kintsugi_plan::{
    Batch, Block, Coordinate, Mesh, Op, Over, Part, Pipeline, Plan, Recompute, Sharding, Unit,
};
use kintsugi_rank::{Rank, paper_groups};
use kintsugi_spec::ModelSpec;
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Arena, Backend, Block as MemoryBlock, Category, Device, Memory, Place, Usage};

use super::items::{ITEMS, Item, WORKS, Work};
use crate::predict::Blank;

/// The bytes of each kind of thing, and what each computation takes for a moment beyond what was held before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weights {
    pub items: [u64; ITEMS],
    pub works: [u64; WORKS],
}

/// What stays on a rank of a stage throughout.
pub(super) fn resident(plan: &Plan, stage: usize, device: Device) -> u64 {
    Probe::new(plan, stage, device).gauge.live.get()
}

/// What blocks leave behind and take: follows from tp, micro-batch, sequence parallelism and recomputation.
pub(super) fn blocks(plan: &Plan, device: Device) -> Weights {
    let plan = single_layer(plan, Sharding { weights: 1, gradients: 1, states: 1, ..plan.sharding });
    let mut weights = Weights::default();
    for parts in [&[Part::Both][..], &[Part::Input, Part::Weight]] {
        train(&mut Probe::new(&plan, 0, device), &plan, parts, &mut weights);
    }
    if plan.run.eval_every > 0 {
        evaluate(&mut Probe::new(&plan, 0, device), &mut weights);
    }
    weights
}

/// What whole units take: follows from tp and dp.
pub(super) fn units(plan: &Plan, device: Device) -> [u64; ITEMS] {
    let mut items = [0; ITEMS];
    let dp = plan.mesh.dp;
    if dp == 1 {
        return items;
    }
    let sharded = Sharding { weights: dp, gradients: dp, states: dp, ..plan.sharding };
    let plan = single_layer(plan, sharded);
    let mut probe = Probe::new(&plan, 0, device);
    for unit in plan.units() {
        items[Item::Gathered(unit.into()).index()] = probe.run(Op::GatherStart { unit }).added();
        probe.run(Op::GatherWait { unit });
    }
    train(&mut probe, &plan, &[Part::Both], &mut Weights::default());
    for unit in plan.units() {
        let over = Over::Data;
        probe.run(Op::ReduceStart { unit, over });
        items[Item::Gradient(unit.into()).index()] = probe.run(Op::ReduceWait { unit, over }).freed();
    }
    let plan = single_layer(&plan, Sharding { weights: 1, gradients: 1, ..sharded });
    let refresh = Op::RefreshStart { unit: Unit::Head };
    items[Item::Placeholder.index()] = Probe::new(&plan, 0, device).run(refresh).added();
    items
}

/// Runs embedding, layer and head forward and backward.
fn train(probe: &mut Probe, plan: &Plan, parts: &[Part], weights: &mut Weights) {
    let (layer, micro) = (Block::Layer(0), 0);
    // On a single stage both the tokens and the targets are loaded, and where documents begin if they are masked.
    let ids = probe.run(Op::Load { micro }).added() / if plan.masks_documents() { 3 } else { 2 };
    let stream = probe.work(Op::Forward { block: Block::Embedding, micro }, weights).added();
    let kept = probe.work(Op::Forward { block: layer, micro }, weights).added();
    let head = probe.work(Op::Forward { block: Block::Head, micro }, weights).added_to(stream + ids);
    let head_parts = probe.backward(Block::Head, parts, weights);
    let saved = if plan.memory.recompute == Recompute::Full {
        probe.work(Op::Recompute { block: layer, micro }, weights).added_to(kept)
    } else {
        kept
    };
    let layer_parts = probe.backward(layer, parts, weights);
    probe.backward(Block::Embedding, parts, weights);
    let mut set = |item: Item, bytes| weights.items[item.index()] = bytes;
    set(Item::Stream, stream);
    set(Item::Ids, ids);
    set(Item::KeptLayer, kept);
    set(Item::SavedLayer, saved);
    set(Item::SavedHead, head);
    if let ([_, head], [_, layer]) = (&head_parts[..], &layer_parts[..]) {
        set(Item::DeferredHead, head.freed());
        set(Item::DeferredLayer, layer.freed());
    }
}

/// Runs embedding, layer and head for the loss alone.
fn evaluate(probe: &mut Probe, weights: &mut Weights) {
    let micro = 0;
    probe.run(Op::Load { micro });
    for block in [Block::Embedding, Block::Layer(0), Block::Head] {
        probe.work(Op::Evaluate { block, micro }, weights);
    }
}

/// The plan with one layer on one stage.
fn single_layer(plan: &Plan, sharding: Sharding) -> Plan {
    let mesh = Mesh { pp: 1, ..plan.mesh };
    Plan {
        model: ModelSpec { layers: 1, ..plan.model.clone() },
        batch: Batch { global: plan.batch.micro * mesh.dp, ..plan.batch },
        pipeline: Pipeline { virtual_stages: 1, layers: vec![1], ..plan.pipeline.clone() },
        mesh,
        sharding,
        ..plan.clone()
    }
}

/// What an op did to memory.
#[derive(Clone, Copy, Debug)]
struct Effect {
    /// Bytes more than before, at the worst moment.
    rise: u64,
    /// Bytes more or fewer than before, afterwards.
    change: i64,
}

impl Effect {
    fn added(self) -> u64 {
        self.added_to(0)
    }

    fn added_to(self, bytes: u64) -> u64 {
        bytes.checked_add_signed(self.change).expect("an op that leaves something behind")
    }

    fn freed(self) -> u64 {
        u64::try_from(-self.change).expect("an op that frees something")
    }
}

struct Probe {
    rank: Rank,
    gauge: Rc<Gauge>,
}

impl Probe {
    fn new(plan: &Plan, stage: usize, device: Device) -> Self {
        let gauge = Rc::new(Gauge::default());
        let memory: Rc<dyn Memory> = Rc::clone(&gauge) as Rc<dyn Memory>;
        let backend: Rc<dyn Backend> = Rc::new(Paper::over(device, memory));
        let at = Coordinate { pp: stage, dp: 0, tp: 0 };
        let groups = paper_groups(plan, at, &Rc::new(RefCell::new(Log::default())));
        Probe { rank: Rank::new(Arc::new(plan.clone()), at, backend, groups), gauge }
    }

    fn run(&mut self, op: Op) -> Effect {
        let before = self.gauge.live.get();
        self.gauge.highest.set(before);
        self.rank.execute(&op, &mut Blank);
        Effect {
            rise: self.gauge.highest.get() - before,
            change: self.gauge.live.get() as i64 - before as i64,
        }
    }

    /// Runs a computation and notes what it takes for a moment.
    fn work(&mut self, op: Op, weights: &mut Weights) -> Effect {
        let effect = self.run(op);
        let work = match op {
            Op::Forward { block, .. } => Work::Forward(block.into()),
            Op::Evaluate { block, .. } => Work::Evaluate(block.into()),
            Op::Recompute { .. } => Work::Recompute,
            Op::Backward { block, part, .. } => Work::Backward(block.into(), part),
            other => unreachable!("{other} computes nothing"),
        };
        weights.works[work.index()] = effect.rise;
        effect
    }

    fn backward(&mut self, block: Block, parts: &[Part], weights: &mut Weights) -> Vec<Effect> {
        parts.iter().map(|&part| self.work(Op::Backward { block, micro: 0, part }, weights)).collect()
    }
}

/// Memory that is only weighed.
#[derive(Debug, Default)]
struct Gauge {
    live: Cell<u64>,
    highest: Cell<u64>,
}

impl Memory for Gauge {
    fn place(&self) -> Place {
        Place::Paper
    }

    fn allocate(&self, bytes: u64, category: Category) -> MemoryBlock {
        let bytes = Arena::rounded(bytes);
        self.live.set(self.live.get() + bytes);
        self.highest.set(self.highest.get().max(self.live.get()));
        MemoryBlock { address: 0, bytes, category }
    }

    fn release(&self, block: MemoryBlock) {
        self.live.set(self.live.get() - block.bytes);
    }

    fn peak(&self) -> Usage {
        Usage::default()
    }

    fn reserved(&self) -> u64 {
        self.highest.get()
    }
}

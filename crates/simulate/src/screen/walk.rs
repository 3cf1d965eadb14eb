//! The program of a stage, walked with counts instead of bytes: when the stage holds the most.
//!
//! Which moment is the worst depends on what things weigh, but few can be: those that no other moment exceeds in
//! every kind of thing. A walk keeps these, and serves every shape that runs the same program.

use kintsugi_plan::{Block, Op, Over, Part, Plan, Program, Recompute, ScheduleKind, Unit, When};

use super::items::{BlockKind, Holding, ITEMS, Item, Work};

/// What a stage holds at a moment, and what it is about to compute.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub held: Holding,
    pub work: Work,
}

impl Moment {
    /// Whether this one weighs at least as much as the other, whatever things weigh.
    fn covers(&self, other: &Moment) -> bool {
        (self.work == other.work || other.work == Work::Rest)
            && self.held.iter().zip(&other.held).all(|(mine, its)| mine >= its)
    }
}

/// All of a plan that decides the programs of its stages, for one model and one choice of prefetch and overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Structure {
    pp: usize,
    schedule: ScheduleKind,
    virtual_stages: usize,
    last_layers: usize,
    micro_batches: usize,
    recompute: bool,
    sharded: (bool, bool, bool),
    gather: Option<When>,
    reduce: When,
}

impl Structure {
    pub(super) fn of(plan: &Plan) -> Self {
        let sharding = &plan.sharding;
        let micro_batches = match plan.pipeline.schedule {
            ScheduleKind::GPipe => plan.micro_batches(),
            _ => plan.micro_batches().min(enough(plan)),
        };
        Structure {
            pp: plan.mesh.pp,
            schedule: plan.pipeline.schedule,
            virtual_stages: plan.pipeline.virtual_stages,
            last_layers: plan.last_layers(),
            micro_batches,
            recompute: plan.memory.recompute == Recompute::Full,
            sharded: (sharding.weights > 1, sharding.gradients > 1, sharding.states > 1),
            gather: (sharding.weights > 1).then_some(sharding.gather),
            reduce: sharding.reduce,
        }
    }
}

/// Micro-batches after which a schedule only repeats itself.
fn enough(plan: &Plan) -> usize {
    // A gather may be started so many blocks, and so at most so many micro-batches, ahead.
    let ahead = if plan.sharding.weights > 1 { plan.pipeline.prefetch } else { 0 };
    match plan.pipeline.schedule {
        ScheduleKind::GPipe => 4 + 2 * ahead,
        ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubble => plan.mesh.pp + 3 + ahead,
        ScheduleKind::Interleaved => (4 + ahead.div_ceil(plan.mesh.pp)) * plan.mesh.pp,
    }
}

/// The worst moments of a stage, those of evaluations included.
pub(super) fn worst_moments(plan: &Plan, stage: usize) -> Vec<Moment> {
    let micro_batches = plan.micro_batches();
    let played = micro_batches.min(enough(plan));
    let short;
    let plan = if played < micro_batches {
        short = plan.with_micro_batches(played);
        &short
    } else {
        plan
    };
    let mut walk = Walk::new(plan, stage);
    // GPipe keeps every micro-batch: the ones left out are added when half of the others have been run forward, and
    // taken away when half of them have been run backward.
    let skip = match plan.pipeline.schedule {
        ScheduleKind::GPipe => micro_batches - played,
        _ => 0,
    };
    walk.run(&plan.program(stage), skip);
    if plan.run.eval_every > 0 {
        walk.run(&plan.evaluation(stage, played), 0);
    }
    walk.worst
}

struct Walk<'a> {
    plan: &'a Plan,
    first_stage: bool,
    last_stage: bool,
    /// Between which layers the beginnings of documents are needed, if at all.
    masked: Option<[Block; 2]>,
    /// What a layer leaves behind in its forward.
    layer: Item,
    held: Holding,
    /// The units whose whole gradient is there, where gradients are sharded.
    gradients: Vec<Unit>,
    worst: Vec<Moment>,
}

impl<'a> Walk<'a> {
    fn new(plan: &'a Plan, stage: usize) -> Self {
        let full = plan.memory.recompute == Recompute::Full;
        Walk {
            plan,
            first_stage: stage == 0,
            last_stage: stage + 1 == plan.mesh.pp,
            masked: plan.masks_documents().then(|| plan.outer_layers(stage)),
            layer: if full { Item::KeptLayer } else { Item::SavedLayer },
            held: [0; ITEMS],
            gradients: Vec::new(),
            worst: Vec::new(),
        }
    }

    fn run(&mut self, program: &Program, skip: usize) {
        let mut jump = Jump { skip, half: self.plan.micro_batches() / 2, ..Jump::default() };
        for &op in &program.ops {
            if skip > 0 {
                jump.before(op, &mut self.held);
            }
            self.step(op);
        }
        debug_assert!(self.held.iter().all(|&count| count == 0), "{:?} is left over", self.held);
    }

    /// One op: what it adds, the moment at which it takes the most, and what it takes away.
    fn step(&mut self, op: Op) {
        match op {
            Op::Load { .. } => {
                let loaded = [self.first_stage, self.last_stage, self.masked.is_some()];
                self.add(Item::Ids, loaded.map(i32::from).iter().sum());
                self.note(Work::Rest);
            }
            Op::Forward { block, .. } => self.forward(block),
            Op::Evaluate { block, .. } => self.evaluate(block),
            Op::Recompute { .. } => {
                self.note(Work::Recompute);
                self.add(Item::KeptLayer, -1);
                self.add(Item::SavedLayer, 1);
            }
            Op::Backward { block, part, .. } => self.backward(block, part),
            Op::GatherStart { unit } => self.take(Item::Gathered(unit.into())),
            Op::Release { unit } => self.add(Item::Gathered(unit.into()), -1),
            Op::ReduceStart { unit, over: Over::Data } => self.gradients.retain(|&other| other != unit),
            Op::ReduceWait { unit, over: Over::Data } if self.plan.sharding.gradients > 1 => {
                self.add(Item::Gradient(unit.into()), -1);
            }
            Op::ReceiveStart { .. } => self.take(Item::Stream),
            Op::SendWait { .. } => self.add(Item::Stream, -1),
            Op::RefreshStart { .. } => self.take(Item::Placeholder),
            Op::RefreshWait { .. } => self.add(Item::Placeholder, -1),
            _ => {}
        }
    }

    fn forward(&mut self, block: Block) {
        self.note(Work::Forward(block.into()));
        match block {
            Block::Embedding => self.add(Item::Stream, 1),
            Block::Layer(_) => self.add(self.layer, 1),
            Block::Head => {
                self.add(Item::Stream, -1);
                self.add(Item::Ids, -1);
                self.add(Item::SavedHead, 1);
            }
        }
    }

    fn evaluate(&mut self, block: Block) {
        self.note(Work::Evaluate(block.into()));
        match block {
            Block::Embedding => {
                self.add(Item::Stream, 1);
                self.add(Item::Ids, -1);
            }
            Block::Layer(_) => self.forget_documents(block, 1),
            Block::Head => {
                self.add(Item::Stream, -1);
                self.add(Item::Ids, -1);
            }
        }
    }

    fn backward(&mut self, block: Block, part: Part) {
        if self.plan.sharding.gradients > 1 {
            self.make_gradients(block);
        }
        let kind = BlockKind::from(block);
        self.note(Work::Backward(kind, part));
        let (saved, deferred) = match kind {
            BlockKind::Embedding => {
                if part != Part::Input {
                    self.add(Item::Stream, -1);
                    self.add(Item::Ids, -1);
                }
                return;
            }
            BlockKind::Layer => (Item::SavedLayer, Item::DeferredLayer),
            BlockKind::Head => (Item::SavedHead, Item::DeferredHead),
        };
        if part != Part::Weight {
            self.forget_documents(block, 0);
            self.add(saved, -1);
            self.add(Item::Stream, i32::from(kind == BlockKind::Head));
        }
        match part {
            Part::Both => {}
            Part::Input => self.add(deferred, 1),
            Part::Weight => self.add(deferred, -1),
        }
    }

    /// Where documents begin is not needed after the last evaluation or backward of a layer.
    fn forget_documents(&mut self, block: Block, end: usize) {
        if self.masked.is_some_and(|layers| layers[end] == block) {
            self.add(Item::Ids, -1);
        }
    }

    fn make_gradients(&mut self, block: Block) {
        for unit in self.plan.block_units(block) {
            if !self.gradients.contains(&unit) {
                self.gradients.push(unit);
                self.add(Item::Gradient(unit.into()), 1);
            }
        }
    }

    fn take(&mut self, item: Item) {
        self.add(item, 1);
        self.note(Work::Rest);
    }

    fn add(&mut self, item: Item, count: i32) {
        self.held[item.index()] += count;
    }

    fn note(&mut self, work: Work) {
        let moment = Moment { held: self.held, work };
        if self.worst.iter().rev().any(|worst| worst.covers(&moment)) {
            return;
        }
        self.worst.retain(|worst| !moment.covers(worst));
        self.worst.push(moment);
    }
}

/// Adds what the micro-batches that are left out would hold.
#[derive(Default)]
struct Jump {
    skip: usize,
    /// The micro-batch at which they are added, and taken away.
    half: usize,
    /// What was held when the micro-batch before began.
    before: Option<Holding>,
    /// What each of them adds.
    each: Option<Holding>,
    done: bool,
}

impl Jump {
    fn before(&mut self, op: Op, held: &mut Holding) {
        let change = |held: &mut Holding, each: &Holding, times: i32| {
            for (count, each) in held.iter_mut().zip(each) {
                *count += times * each;
            }
        };
        match op {
            Op::Forward { micro, .. } if self.before.is_none() && micro + 1 == self.half => {
                self.before = Some(*held);
            }
            Op::Forward { micro, .. } if self.each.is_none() && micro == self.half => {
                let before = self.before.expect("micro-batches come in order");
                let each = std::array::from_fn(|i| held[i] - before[i]);
                change(held, &each, self.skip as i32);
                self.each = Some(each);
            }
            Op::Backward { micro, .. } | Op::Recompute { micro, .. } if !self.done && micro == self.half => {
                let each = self.each.expect("all forwards come before the backwards");
                change(held, &each, -(self.skip as i32));
                self.done = true;
            }
            _ => {}
        }
    }
}

//! Programs made small and flat, so that they can be played in microseconds: numbers instead of names.

use kintsugi_plan::{Axis, Block, Message, MessageKind, Op, Over, Part, Plan, ScheduleKind, Unit};

/// One op as the player sees it. `u8`s name kinds of ops, `u16`s transfers of the stage's own, `u32`s messages.
#[derive(Clone, Copy, Debug)]
pub(super) enum Code {
    /// Kernels, and the transfers between them.
    Run(u8),
    /// The same for all that the stage holds.
    Whole(u8),
    /// Runs something and then starts a transfer.
    Start(u8, u16),
    /// Only starts a transfer.
    StartOnly(u8, u16),
    /// Starts a sum of a few numbers.
    StartSum(Axis, u16),
    /// Waits for a transfer.
    Wait(u16),
    /// Waits for a transfer and then runs something.
    WaitRun(u8, u16),
    SendActivation(u32),
    SendGradient(u32),
    Expect(u32),
    Arrive(u32),
    /// What stages do together.
    JoinTied(u8),
    WaitTied(u8),
    JoinSum,
    WaitSum,
    /// The beginning of a period of the steady part: of its forwards, or where these are apart, of its backwards.
    Cut(Phase),
}

/// Which part of a schedule repeats itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Forward = 0,
    Backward = 1,
}

/// The codes of every stage of a plan.
#[derive(Debug)]
pub(super) struct Codes {
    pub stages: Vec<Vec<Code>>,
    /// The most transfers of its own that a stage may have under way.
    pub transfers: usize,
    /// Messages in all.
    pub messages: usize,
}

/// Kinds of ops that cost the same on every stage.
pub(super) const KINDS: usize = 40;
/// The first kind that is about a unit and not about a block.
pub(super) const UNIT_KINDS: usize = 14;
/// The ops over a whole stage.
pub(super) const WHOLE: [Op; 4] = [Op::Begin, Op::Measure, Op::Clip, Op::Step];

/// An op of every kind, in order.
pub(super) fn representatives() -> [Op; KINDS] {
    let blocks = [Block::Embedding, Block::Layer(0), Block::Head];
    let units = [Unit::Table, Unit::Positions, Unit::Layer(0), Unit::Head];
    let micro = 0;
    let mut ops = vec![Op::Load { micro }];
    ops.extend(blocks.map(|block| Op::Forward { block, micro }));
    ops.push(Op::Recompute { block: Block::Layer(0), micro });
    for part in [Part::Both, Part::Input, Part::Weight] {
        ops.extend(blocks.map(|block| Op::Backward { block, micro, part }));
    }
    ops.extend(units.map(|unit| Op::GatherStart { unit }));
    for over in [Over::Tensor, Over::Data] {
        ops.extend(units.map(|unit| Op::ReduceStart { unit, over }));
        ops.extend(units.map(|unit| Op::ReduceWait { unit, over }));
    }
    ops.extend(units.map(|unit| Op::RefreshStart { unit }));
    let (unit, over) = (Unit::Table, Over::Tied);
    ops.extend([Op::ReduceStart { unit, over }, Op::ReduceWait { unit, over }]);
    ops.try_into().expect("as many as there are kinds")
}

impl Codes {
    /// The programs of a plan.
    pub(super) fn of(plan: &Plan) -> Self {
        let names = Names::of(plan);
        Codes {
            stages: (0..plan.mesh.pp).map(|stage| codes(plan, stage, &names)).collect(),
            transfers: 3 * (plan.model.layers + 3) + 1,
            messages: 2 * plan.chunks() * plan.micro_batches(),
        }
    }
}

/// The periods at the end of the steady part whose beginnings are marked.
pub(super) const CUTS: usize = 16;

fn codes(plan: &Plan, stage: usize, names: &Names) -> Vec<Code> {
    let program = plan.program(stage);
    let first = plan.stage_blocks(stage)[0];
    let mut marks = Marks::new(plan);
    let mut codes = Vec::with_capacity(program.ops.len() + 2 * CUTS);
    for &op in &program.ops {
        codes.extend(marks.before(op, first).map(Code::Cut));
        codes.extend(names.code(op));
    }
    codes
}

/// Where periods begin.
struct Marks {
    period: usize,
    /// The first micro-batch whose period is marked.
    from: usize,
    gpipe: bool,
    /// The micro-batch whose backwards have been marked last.
    backward: Option<usize>,
}

impl Marks {
    fn new(plan: &Plan) -> Self {
        let (micro_batches, period) = (plan.micro_batches(), plan.period());
        Marks {
            period,
            from: micro_batches.saturating_sub(CUTS * period),
            gpipe: plan.pipeline.schedule == ScheduleKind::GPipe,
            backward: None,
        }
    }

    fn before(&mut self, op: Op, first: Block) -> Option<Phase> {
        match op {
            Op::Forward { block, micro } if block == first => {
                (micro >= self.from && micro.is_multiple_of(self.period)).then_some(Phase::Forward)
            }
            Op::Recompute { micro, .. } | Op::Backward { micro, .. }
                if self.gpipe && micro >= self.from && self.backward != Some(micro) =>
            {
                self.backward = Some(micro);
                Some(Phase::Backward)
            }
            _ => None,
        }
    }
}

/// The numbers of blocks, units and messages.
struct Names {
    micro_batches: u32,
    chunks: u32,
    chunk_of_layer: Vec<u32>,
    norm: u16,
}

impl Names {
    fn of(plan: &Plan) -> Self {
        let layers = plan.pipeline.layers.iter().enumerate();
        Names {
            micro_batches: plan.micro_batches() as u32,
            chunks: plan.chunks() as u32,
            chunk_of_layer: layers.flat_map(|(chunk, &count)| vec![chunk as u32; count]).collect(),
            norm: 3 * (plan.model.layers as u16 + 3),
        }
    }

    fn code(&self, op: Op) -> Option<Code> {
        let whole = |i: u8| Some(Code::Whole(i));
        match op {
            Op::Begin => whole(0),
            Op::Measure => whole(1),
            Op::Clip => whole(2),
            Op::Step => whole(3),
            Op::Load { .. } => Some(Code::Run(0)),
            Op::Forward { block, .. } => Some(Code::Run(1 + kind(block))),
            Op::Recompute { .. } => Some(Code::Run(4)),
            Op::Backward { block, part, .. } => Some(Code::Run(5 + 3 * part as u8 + kind(block))),
            Op::GatherStart { unit } => Some(Code::Start(14 + unit_kind(unit), transfer(unit, 0))),
            Op::GatherWait { unit } => Some(Code::Wait(transfer(unit, 0))),
            Op::ReduceStart { over: Over::Tied, .. } => Some(Code::JoinTied(38)),
            Op::ReduceWait { over: Over::Tied, .. } => Some(Code::WaitTied(39)),
            Op::ReduceStart { unit, over } => {
                Some(Code::Start(18 + reduction(over) + unit_kind(unit), transfer(unit, 1)))
            }
            Op::ReduceWait { unit, over } => {
                Some(Code::WaitRun(22 + reduction(over) + unit_kind(unit), transfer(unit, 1)))
            }
            Op::RefreshStart { unit } => Some(Code::StartOnly(34 + unit_kind(unit), transfer(unit, 2))),
            Op::RefreshWait { unit } => Some(Code::Wait(transfer(unit, 2))),
            Op::SendStart { message } => Some(match message.kind {
                MessageKind::Activation => Code::SendActivation(self.message(message)),
                MessageKind::Gradient => Code::SendGradient(self.message(message)),
            }),
            Op::ReceiveStart { message } => Some(Code::Expect(self.message(message))),
            Op::SendWait { message } | Op::ReceiveWait { message } => {
                Some(Code::Arrive(self.message(message)))
            }
            Op::NormStart { axis: Axis::Pipeline } => Some(Code::JoinSum),
            Op::NormWait { axis: Axis::Pipeline } => Some(Code::WaitSum),
            Op::NormStart { axis } => Some(Code::StartSum(axis, self.norm)),
            Op::NormWait { .. } => Some(Code::Wait(self.norm)),
            // What takes no time, and what no training step has.
            _ => None,
        }
    }

    /// Both stages name a message by the block that receives it, so its chunk tells it from all others of its kind.
    fn message(&self, message: Message) -> u32 {
        let Block::Layer(layer) = message.block else { unreachable!("chunks meet between layers") };
        let row = message.kind as u32 * self.chunks + self.chunk_of_layer[layer];
        row * self.micro_batches + message.micro as u32
    }
}

fn kind(block: Block) -> u8 {
    match block {
        Block::Embedding => 0,
        Block::Layer(_) => 1,
        Block::Head => 2,
    }
}

fn unit_kind(unit: Unit) -> u8 {
    match unit {
        Unit::Table => 0,
        Unit::Positions => 1,
        Unit::Layer(_) => 2,
        Unit::Head => 3,
    }
}

fn reduction(over: Over) -> u8 {
    if over == Over::Data { 8 } else { 0 }
}

/// The number of a transfer: of which unit, and which of three kinds.
fn transfer(unit: Unit, which: u16) -> u16 {
    let unit = match unit {
        Unit::Table => 0,
        Unit::Positions => 1,
        Unit::Head => 2,
        Unit::Layer(i) => 3 + i as u16,
    };
    3 * unit + which
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::resolve;

    use super::*;

    #[test]
    fn every_kind_is_where_its_representative_is() {
        let plan = resolve(None, "", &[]).expect("the demo");
        let names = Names::of(&plan);
        for (i, op) in representatives().into_iter().enumerate() {
            let kind = match names.code(op) {
                Some(
                    Code::Run(kind)
                    | Code::Start(kind, _)
                    | Code::StartOnly(kind, _)
                    | Code::WaitRun(kind, _)
                    | Code::JoinTied(kind)
                    | Code::WaitTied(kind),
                ) => kind,
                other => panic!("{op} is {other:?}"),
            };
            assert_eq!(usize::from(kind), i, "{op}");
        }
        for (i, op) in WHOLE.into_iter().enumerate() {
            assert!(matches!(names.code(op), Some(Code::Whole(kind)) if usize::from(kind) == i));
        }
    }
}

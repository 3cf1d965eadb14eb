//! Programs made small and flat, so that they can be played in microseconds: numbers instead of names.

use kintsugi_plan::{Axis, Block, Message, MessageKind, Op, Over, Part, Plan, ScheduleKind, Unit};

/// One op as the player sees it. `u8`s name kinds of ops, `u16`s transfers of the stage's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// Kernels, and the transfers between them: of one kind of op, or of several in a row.
    Run(u8),
    RunAll(u16),
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
    SendActivation(Name),
    SendGradient(Name),
    Expect(Name),
    Arrive(Name),
    /// What stages do together.
    JoinTied(u8),
    WaitTied(u8),
    JoinSum,
    WaitSum,
}

/// Which message: to which chunk, of what kind, and of which micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub row: u16,
    pub micro: u32,
}

impl Code {
    /// The same code for a micro-batch that comes `by` later.
    pub(super) fn later(self, by: u32) -> Code {
        let later = |Name { row, micro }| Name { row, micro: micro + by };
        match self {
            Code::SendActivation(name) => Code::SendActivation(later(name)),
            Code::SendGradient(name) => Code::SendGradient(later(name)),
            Code::Expect(name) => Code::Expect(later(name)),
            Code::Arrive(name) => Code::Arrive(later(name)),
            other => other,
        }
    }

    /// Whether this is about a transfer of the stage's own.
    pub(super) fn transfers(self) -> bool {
        matches!(self, Code::Start(..) | Code::StartOnly(..) | Code::Wait(_) | Code::WaitRun(..))
    }

    /// Whether stages do this together, once a step.
    pub(super) fn joins(self) -> bool {
        matches!(self, Code::JoinTied(_) | Code::WaitTied(_) | Code::JoinSum | Code::WaitSum)
    }
}

/// The codes of one stage, and where its micro-batches begin.
pub(super) struct Flat {
    pub codes: Vec<Code>,
    /// Where each period's first forward is.
    pub forwards: Vec<usize>,
    /// Where each period's first backward is, if these follow all forwards.
    pub backwards: Vec<usize>,
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

/// How much of a program is meant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// All of it.
    Step,
    /// Up to the last backward, and the message that follows from it.
    Passes,
}

/// The program of a stage, flat.
pub(super) fn flat(plan: &Plan, stage: usize, extent: Extent, names: &Names) -> Flat {
    let mut program = plan.program(stage);
    if extent == Extent::Passes {
        let last = program.ops.iter().rposition(|op| matches!(op, Op::Backward { .. })).unwrap_or(0);
        let rest = program.ops.split_off(last + 1);
        program.ops.extend(rest.into_iter().filter(|op| matches!(op, Op::SendStart { .. })));
    }
    let first = plan.stage_blocks(stage)[0];
    let (period, apart) = (plan.period(), plan.pipeline.schedule == ScheduleKind::GPipe);
    let mut flat =
        Flat { codes: Vec::with_capacity(program.ops.len()), forwards: Vec::new(), backwards: Vec::new() };
    let (mut forward, mut backward) = (None, None);
    for &op in &program.ops {
        // A period begins with the message that it waits for.
        match op {
            Op::ReceiveWait { message: Message { kind: MessageKind::Activation, block, micro, .. } }
            | Op::Forward { block, micro }
                if block == first && forward != Some(micro) && micro.is_multiple_of(period) =>
            {
                forward = Some(micro);
                flat.forwards.push(flat.codes.len());
            }
            Op::ReceiveWait { message: Message { kind: MessageKind::Gradient, micro, .. } }
            | Op::Recompute { micro, .. }
            | Op::Backward { micro, .. }
                if apart && backward != Some(micro) =>
            {
                backward = Some(micro);
                flat.backwards.push(flat.codes.len());
            }
            _ => {}
        }
        flat.codes.extend(names.code(op));
    }
    flat
}

/// The numbers of blocks, units and messages.
pub(super) struct Names {
    chunks: u16,
    chunk_of_layer: Vec<u16>,
    /// The number of each layer among those of its stage.
    place_of_layer: Vec<u16>,
    norm: u16,
}

impl Names {
    pub(super) fn of(plan: &Plan) -> Self {
        let layers = plan.pipeline.layers.iter().enumerate();
        let chunk_of_layer: Vec<u16> = layers.flat_map(|(chunk, &count)| vec![chunk as u16; count]).collect();
        let mut held = vec![0; plan.mesh.pp];
        let place = |&chunk: &u16| {
            let held = &mut held[plan.stage_of_chunk(chunk.into())];
            *held += 1;
            *held - 1
        };
        let place_of_layer = chunk_of_layer.iter().map(place).collect();
        let most = held.iter().max().copied().unwrap_or(0);
        Names { chunks: plan.chunks() as u16, chunk_of_layer, place_of_layer, norm: 3 * (most + 3) }
    }

    /// The transfers that a stage may have under way.
    pub(super) fn transfers(&self) -> usize {
        usize::from(self.norm) + 1
    }

    /// The rows of messages.
    pub(super) fn rows(&self) -> usize {
        2 * usize::from(self.chunks)
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
            Op::GatherStart { unit } => Some(Code::Start(14 + unit_kind(unit), self.transfer(unit, 0))),
            Op::GatherWait { unit } => Some(Code::Wait(self.transfer(unit, 0))),
            Op::ReduceStart { over: Over::Tied, .. } => Some(Code::JoinTied(38)),
            Op::ReduceWait { over: Over::Tied, .. } => Some(Code::WaitTied(39)),
            Op::ReduceStart { unit, over } => {
                Some(Code::Start(18 + reduction(over) + unit_kind(unit), self.transfer(unit, 1)))
            }
            Op::ReduceWait { unit, over } => {
                Some(Code::WaitRun(22 + reduction(over) + unit_kind(unit), self.transfer(unit, 1)))
            }
            Op::RefreshStart { unit } => Some(Code::StartOnly(34 + unit_kind(unit), self.transfer(unit, 2))),
            Op::RefreshWait { unit } => Some(Code::Wait(self.transfer(unit, 2))),
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
    fn message(&self, message: Message) -> Name {
        let Block::Layer(layer) = message.block else { unreachable!("chunks meet between layers") };
        let row = message.kind as u16 * self.chunks + self.chunk_of_layer[layer];
        Name { row, micro: message.micro as u32 }
    }

    /// The number of a transfer on its stage: of which unit, and which of three kinds.
    fn transfer(&self, unit: Unit, which: u16) -> u16 {
        let unit = match unit {
            Unit::Table => 0,
            Unit::Positions => 1,
            Unit::Head => 2,
            Unit::Layer(i) => 3 + self.place_of_layer[i],
        };
        3 * unit + which
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

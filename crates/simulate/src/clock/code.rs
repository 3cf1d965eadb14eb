//! Programs made small and flat, so that they can be played in microseconds: numbers instead of names.

use kintsugi_plan::{Axis, Block, Message, MessageKind, Op, Over, Part, Plan, ScheduleKind, Unit};

/// One op, or one of the two things that an op does. `u8`s name kinds of ops, `u32`s transfers of the stage's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// Kernels, and the transfers between them: of the ops of a row.
    Run(u16),
    /// The same for all that the stage holds.
    Whole(u8),
    /// Starts a transfer.
    Start(u8, u32),
    /// Waits for it.
    Wait(u8, u32),
    Send(Name),
    Expect(Name),
    /// Waits for a message, as its sender or as its receiver.
    Arrive(Name),
    /// Begins what stages do together.
    Join(Joint),
    /// Waits until all have.
    Meet(Joint),
}

/// Which message: to which chunk, of what kind, and of which micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub row: u16,
    pub micro: u32,
}

/// What stages do together, once a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joint {
    Tied,
    Sum,
}

impl Name {
    /// The same message of a micro-batch that comes `by` later.
    pub(super) fn later(self, by: u32) -> Name {
        Name { micro: self.micro + by, ..self }
    }
}

impl Code {
    /// The same code for a micro-batch that comes `by` later.
    pub(super) fn later(self, by: u32) -> Code {
        match self {
            Code::Send(name) => Code::Send(name.later(by)),
            Code::Expect(name) => Code::Expect(name.later(by)),
            Code::Arrive(name) => Code::Arrive(name.later(by)),
            other => other,
        }
    }

    /// The same code for another micro-batch.
    #[cfg(test)]
    pub(super) fn renamed(self, micro: u32) -> Code {
        match self {
            Code::Send(name) => Code::Send(Name { micro, ..name }),
            Code::Expect(name) => Code::Expect(Name { micro, ..name }),
            Code::Arrive(name) => Code::Arrive(Name { micro, ..name }),
            other => other,
        }
    }

    /// The message that this is about.
    pub(super) fn message(self) -> Option<Name> {
        match self {
            Code::Send(name) | Code::Expect(name) | Code::Arrive(name) => Some(name),
            _ => None,
        }
    }

    /// Whether stages do this together.
    pub(super) fn joins(self) -> bool {
        matches!(self, Code::Join(_) | Code::Meet(_))
    }
}

/// The codes of one stage, and where its micro-batches begin.
pub(super) struct Flat {
    pub codes: Vec<Code>,
    /// Where each period's first forward is; not of interleaved schedules.
    pub forwards: Vec<usize>,
    /// Where each period's first backward is, where these follow all forwards. Interleaved schedules do the same from
    /// their second backward on, which is the first to wait until the one before it is sent.
    pub backwards: Vec<usize>,
}

/// Kinds of ops that cost the same on every stage.
pub(super) const KINDS: usize = 40;
/// The first kind that is about a unit and not about a block.
pub(super) const UNIT_KINDS: usize = 14;
/// Kinds of transfers: those that ops of a kind start, and the sums over each axis.
pub(super) const TRANSFERS: usize = KINDS + 3;
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
pub(super) fn flat(plan: &Plan, stage: usize, extent: Extent, names: &Names, rows: &mut Rows) -> Flat {
    let mut program = plan.program(stage);
    if extent == Extent::Passes {
        let last = program.ops.iter().rposition(|op| matches!(op, Op::Backward { .. })).unwrap_or(0);
        let rest = program.ops.split_off(last + 1);
        program.ops.extend(rest.into_iter().filter(|op| matches!(op, Op::SendStart { .. })));
    }
    let blocks = plan.stage_blocks(stage);
    let (first, last) = (blocks.first().copied(), blocks.last().copied());
    let (period, schedule) = (plan.period(), plan.pipeline.schedule);
    let by_forward = schedule != ScheduleKind::Interleaved;
    let by_backward = matches!(schedule, ScheduleKind::GPipe | ScheduleKind::Interleaved);
    let mut flat =
        Flat { codes: Vec::with_capacity(program.ops.len()), forwards: Vec::new(), backwards: Vec::new() };
    let (mut forward, mut backward) = (None, None);
    for &op in &program.ops {
        // A period begins with the message that it waits for.
        match op {
            Op::ReceiveWait { message: Message { kind: MessageKind::Activation, block, micro, .. } }
            | Op::Forward { block, micro }
                if by_forward && Some(block) == first && forward != Some(micro) =>
            {
                forward = Some(micro);
                rows.finish(&mut flat.codes);
                flat.forwards.push(flat.codes.len());
            }
            Op::ReceiveWait { message: Message { kind: MessageKind::Gradient, block, micro, .. } }
            | Op::Recompute { block, micro }
            | Op::Backward { block, micro, .. }
                if by_backward
                    && Some(block) == last
                    && backward != Some(micro)
                    && micro % period == 1 % period =>
            {
                backward = Some(micro);
                rows.finish(&mut flat.codes);
                flat.backwards.push(flat.codes.len());
            }
            _ => {}
        }
        names.write(op, &mut flat.codes, rows);
    }
    rows.finish(&mut flat.codes);
    flat
}

/// Kinds of ops that are run in a row: there are few such rows.
#[derive(Default)]
pub(super) struct Rows {
    pub all: Vec<Vec<u8>>,
    /// The row that goes on.
    row: Vec<u8>,
}

impl Rows {
    /// Ends the row that goes on.
    fn finish(&mut self, codes: &mut Vec<Code>) {
        if self.row.is_empty() {
            return;
        }
        let number = self.all.iter().position(|row| *row == self.row).unwrap_or_else(|| {
            self.all.push(self.row.clone());
            self.all.len() - 1
        });
        codes.push(Code::Run(number as u16));
        self.row.clear();
    }
}

/// The numbers of blocks, units and messages.
pub(super) struct Names {
    chunks: u16,
    chunk_of_layer: Vec<u16>,
    /// The number of each layer among those of its stage.
    place_of_layer: Vec<u32>,
    norm: u32,
}

impl Names {
    pub(super) fn of(plan: &Plan) -> Self {
        let layers = plan.pipeline.layers.iter().enumerate();
        let chunk_of_layer: Vec<u16> = layers.flat_map(|(chunk, &count)| vec![chunk as u16; count]).collect();
        let mut held = vec![0_u32; plan.mesh.pp];
        let place = |&chunk: &u16| {
            let held = &mut held[plan.stage_of_chunk(chunk.into())];
            *held += 1;
            *held - 1
        };
        let place_of_layer = chunk_of_layer.iter().map(place).collect();
        let most = held.iter().max().copied().unwrap_or(0);
        Names {
            chunks: plan.chunks() as u16,
            chunk_of_layer,
            place_of_layer,
            norm: UNIT_TRANSFERS * (most + 3),
        }
    }

    /// The transfers that a stage may have under way.
    pub(super) fn transfers(&self) -> usize {
        self.norm as usize + 1
    }

    /// Writes down what an op does.
    fn write(&self, op: Op, codes: &mut Vec<Code>, rows: &mut Rows) {
        let run = |rows: &mut Rows, kind: u8| rows.row.push(kind);
        let mut then = |rows: &mut Rows, code: Code| {
            rows.finish(codes);
            codes.push(code);
        };
        match op {
            Op::Begin => then(rows, Code::Whole(0)),
            Op::Measure => then(rows, Code::Whole(1)),
            Op::Clip => then(rows, Code::Whole(2)),
            Op::Step => then(rows, Code::Whole(3)),
            Op::Load { .. } => run(rows, 0),
            Op::Forward { block, .. } => run(rows, 1 + kind(block)),
            Op::Recompute { .. } => run(rows, 4),
            Op::Backward { block, part, .. } => run(rows, 5 + 3 * part as u8 + kind(block)),
            Op::GatherStart { unit } => {
                run(rows, 14 + unit_kind(unit));
                then(rows, Code::Start(14 + unit_kind(unit), self.transfer(unit, 0)));
            }
            Op::GatherWait { unit } => {
                then(rows, Code::Wait(14 + unit_kind(unit), self.transfer(unit, 0)));
            }
            Op::ReduceStart { over: Over::Tied, .. } => {
                run(rows, 38);
                then(rows, Code::Join(Joint::Tied));
            }
            Op::ReduceWait { over: Over::Tied, .. } => {
                then(rows, Code::Meet(Joint::Tied));
                run(rows, 39);
            }
            Op::ReduceStart { unit, over } => {
                let (reduce, transfer) = self.reduction(unit, over);
                run(rows, reduce);
                then(rows, Code::Start(reduce, transfer));
            }
            Op::ReduceWait { unit, over } => {
                let (reduce, transfer) = self.reduction(unit, over);
                then(rows, Code::Wait(reduce, transfer));
                run(rows, 4 + reduce);
            }
            Op::RefreshStart { unit } => {
                then(rows, Code::Start(34 + unit_kind(unit), self.transfer(unit, 3)));
            }
            Op::RefreshWait { unit } => {
                then(rows, Code::Wait(34 + unit_kind(unit), self.transfer(unit, 3)));
            }
            Op::SendStart { message } => then(rows, Code::Send(self.message(message))),
            Op::ReceiveStart { message } => then(rows, Code::Expect(self.message(message))),
            Op::SendWait { message } | Op::ReceiveWait { message } => {
                then(rows, Code::Arrive(self.message(message)));
            }
            Op::NormStart { axis: Axis::Pipeline } => then(rows, Code::Join(Joint::Sum)),
            Op::NormWait { axis: Axis::Pipeline } => then(rows, Code::Meet(Joint::Sum)),
            Op::NormStart { axis } => then(rows, Code::Start(sum_over(axis), self.norm)),
            Op::NormWait { axis } => then(rows, Code::Wait(sum_over(axis), self.norm)),
            // What takes no time, and what no training step has.
            _ => {}
        }
    }

    /// Both stages name a message by the block that receives it, so its chunk tells it from all others of its kind.
    fn message(&self, message: Message) -> Name {
        let Block::Layer(layer) = message.block else { unreachable!("chunks meet between layers") };
        let row = message.kind as u16 * self.chunks + self.chunk_of_layer[layer];
        Name { row, micro: message.micro as u32 }
    }

    /// The number of a transfer on its stage: of which unit, and which of its kinds.
    fn transfer(&self, unit: Unit, which: u32) -> u32 {
        let unit = match unit {
            Unit::Table => 0,
            Unit::Positions => 1,
            Unit::Head => 2,
            Unit::Layer(i) => 3 + self.place_of_layer[i],
        };
        UNIT_TRANSFERS * unit + which
    }

    /// The kind that starts a reduction, and the number of its transfer.
    fn reduction(&self, unit: Unit, over: Over) -> (u8, u32) {
        if over == Over::Data {
            (26 + unit_kind(unit), self.transfer(unit, 2))
        } else {
            (18 + unit_kind(unit), self.transfer(unit, 1))
        }
    }
}

/// Transfers that a unit may have: its gather, its two reductions and its refresh.
const UNIT_TRANSFERS: u32 = 4;

/// The kind of the transfer that sums over an axis.
pub(super) fn sum_over(axis: Axis) -> u8 {
    KINDS as u8
        + match axis {
            Axis::Pipeline => 0,
            Axis::Data => 1,
            Axis::Tensor => 2,
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

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    /// The codes of an op, and the kinds that it runs.
    fn written(names: &Names, op: Op) -> (Vec<Code>, Vec<u8>) {
        let (mut codes, mut rows) = (Vec::new(), Rows::default());
        names.write(op, &mut codes, &mut rows);
        rows.finish(&mut codes);
        codes.retain(|code| !matches!(code, Code::Run(_)));
        (codes, rows.all.concat())
    }

    #[test]
    fn every_kind_is_where_its_representative_is() {
        let plan = ConfigSource::demo().plan().expect("the demo");
        let names = Names::of(&plan);
        for (i, op) in representatives().into_iter().enumerate() {
            let (codes, runs) = written(&names, op);
            let kind = match (&runs[..], &codes[..]) {
                ([kind], _) | ([], [Code::Start(kind, _)]) => *kind,
                other => panic!("{op} is {other:?}"),
            };
            assert_eq!(usize::from(kind), i, "{op}");
        }
        for (i, op) in WHOLE.into_iter().enumerate() {
            assert_eq!(written(&names, op).0, [Code::Whole(i as u8)]);
        }
    }
}

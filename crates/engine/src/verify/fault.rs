//! Deliberate mistakes, to test that `verify` detects them: a check that cannot fail proves nothing.

use std::ops::Range;
use std::rc::Rc;

use kintsugi_comm::{Collective, Communicator, Pending, RankFailure, Tag};
use kintsugi_plan::{Coordinate, Group, Op, Plan, Program, Transfer};
use kintsugi_rank::{Groups, Rank, SUMS};
use kintsugi_tensor::{Backend, Buffer, DType, View};

/// A mistake that a distributed trainer could make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The reductions over dp omit one rank's contribution.
    DropRank,
    /// The gradient is summed over dp instead of averaged.
    MissingAverage,
    /// With sequence parallelism, gradients of norms are not reduced over tp.
    UnreducedNorm,
    /// The tied table's gradient is summed over the first and the last stage twice.
    TiedTwice,
    /// The tied table counts twice in the gradient norm.
    TiedNormTwice,
    /// One rank's gradients overflow.
    Overflow,
    /// The results of collectives over dp differ in their last bits on one rank, as if every rank summed in its own order.
    Drift,
}

impl Fault {
    /// Every fault with its name on the command line.
    pub const ALL: [(&'static str, Fault); 7] = [
        ("drop-rank", Fault::DropRank),
        ("missing-average", Fault::MissingAverage),
        ("unreduced-norm", Fault::UnreducedNorm),
        ("tied-twice", Fault::TiedTwice),
        ("tied-norm-twice", Fault::TiedNormTwice),
        ("overflow", Fault::Overflow),
        ("drift", Fault::Drift),
    ];

    pub(crate) fn in_groups(self, mut groups: Groups, plan: &Plan, backend: &Rc<dyn Backend>) -> Groups {
        let (replica, replicas) = (groups.get(Group::DATA).rank(), groups.get(Group::DATA).size());
        let (input_factor, output_factor) = match self {
            Fault::DropRank if replica == 0 => (0.0, 1.0),
            Fault::MissingAverage => (replicas as f32, 1.0),
            Fault::Overflow if replica == 1 => (f32::INFINITY, 1.0),
            Fault::Drift if replica == 0 => (1.0, 1.0 + 2.0 * f32::EPSILON),
            _ => return groups,
        };
        // A gradient is reduced over the innermost part first.
        let innermost = plan.sharding.groups().next();
        groups.wrap(|name, group| {
            if replicas == 1 || (name != Group::DATA && Some(name) != innermost) {
                return group;
            }
            Box::new(ScalingGroup { group, backend: Rc::clone(backend), input_factor, output_factor })
        });
        groups
    }

    pub(crate) fn in_program(self, mut program: Program) -> Program {
        match self {
            Fault::UnreducedNorm => program.ops.retain(|op| !reduces(op, Group::TENSOR)),
            Fault::TiedTwice => {
                let twice = |op| std::iter::repeat_n(op, if reduces(&op, Group::Tied) { 2 } else { 1 });
                // Start and wait are adjacent. After doubling they must alternate.
                program.ops = program.ops.into_iter().flat_map(twice).collect();
                alternate(&mut program.ops);
            }
            Fault::DropRank
            | Fault::MissingAverage
            | Fault::TiedNormTwice
            | Fault::Overflow
            | Fault::Drift => {}
        }
        program
    }

    pub(crate) fn in_rank(self, rank: &mut Rank, plan: &Plan, at: Coordinate) {
        if self == Fault::TiedNormTwice {
            rank.set_owned_units(plan.stage_units(at.pp()));
        }
    }
}

fn reduces(op: &Op, wanted: Group) -> bool {
    matches!(op.transfer(), Some(Transfer::Reduce { phase, .. }) if phase.over == wanted)
}

/// Turns start, start, wait, wait of the tied reduction into start, wait, start, wait.
fn alternate(ops: &mut [Op]) {
    if let Some(first) = ops.iter().position(|op| reduces(op, Group::Tied)) {
        ops.swap(first + 1, first + 2);
    }
}

/// A group that scales this rank's input to a sum, or this rank's result.
struct ScalingGroup {
    group: Box<dyn Communicator>,
    backend: Rc<dyn Backend>,
    input_factor: f32,
    output_factor: f32,
}

impl ScalingGroup {
    /// Scales codes by 0, or by infinity: then their scales are NaN. Another factor cannot be applied without their format.
    fn scale_codes(&self, view: View<'_>) {
        let byte = match self.input_factor {
            0.0 => 0,
            factor if factor.is_infinite() => u8::MAX,
            _ => return,
        };
        self.backend.upload_bytes(&vec![byte; view.len()], view);
    }

    fn scale(&self, view: View<'_>, factor: f32) {
        let scaled: Vec<f32> = self.backend.read(view).iter().map(|x| x * factor).collect();
        self.backend.upload(&scaled, view);
    }
}

impl Communicator for ScalingGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        // Only gradients: scaling the norm's sums would be too easy to detect.
        if collective.sums() && buffer.len() > SUMS {
            self.scale(buffer.slice(range.clone()), self.input_factor);
        }
        if collective == Collective::AllToAll {
            self.scale_codes(buffer.slice(range.start..range.start + range.len() / 2));
        }
        self.group.start(collective, buffer, range)
    }

    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.group.send(to, tag, buffer)
    }

    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.group.receive(from, tag, buffer)
    }

    fn wait(&self, pending: Pending) -> Buffer {
        let buffer = self.group.wait(pending);
        if buffer.len() > SUMS && buffer.dtype() != DType::U8 {
            self.scale(buffer.view(), self.output_factor);
        }
        buffer
    }

    fn failure(&self) -> Option<RankFailure> {
        self.group.failure()
    }
}

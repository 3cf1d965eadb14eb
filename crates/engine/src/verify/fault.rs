//! Deliberate mistakes, to test that `verify` detects them: a check that cannot fail proves nothing.

use std::sync::Arc;

use kintsugi_comm::World;
use kintsugi_plan::{Coordinate, Group, Op, Plan, Program, Transfer, Unit};
use kintsugi_rank::{Rank, SQUARES};
use kintsugi_tensor::Backend;

use super::faulty_world::FaultyWorld;

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
    /// The first two ranks of cp read each other's slices.
    SwappedSlices,
    /// The first rank of cp gives its tokens the positions of the second.
    ShiftedPositions,
    /// With context parallelism, the loss is divided by the tokens of a rank instead of those of the whole batch.
    OwnCount,
    /// The results of collectives over dp differ in their last bits on one rank, as if every rank summed in its own order.
    Drift,
}

impl Fault {
    /// Every fault with its name on the command line.
    pub const ALL: [(&'static str, Fault); 10] = [
        ("drop-rank", Fault::DropRank),
        ("missing-average", Fault::MissingAverage),
        ("unreduced-norm", Fault::UnreducedNorm),
        ("tied-twice", Fault::TiedTwice),
        ("tied-norm-twice", Fault::TiedNormTwice),
        ("overflow", Fault::Overflow),
        ("swapped-slices", Fault::SwappedSlices),
        ("shifted-positions", Fault::ShiftedPositions),
        ("own-count", Fault::OwnCount),
        ("drift", Fault::Drift),
    ];

    /// What is wrong, and where it can be, in one line.
    pub fn mistake(self) -> &'static str {
        match self {
            Fault::DropRank => "A sum over dp leaves out one rank",
            Fault::MissingAverage => "Gradients are summed over dp instead of averaged",
            Fault::UnreducedNorm => "Gradients of norms are not summed over tp, with sequence parallelism",
            Fault::TiedTwice => "The tied table's gradient is summed over the first and the last stage twice",
            Fault::TiedNormTwice => "The tied table counts twice in the gradient norm, with stages",
            Fault::Overflow => "One rank's gradients overflow, with dp",
            Fault::SwappedSlices => "Two ranks of cp read each other's slices",
            Fault::ShiftedPositions => "A rank of cp gives its tokens the positions of another one",
            Fault::OwnCount => "The loss is divided by a rank's own tokens, with cp",
            Fault::Drift => "One rank's results of collectives over dp differ by 2⁻²²",
        }
    }

    /// The ranks of a job whose communicators have this fault.
    pub fn in_world(self, world: Arc<dyn World>, plan: &Plan) -> Arc<dyn World> {
        Arc::new(FaultyWorld::new(world, self, plan))
    }

    /// A program with this fault.
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
            | Fault::SwappedSlices
            | Fault::ShiftedPositions
            | Fault::OwnCount
            | Fault::Drift => {}
        }
        program
    }

    /// Whether the fault can only be made with context parallelism.
    pub fn is_of_context(self) -> bool {
        matches!(self, Fault::SwappedSlices | Fault::ShiftedPositions | Fault::OwnCount)
    }

    /// The slices that a rank reads with this fault: those of this rank of cp.
    pub(crate) fn read_part(self, plan: &Plan, at: Coordinate) -> usize {
        match at.cp() {
            part @ 0..2 if self == Fault::SwappedSlices && plan.mesh.cp() > 1 => 1 - part,
            part => part,
        }
    }

    /// Changes what a rank's blocks assume about its tokens.
    pub(crate) fn in_rank(self, rank: &mut Rank, plan: &Plan, at: Coordinate) {
        if plan.mesh.cp() == 1 {
            return;
        }
        rank.change_shape(|shape| {
            if self == Fault::ShiftedPositions && at.cp() == 0 {
                shape.slices.part = 1;
            }
            if self == Fault::OwnCount {
                shape.tokens_per_step /= plan.mesh.cp();
            }
        });
    }

    /// Changes the sum of squares of a rank that has just measured its gradients.
    pub(crate) fn after_measuring(self, rank: &Rank, plan: &Plan, at: Coordinate, backend: &dyn Backend) {
        let has_second_copy = at.pp() > 0 && plan.holds_tied_copy(at.pp());
        // The ranks after the first `states` own the same states again.
        let is_first_owner = plan.mesh.replica(at) < plan.sharding.states;
        if self == Fault::TiedNormTwice && has_second_copy && is_first_owner {
            let table = rank.gradients().into_iter().filter(|piece| piece.unit == Unit::Table);
            let squares: f32 = table.flat_map(|piece| piece.values).map(|x| x * x).sum();
            let sum = rank.sums().slice(SQUARES..SQUARES + 1);
            backend.upload(&[backend.read(sum)[0] + squares], sum);
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

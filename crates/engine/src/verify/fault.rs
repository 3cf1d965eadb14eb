//! Deliberate mistakes, to see that `verify` notices them: a check that cannot fail proves nothing.

use std::ops::Range;
use std::rc::Rc;

use kintsugi_comm::{Collective, Communicator, Pending, Tag};
use kintsugi_plan::{Coordinate, Op, Over, Plan, Program};
use kintsugi_rank::{Groups, Rank, SUMS};
use kintsugi_tensor::{Backend, Buffer};

/// A mistake that a distributed trainer could make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The reductions over dp leave out one rank's contribution.
    DropRank,
    /// The gradient is summed over dp where its mean was meant.
    MissingAverage,
    /// Under sequence parallelism, gradients of norms are not reduced over tp.
    UnreducedNorm,
    /// The tied table's gradient is summed over the first and the last stage twice.
    TiedTwice,
    /// The tied table counts twice in the gradient norm.
    TiedNormTwice,
    /// One rank's gradients overflow.
    Overflow,
}

impl Fault {
    /// Every fault with its name on the command line.
    pub const ALL: [(&'static str, Fault); 6] = [
        ("drop-rank", Fault::DropRank),
        ("missing-average", Fault::MissingAverage),
        ("unreduced-norm", Fault::UnreducedNorm),
        ("tied-twice", Fault::TiedTwice),
        ("tied-norm-twice", Fault::TiedNormTwice),
        ("overflow", Fault::Overflow),
    ];

    pub(crate) fn in_groups(self, mut groups: Groups, backend: Rc<dyn Backend>) -> Groups {
        let factor = match self {
            Fault::DropRank if groups.data.rank() == 0 => 0.0,
            Fault::MissingAverage => groups.data.size() as f64,
            Fault::Overflow if groups.data.rank() == 1 => f64::INFINITY,
            _ => return groups,
        };
        if groups.data.size() > 1 {
            groups.data = Box::new(Scaled { group: groups.data, backend, factor });
        }
        groups
    }

    pub(crate) fn in_program(self, mut program: Program) -> Program {
        match self {
            Fault::UnreducedNorm => program.ops.retain(|op| !reduces(op, Over::Tensor)),
            Fault::TiedTwice => {
                let twice = |op| std::iter::repeat_n(op, if reduces(&op, Over::Tied) { 2 } else { 1 });
                // Start and wait are neighbours in the tail; doubled they must alternate.
                program.ops = program.ops.into_iter().flat_map(twice).collect();
                alternate(&mut program.ops);
            }
            Fault::DropRank | Fault::MissingAverage | Fault::TiedNormTwice | Fault::Overflow => {}
        }
        program
    }

    pub(crate) fn in_rank(self, rank: &mut Rank, plan: &Plan, at: Coordinate) {
        if self == Fault::TiedNormTwice {
            rank.answer_for(plan.stage_units(at.pp));
        }
    }
}

fn reduces(op: &Op, wanted: Over) -> bool {
    matches!(op, Op::ReduceStart { over, .. } | Op::ReduceWait { over, .. } if *over == wanted)
}

/// Turns start, start, wait, wait of the tied reduction into start, wait, start, wait.
fn alternate(ops: &mut [Op]) {
    if let Some(first) = ops.iter().position(|op| reduces(op, Over::Tied)) {
        ops.swap(first + 1, first + 2);
    }
}

/// A group whose sums see this rank's contribution multiplied.
struct Scaled {
    group: Box<dyn Communicator>,
    backend: Rc<dyn Backend>,
    factor: f64,
}

impl Communicator for Scaled {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        // Gradients only: the norm's sums would give the fault away too easily.
        if collective != Collective::AllGather && buffer.len() > SUMS {
            let view = buffer.slice(range.clone());
            let scaled: Vec<f32> = self.backend.read(view).iter().map(|x| x * self.factor as f32).collect();
            self.backend.upload(&scaled, view);
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
        self.group.wait(pending)
    }
}

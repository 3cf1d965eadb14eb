//! Updates of whole matrices (Muon): the layers of a round go to their owners, who orthogonalize the matrices, and back.
//!
//! A round has a slot for each owner, and the layer of a slot belongs to it. A rank begins with its shards of all slots and ends
//! with all shards of its own slot. Every all-to-all exchanges slots for the shards of one group of ranks, so the shards of a slot
//! gather in the order of the ranks, and the last group is tp: then the parts of the tp ranks follow each other, each as in the
//! flat buffer of the unit.

use std::ops::Range;

use kintsugi_comm::{Collective, Pending};
use kintsugi_plan::parameters::{PlacedParameter, TensorSplit};
use kintsugi_plan::{Coordinate, Group, MatrixOp, OptimizerKind, Plan, Unit};
use kintsugi_tensor::ops::{
    Columns, CopyColumns, Gradient, Linear, LinearBackwardInput, LinearBackwardWeight, Momentum, Normalize,
    ScaledSum, Update, UpdateRule,
};
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use crate::Groups;
use crate::rank::Rank;

/// The coefficients of the iteration x ← a·x + (b·xxᵀ + c·(xxᵀ)²)·x, and the number of its steps.
const COEFFICIENTS: (f64, f64, f64) = (3.4445, -4.775, 2.0315);
const STEPS: usize = 5;
/// The least norm that a matrix is divided by.
const MIN_NORM: f64 = 1e-7;

/// The rounds of a rank.
pub(crate) struct Rounds {
    /// The layers of the slots of every round. In the last one there may be fewer than slots.
    layers: Vec<Vec<Unit>>,
    /// The slot of this rank.
    own_slot: usize,
    /// The round that is updated.
    running: Option<Round>,
}

/// The matrices of a round on one rank.
struct Round {
    /// Its number.
    number: usize,
    /// With several owners two halves: what is sent, and what was received. `None` during a transfer.
    buffer: Option<Buffer>,
    pending: Option<Pending>,
    /// Elements of this rank's shard of a layer.
    shard: usize,
    /// Elements of its shards of all slots.
    len: usize,
    /// The ranks whose shards the all-to-alls of the running direction have gathered.
    gathered: usize,
}

impl Round {
    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("no transfer of the round is under way")
    }

    /// Where the last all-to-all, if there is any, has left the elements.
    fn arrived(&self) -> View<'_> {
        let buffer = self.buffer();
        buffer.slice(buffer.len() - self.len..buffer.len())
    }

    /// Where the first all-to-all takes them from.
    fn leaving(&self) -> View<'_> {
        self.buffer().slice(0..self.len)
    }
}

impl Rounds {
    /// The rounds of a plan on the rank at `at`.
    pub(crate) fn new(plan: &Plan, at: Coordinate, groups: &Groups) -> Self {
        // The places of the rank in the groups are the digits of its slot, the first group's first.
        let next_digit = |slot, group| {
            let group = groups.get(group);
            slot * group.size() + group.rank()
        };
        let own_slot = plan.owner_groups().into_iter().fold(0, next_digit);
        Rounds { layers: plan.matrix_rounds(at.pp()), own_slot, running: None }
    }

    fn running(&self) -> &Round {
        self.running.as_ref().expect("a round has begun")
    }

    fn running_mut(&mut self) -> &mut Round {
        self.running.as_mut().expect("a round has begun")
    }

    /// The layer of this rank's slot, if it has one.
    fn own_layer(&self) -> Option<Unit> {
        self.layers[self.running().number].get(self.own_slot).copied()
    }

    /// The elements of a layer's slot.
    fn of_layer(&self, unit: Unit) -> Range<usize> {
        let round = self.running();
        let slot = self.layers[round.number].iter().position(|&layer| layer == unit);
        let slot = slot.unwrap_or_else(|| panic!("{unit} is not in the round"));
        slot * round.shard..(slot + 1) * round.shard
    }
}

/// The type in which directions travel and are orthogonalized: that of the products, but never fp16, which is too narrow for
/// gradients.
pub(crate) fn direction_type(compute: DType) -> DType {
    if compute == DType::F16 { DType::BF16 } else { compute }
}

impl Rank {
    pub(crate) fn matrices(&mut self, kind: MatrixOp, unit: Unit) {
        match kind {
            MatrixOp::Begin => self.begin_round(unit),
            MatrixOp::Collect => self.collect(unit),
            MatrixOp::Orthogonalize => self.orthogonalize(),
            MatrixOp::Apply => self.apply(unit),
            MatrixOp::End => self.rounds.running = None,
        }
    }

    fn begin_round(&mut self, first: Unit) {
        let number = self.rounds.layers.iter().position(|layers| layers[0] == first);
        let number = number.expect("a round begins with this layer");
        let (shard, owners) = (self.unit(first).owned_len(), self.plan.owners());
        let (halves, category) =
            if owners > 1 { (2, Category::Communication) } else { (1, Category::Workspace) };
        let len = owners * shard;
        let buffer = self.backend.allocate(halves * len, direction_type(self.shape.compute), category);
        let buffer = Some(buffer);
        self.rounds.running = Some(Round { number, buffer, pending: None, shard, len, gathered: 1 });
    }

    fn collect(&self, unit: Unit) {
        let OptimizerKind::Muon { momentum: beta, nesterov, .. } = self.plan.optimizer.kind else {
            unreachable!("only Muon has rounds of matrices")
        };
        let to = self.rounds.running().leaving().slice(self.rounds.of_layer(unit));
        for [gradient, momentum, out] in self.unit(unit).directions(to) {
            let control = self.control.view();
            self.backend.momentum(Momentum { gradient, momentum, out, control, beta, nesterov });
        }
    }

    pub(crate) fn exchange_start(&mut self, over: Group) {
        let group = self.groups.get(over);
        let round = self.rounds.running_mut();
        let (ranks, gathered, len) = (group.size(), round.gathered, round.len);
        let buffer = round.buffer.take().expect("one transfer of a round at a time");
        if gathered > 1 {
            // From [gathered][ranks][rest] to [ranks][gathered][rest], so that what goes to one rank is contiguous.
            let rest = len / (gathered * ranks);
            for rank in 0..ranks {
                let view = buffer.slice(len..2 * len);
                let from = Columns { view, width: ranks * rest, first: rank * rest };
                let view = buffer.slice(rank * gathered * rest..(rank + 1) * gathered * rest);
                let to = Columns { view, width: rest, first: 0 };
                self.backend.copy_columns(CopyColumns { from, to, rows: gathered, columns: rest });
            }
        }
        let all = 0..buffer.len();
        round.pending = Some(group.start(Collective::AllToAll, buffer, all));
    }

    pub(crate) fn exchange_wait(&mut self, over: Group) {
        let group = self.groups.get(over);
        let round = self.rounds.running_mut();
        round.buffer = Some(group.wait(round.pending.take().expect("a wait follows its start")));
        round.gathered *= group.size();
    }

    fn orthogonalize(&mut self) {
        self.rounds.running_mut().gathered = 1;
        let (round, tp) = (self.rounds.running(), self.plan.mesh.tp());
        let (own, first) = (self.rounds.own_layer(), self.rounds.layers[round.number][0]);
        let matrices = Matrices { backend: &*self.backend, tp, part_len: round.len / tp };
        for placed in &self.unit(own.unwrap_or(first)).layout.placed {
            if self.plan.optimizer.kind.needs_whole(&placed.parameter) {
                // A rank without a layer has the same scratch, so that all ranks of a stage have the same peak.
                let scratch = Scratch::new(&*self.backend, placed.parameter.shape, round.buffer().dtype());
                if own.is_some() {
                    matrices.orthogonalize(placed, &scratch, round.arrived(), round.leaving());
                }
            }
        }
    }

    fn apply(&self, unit: Unit) {
        let from = self.rounds.running().arrived().slice(self.rounds.of_layer(unit));
        for parameters in self.unit(unit).directed(from) {
            let (control, rule) = (self.control.view(), UpdateRule::Direction);
            self.backend.update(Update { parameters: &[parameters], control, rule });
        }
    }
}

/// The matrices of a layer, whose tp parts follow each other.
struct Matrices<'a> {
    backend: &'a dyn Backend,
    tp: usize,
    /// Elements of a tp part.
    part_len: usize,
}

impl Matrices<'_> {
    /// Orthogonalizes one matrix of `from` into `to`.
    fn orthogonalize(&self, placed: &PlacedParameter, scratch: &Scratch, from: View, to: View) {
        let x = scratch.x.view();
        for part in 0..self.tp {
            self.copy_part(placed, part, from, x, false);
        }
        newton_schulz(self.backend, scratch, placed.parameter.shape);
        for part in 0..self.tp {
            self.copy_part(placed, part, to, x, true);
        }
    }

    /// Copies the part of a tp rank to its place in the whole matrix, or back.
    fn copy_part(&self, placed: &PlacedParameter, part: usize, parts: View, whole: View, back: bool) {
        let Range { start, end } = placed.range;
        let part_view = parts.slice(part * self.part_len + start..part * self.part_len + end);
        let ([rows, columns], width) = (placed.local_shape, placed.parameter.shape[1]);
        let own = Columns { view: part_view, width: columns, first: 0 };
        let of_whole = match placed.parameter.split {
            TensorSplit::Whole => Columns { view: whole, width, first: 0 },
            TensorSplit::Rows => {
                let first = part * part_view.len();
                Columns { view: whole.slice(first..first + part_view.len()), width, first: 0 }
            }
            TensorSplit::Columns => Columns { view: whole, width, first: part * columns },
        };
        let (from, to) = if back { (of_whole, own) } else { (own, of_whole) };
        self.backend.copy_columns(CopyColumns { from, to, rows, columns });
    }
}

/// The scratch of the iteration on one matrix.
struct Scratch {
    /// The matrix, and a product of its size.
    x: Buffer,
    product: Buffer,
    /// xxᵀ or xᵀx, whichever is smaller, and its square.
    gram: Buffer,
    square: Buffer,
    /// The sum of squares of the matrix.
    sum: Buffer,
}

impl Scratch {
    fn new(backend: &dyn Backend, [rows, columns]: [usize; 2], dtype: DType) -> Self {
        let small = rows.min(columns).pow(2);
        let numbers = |len, dtype| backend.allocate(len, dtype, Category::Workspace);
        let [x, product] = [rows * columns; 2].map(|len| numbers(len, dtype));
        let [gram, square] = [small; 2].map(|len| numbers(len, dtype));
        Scratch { x, product, gram, square, sum: numbers(1, dtype.accumulator()) }
    }
}

/// Replaces the matrix x by an orthogonal one that is near: its singular values become about 1. The smaller of xxᵀ and xᵀx is
/// used, so a tall matrix need not be transposed.
fn newton_schulz(backend: &dyn Backend, scratch: &Scratch, [rows, columns]: [usize; 2]) {
    let tall = rows > columns;
    let small = rows.min(columns);
    let Scratch { x, product, gram, square, sum } = scratch;
    let [x, product, gram, square, sum] = [x, product, gram, square, sum].map(Buffer::view);
    let (bias, gelu, residual, float8, dbias) = (None, None, None, None, None);
    backend.fill(0.0, sum);
    backend.sum_of_squares(x, sum);
    backend.normalize(Normalize { x, sum_of_squares: sum, epsilon: MIN_NORM });
    let (a, b, c) = COEFFICIENTS;
    for _ in 0..STEPS {
        if tall {
            let dweight = Gradient { view: gram, accumulate: false };
            let (inputs, outputs) = (columns, columns);
            backend.linear_backward_weight(LinearBackwardWeight {
                dy: x,
                x,
                dweight,
                dbias,
                rows,
                inputs,
                outputs,
                float8,
            });
        } else {
            let (inputs, outputs) = (columns, rows);
            let weight = x;
            backend.linear(Linear {
                x,
                weight,
                bias,
                gelu,
                residual,
                out: gram,
                rows,
                inputs,
                outputs,
                float8,
            });
        }
        // The transpose of a gram matrix is itself.
        let sizes = small;
        backend.linear(Linear {
            x: gram,
            weight: gram,
            bias,
            gelu,
            residual,
            out: square,
            rows: sizes,
            inputs: sizes,
            outputs: sizes,
            float8,
        });
        backend.scaled_sum(ScaledSum { x: gram, y: square, factors: (b, c) });
        if tall {
            let (inputs, outputs) = (columns, columns);
            let (weight, out) = (gram, product);
            backend.linear(Linear { x, weight, bias, gelu, residual, out, rows, inputs, outputs, float8 });
        } else {
            let (inputs, outputs) = (columns, rows);
            backend.linear_backward_input(LinearBackwardInput {
                dy: gram,
                weight: x,
                gelu,
                dx: product,
                dbias,
                rows,
                inputs,
                outputs,
                float8,
            });
        }
        backend.scaled_sum(ScaledSum { x, y: product, factors: (a, 1.0) });
    }
}

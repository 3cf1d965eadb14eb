//! The context of a block, and the entry and exit of a tensor-parallel region.
//!
//! Between regions every rank holds its own rows: all of them, or with sequence parallelism `1/tp` of them. Inside a region
//! every rank holds all rows of its part of the columns.

use std::ops::Range;

use kintsugi_comm::{Collective, Communicator};
use kintsugi_tensor::ops::{Norm, Slices};
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use crate::Shape;
use crate::rows::{AllRows, Chunks, elements};

/// A rank's device, its groups inside a block, its sizes, and the documents of the micro-batch.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The device.
    pub backend: &'a dyn Backend,
    /// The tensor-parallel group.
    pub tensor: &'a dyn Communicator,
    /// The context-parallel group.
    pub context: &'a dyn Communicator,
    /// The sizes.
    pub shape: &'a Shape,
    /// `[rows]`, u32: the start of each token's document in its sample, if documents are masked. Every tp rank has all rows, and
    /// with an exchange of heads over cp those of whole samples.
    pub starts: Option<View<'a>>,
}

/// The parameters of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormWeights<'a> {
    pub weight: View<'a>,
    pub bias: Option<View<'a>>,
}

impl Context<'_> {
    /// Allocates an activation of the compute type.
    pub(crate) fn activation(&self, len: usize) -> Buffer {
        self.backend.allocate(len, self.shape.compute, Category::Activations)
    }

    /// Allocates statistics that belong to activations.
    pub(crate) fn statistics(&self, len: usize) -> Buffer {
        self.backend.allocate(len, self.accumulator(), Category::Activations)
    }

    pub(crate) fn accumulator(&self) -> DType {
        self.shape.compute.accumulator()
    }

    /// The rows of a chunk, of `count` chunks of this rank's rows.
    fn own_rows(&self, index: usize, count: usize) -> Range<usize> {
        let rows = self.shape.own_rows / count;
        index * rows..(index + 1) * rows
    }

    /// The elements of this rank's rows inside a chunk, of `count` chunks of all rows.
    fn own_part(&self, count: usize) -> Range<usize> {
        let len = self.shape.own_rows / count * self.shape.hidden;
        let start = if self.shape.sequence_parallel { self.tensor.rank() * len } else { 0 };
        start..start + len
    }

    /// The parts of this rank's rows whose positions are consecutive: the position of the first row of each, and the rows of
    /// the part among this rank's. After the last position of a sample comes the first one of the next.
    pub(crate) fn consecutive_rows(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let count = if self.shape.sequence_parallel { self.shape.chunks } else { 1 };
        let (chunk, part) = (self.shape.rows / count, self.own_part(count).start / self.shape.hidden);
        let (slices, own) = (self.shape.slices, self.shape.attention.sequence);
        // With whole samples, all rows of a chunk are consecutive.
        let slice = if slices == Slices::WHOLE { self.shape.rows } else { own / 2 };
        (0..count).flat_map(move |index| {
            let (first, rows) = (index * chunk + part, self.own_rows(index, count));
            let (last, shift) = (first + rows.len(), first - rows.start);
            let starts =
                (first / slice..).map(move |number| number * slice).take_while(move |&start| start < last);
            starts.map(move |start| {
                let (start, end) = (start.max(first), (start + slice).min(last));
                (slices.position(own, start % own), start - shift..end - shift)
            })
        })
    }

    /// Enters a region: applies a norm to this rank's rows, and gathers all rows on every rank.
    pub(crate) fn normed(&self, x: View, norm: NormWeights, statistics: View) -> Chunks {
        self.gathered(|rows, out| {
            self.backend.norm(Norm {
                x: x.slice(elements(&rows, self.shape.hidden)),
                weight: norm.weight,
                bias: norm.bias,
                out,
                statistics: statistics.slice(elements(&rows, 2)),
                epsilon: self.shape.epsilon,
                rows: rows.len(),
                width: self.shape.hidden,
            });
        })
    }

    /// Enters a region without a norm: gathers all rows.
    pub(crate) fn all_rows<'b>(&self, own: View<'b>) -> AllRows<'b> {
        if !self.shape.sequence_parallel {
            return AllRows::Local(own);
        }
        let width = self.shape.hidden;
        AllRows::Gathered(
            self.gathered(|rows, out| self.backend.copy(own.slice(elements(&rows, width)), out)),
        )
    }

    /// Calls `write` with some of this rank's rows and their part of the result, and gathers these parts on every rank.
    fn gathered(&self, mut write: impl FnMut(Range<usize>, View)) -> Chunks {
        let (sequence_parallel, len) = (self.shape.sequence_parallel, self.shape.rows * self.shape.hidden);
        let category = if sequence_parallel { Category::Communication } else { Category::Activations };
        let whole = self.backend.allocate(len, self.shape.compute, category);
        let mut chunks = if sequence_parallel { Chunks::new(self, whole) } else { Chunks::one(whole) };
        let count = chunks.count();
        for index in 0..count {
            write(self.own_rows(index, count), chunks.get(index).slice(self.own_part(count)));
            if sequence_parallel {
                chunks.start(self, index, Collective::AllGather);
            }
        }
        chunks
    }

    /// A row-parallel product: calls `multiply` with each chunk of the result and the numbers of its rows. If transfers
    /// overlap, starts the sum over tp of each chunk.
    pub(crate) fn partial_product(&self, mut multiply: impl FnMut(View, Range<usize>)) -> Chunks {
        let whole = self.activation(self.shape.rows * self.shape.hidden);
        let mut chunks = if self.shape.overlap { Chunks::new(self, whole) } else { Chunks::one(whole) };
        let rows = self.shape.rows / chunks.count();
        for index in 0..chunks.count() {
            multiply(chunks.get(index), index * rows..(index + 1) * rows);
            if self.shape.overlap {
                chunks.start(self, index, self.sum());
            }
        }
        chunks
    }

    /// Leaves a region: sums the partial results of the ranks, unless [`Context::partial_product`] has started to. Only
    /// this rank's rows of the result are defined.
    fn summed(&self, mut partial: Chunks) -> Chunks {
        if self.tensor.size() > 1 && !self.shape.overlap {
            partial.start(self, 0, self.sum());
        }
        partial
    }

    fn sum(&self) -> Collective {
        if self.shape.sequence_parallel { Collective::ReduceScatter } else { Collective::AllReduce }
    }

    /// Leaves a region: sums the partial results of the ranks. Calls `write` for parts of this rank's rows with their
    /// numbers, their sum and their part of the result.
    pub(crate) fn sum_by_parts(
        &self,
        partial: Chunks,
        mut write: impl FnMut(Range<usize>, View, View),
    ) -> Buffer {
        let mut sum = self.summed(partial);
        let (count, width) = (sum.count(), self.shape.hidden);
        let out = self.shape.sequence_parallel.then(|| self.own_room());
        for index in 0..count {
            sum.wait(self, index);
            let (rows, own) = (self.own_rows(index, count), sum.get(index).slice(self.own_part(count)));
            let to = out.as_ref().map_or(own, |out| out.slice(elements(&rows, width)));
            write(rows, own, to);
        }
        out.unwrap_or_else(|| sum.into_whole(self))
    }

    /// Leaves a region: this rank's rows of the sum.
    pub(crate) fn own_sum(&self, partial: Chunks) -> Buffer {
        self.sum_by_parts(partial, |_, sum, out| {
            if self.shape.sequence_parallel {
                self.backend.copy(sum, out);
            }
        })
    }

    /// The same with one call of `write` for all of this rank's rows. Their sum may be in the place of the result.
    pub(crate) fn sum_at_once(&self, partial: Chunks, write: impl FnOnce(View, View)) -> Buffer {
        if !self.shape.sequence_parallel {
            let sum = self.summed(partial).into_whole(self);
            write(sum.view(), sum.view());
            return sum;
        }
        if partial.count() == 1 {
            let (sum, out) = (self.summed(partial).into_whole(self), self.own_room());
            write(sum.slice(self.own_part(1)), out.view());
            return out;
        }
        let out = self.sum_by_parts(partial, |_, sum, out| self.backend.copy(sum, out));
        write(out.view(), out.view());
        out
    }

    fn own_room(&self) -> Buffer {
        self.activation(self.shape.own_rows * self.shape.hidden)
    }
}

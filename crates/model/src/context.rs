//! The context of a block, and the entry and exit of a tensor-parallel region.
//!
//! Between regions every rank holds its own rows: all of them, or with sequence parallelism `1/tp` of them. Inside a region
//! every rank holds all rows of its part of the columns.

use kintsugi_comm::{Collective, Communicator};
use kintsugi_tensor::ops::Norm;
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use crate::Shape;

/// A rank's device, its tensor-parallel group, its sizes, and the documents of the micro-batch.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The device.
    pub backend: &'a dyn Backend,
    /// The tensor-parallel group.
    pub tensor: &'a dyn Communicator,
    /// The sizes.
    pub shape: &'a Shape,
    /// `[rows]`, u32: the start of each token's document in its sample, if documents are masked. Every rank has all rows.
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

    /// This rank's rows of a buffer of all rows.
    pub(crate) fn own_rows<'b>(&self, whole: &'b Buffer) -> View<'b> {
        let len = self.shape.own_rows * self.shape.hidden;
        let start = if self.shape.sequence_parallel { self.tensor.rank() * len } else { 0 };
        whole.slice(start..start + len)
    }

    /// Enters a region: applies a norm to this rank's rows, and gathers all rows on every rank.
    pub(crate) fn normed(&self, x: View, norm: NormWeights, statistics: View) -> Buffer {
        let out = self.room_for_all_rows();
        self.backend.norm(Norm {
            x,
            weight: norm.weight,
            bias: norm.bias,
            out: self.own_rows(&out),
            statistics,
            epsilon: self.shape.epsilon,
            rows: self.shape.own_rows,
            width: self.shape.hidden,
        });
        self.share_rows(out)
    }

    /// Enters a region in the backward: gathers all rows of a gradient. `None` if every rank already has them.
    pub(crate) fn all_rows(&self, own: View) -> Option<Buffer> {
        self.shape.sequence_parallel.then(|| {
            let whole = self.room_for_all_rows();
            self.backend.copy(own, self.own_rows(&whole));
            self.share_rows(whole)
        })
    }

    /// Leaves a region: sums the partial results of the ranks. Only this rank's rows of the result are defined.
    pub(crate) fn reduced(&self, partial: Buffer) -> Buffer {
        let collective =
            if self.shape.sequence_parallel { Collective::ReduceScatter } else { Collective::AllReduce };
        if self.tensor.size() > 1 { self.tensor.run(collective, partial) } else { partial }
    }

    /// Calls `write` with this rank's rows of `whole` and an output of the same size. The output is `whole` itself unless
    /// sequence parallelism makes it smaller.
    pub(crate) fn trimmed(&self, whole: Buffer, write: impl FnOnce(View, View)) -> Buffer {
        if self.shape.sequence_parallel {
            let out = self.activation(self.shape.own_rows * self.shape.hidden);
            write(self.own_rows(&whole), out.view());
            out
        } else {
            write(whole.view(), whole.view());
            whole
        }
    }

    fn room_for_all_rows(&self) -> Buffer {
        let category =
            if self.shape.sequence_parallel { Category::Communication } else { Category::Activations };
        self.backend.allocate(self.shape.rows * self.shape.hidden, self.shape.compute, category)
    }

    fn share_rows(&self, whole: Buffer) -> Buffer {
        if self.shape.sequence_parallel { self.tensor.run(Collective::AllGather, whole) } else { whole }
    }
}

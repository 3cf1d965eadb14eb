//! What a block runs on, and the ways into and out of a tensor-parallel region.
//!
//! Between regions every rank holds its own rows: all of them, or under sequence parallelism one part in tp. Inside,
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
    /// `[rows]`, u32: where each token's document begins in its sample, if it sees no other. All rows, on every rank.
    pub starts: Option<View<'a>>,
}

/// The parameters of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormWeights<'a> {
    pub weight: View<'a>,
    pub bias: Option<View<'a>>,
}

impl Context<'_> {
    /// An activation of the compute type.
    pub(crate) fn activation(&self, len: usize) -> Buffer {
        self.backend.allocate(len, self.shape.compute, Category::Activations)
    }

    /// Sums and statistics that belong to activations.
    pub(crate) fn statistics(&self, len: usize) -> Buffer {
        self.backend.allocate(len, self.accumulator(), Category::Activations)
    }

    pub(crate) fn accumulator(&self) -> DType {
        self.shape.compute.accumulator()
    }

    /// This rank's rows of a buffer that has room for all rows.
    pub(crate) fn own_rows<'b>(&self, whole: &'b Buffer) -> View<'b> {
        let len = self.shape.own_rows * self.shape.hidden;
        let start = if self.shape.sequence_parallel { self.tensor.rank() * len } else { 0 };
        whole.slice(start..start + len)
    }

    /// Into a region: norms this rank's rows and gives every rank all rows.
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

    /// Into a region, backwards: gives every rank all rows of a gradient; `None` where it has them already.
    pub(crate) fn all_rows(&self, own: View) -> Option<Buffer> {
        self.shape.sequence_parallel.then(|| {
            let whole = self.room_for_all_rows();
            self.backend.copy(own, self.own_rows(&whole));
            self.share_rows(whole)
        })
    }

    /// Out of a region: sums the ranks' partial results. Only this rank's rows of the result are defined.
    pub(crate) fn reduced(&self, partial: Buffer) -> Buffer {
        let collective =
            if self.shape.sequence_parallel { Collective::ReduceScatter } else { Collective::AllReduce };
        if self.tensor.size() > 1 { self.tensor.run(collective, partial) } else { partial }
    }

    /// A buffer of exactly this rank's rows to write a function of `whole`'s own rows into: `whole` itself where
    /// that has only its own rows.
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

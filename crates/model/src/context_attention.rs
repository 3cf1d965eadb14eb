//! Attention when every rank of cp has slices of each sample: how it reaches the keys and values of the other ranks.

mod all_to_all;
mod gather;
mod ring;

pub(crate) use all_to_all::ExchangedHeads;

use kintsugi_plan::ContextAttention;
use kintsugi_tensor::ops::{AttentionShape, Columns, CopyColumns};
use kintsugi_tensor::{Buffer, Category, DType, View};

use crate::Context;

/// What attention of slices reads and writes in the forward, and reads in the backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SliceActivations<'a> {
    /// The attention of the layer.
    pub shape: AttentionShape,
    /// `[rows, heads + 2·kv_heads, head_dim]`, after norm and rotation.
    pub qkv: View<'a>,
    /// `[rows, heads, head_dim]`.
    pub out: View<'a>,
    /// `[batch, heads, own sequence]`.
    pub log_sums: View<'a>,
}

/// What attention of slices saves for its backward.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a step makes no heap allocations")]
pub(crate) enum SavedSlices {
    /// This rank's queries, keys and values, and the log-sum-exp of its queries.
    Own { qkv: Buffer, log_sums: Buffer },
    /// Whole samples of a share of the heads.
    Exchanged(ExchangedHeads),
}

/// Computes `out` from `qkv`.
pub(crate) fn forward(ctx: &Context, shape: AttentionShape, qkv: Buffer, out: View) -> SavedSlices {
    let attend = match ctx.shape.context_attention {
        ContextAttention::Gather => gather::forward,
        ContextAttention::Ring => ring::forward,
        ContextAttention::AllToAll => {
            return SavedSlices::Exchanged(all_to_all::forward(ctx, shape, qkv.view(), out));
        }
    };
    let log_sums = ctx.statistics(ctx.shape.rows * ctx.shape.attention.heads);
    attend(ctx, SliceActivations { shape, qkv: qkv.view(), out, log_sums: log_sums.view() });
    SavedSlices::Own { qkv, log_sums }
}

/// Computes the gradient of `qkv` from `out` and its gradient.
pub(crate) fn backward(
    ctx: &Context,
    shape: AttentionShape,
    saved: SavedSlices,
    out: View,
    dout: View,
    dqkv: View,
) {
    let (qkv, log_sums) = match saved {
        SavedSlices::Exchanged(heads) => return all_to_all::backward(ctx, shape, heads, dout, dqkv),
        SavedSlices::Own { qkv, log_sums } => (qkv, log_sums),
    };
    let differentiate = match ctx.shape.context_attention {
        ContextAttention::Ring => ring::backward,
        ContextAttention::Gather => gather::backward,
        ContextAttention::AllToAll => unreachable!("an exchange saves the exchanged heads"),
    };
    differentiate(
        ctx,
        SliceActivations { shape, qkv: qkv.view(), out, log_sums: log_sums.view() },
        dout,
        dqkv,
    );
}

impl Context<'_> {
    /// Columns of a row of `qkv` that are keys and values.
    fn key_width(&self) -> usize {
        2 * self.shape.attention.kv_heads * self.shape.attention.head_dim
    }

    /// The keys and values of `qkv` as a matrix of their own, `[rows, 2·kv_heads, head_dim]`, in `to`.
    fn copy_keys(&self, qkv: View, to: View) {
        let (width, columns) = (self.shape.attention.qkv_width(), self.key_width());
        self.backend.copy_columns(CopyColumns {
            from: Columns { view: qkv, width, first: width - columns },
            to: Columns { view: to, width: columns, first: 0 },
            rows: self.shape.rows,
            columns,
        });
    }

    /// Writes the gradients of keys and values into the gradient of `qkv`.
    fn place_key_gradients(&self, dkeys: View, dqkv: View) {
        let (width, columns) = (self.shape.attention.qkv_width(), self.key_width());
        let rounded: Option<Buffer> = (dkeys.dtype() != dqkv.dtype()).then(|| {
            let rounded = self.activation(dkeys.len());
            self.backend.copy(dkeys, rounded.view());
            rounded
        });
        self.backend.copy_columns(CopyColumns {
            from: Columns { view: rounded.as_ref().map_or(dkeys, Buffer::view), width: columns, first: 0 },
            to: Columns { view: dqkv, width, first: width - columns },
            rows: self.shape.rows,
            columns,
        });
    }

    /// Room for the keys and values of `parts` ranks of cp, or for their gradients.
    fn key_room(&self, parts: usize, dtype: DType) -> Buffer {
        self.backend.allocate(parts * self.shape.rows * self.key_width(), dtype, Category::Communication)
    }
}

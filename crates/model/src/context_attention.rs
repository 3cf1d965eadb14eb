//! Attention when every rank of cp has slices of each sample: how it reaches the keys and values of the other ranks.

mod gather;

use kintsugi_plan::ContextAttention;
use kintsugi_tensor::ops::{Columns, CopyColumns};
use kintsugi_tensor::{Buffer, Category, View};

use crate::Context;

/// What attention of slices reads and writes in the forward, and reads in the backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SliceActivations<'a> {
    /// `[rows, heads + 2·kv_heads, head_dim]`, after norm and rotation.
    pub qkv: View<'a>,
    /// `[rows, heads, head_dim]`.
    pub out: View<'a>,
    /// `[batch, heads, own sequence]`.
    pub log_sums: View<'a>,
}

/// Computes `out` and `log_sums`.
pub(crate) fn forward(ctx: &Context, slices: SliceActivations) {
    match ctx.shape.context_attention {
        ContextAttention::Gather => gather::forward(ctx, slices),
    }
}

/// Computes the gradient of `qkv`.
pub(crate) fn backward(ctx: &Context, slices: SliceActivations, dout: View, dqkv: View) {
    match ctx.shape.context_attention {
        ContextAttention::Gather => gather::backward(ctx, slices, dout, dqkv),
    }
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
    fn key_room(&self, parts: usize, dtype: kintsugi_tensor::DType) -> Buffer {
        self.backend.allocate(parts * self.shape.rows * self.key_width(), dtype, Category::Communication)
    }
}

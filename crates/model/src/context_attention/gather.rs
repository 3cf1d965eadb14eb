//! Every rank gathers the keys and values of all ranks of cp, and their gradients are summed and scattered (Llama 3, arXiv
//! 2407.21783).
//!
//! The backward gathers them again, so that no layer keeps those of other ranks.

use kintsugi_comm::Collective;
use kintsugi_tensor::ops::{Columns, SlicedAttention, SlicedAttentionBackward};
use kintsugi_tensor::{Buffer, View};

use super::SliceActivations;
use crate::Context;

pub(super) fn forward(ctx: &Context, slices: SliceActivations) {
    let keys = all_keys(ctx, slices.qkv);
    ctx.backend.sliced_attention(SlicedAttention {
        qkv: slices.qkv,
        keys: keys.view(),
        first_owner: 0,
        owners: ctx.shape.slices.parts,
        starts: ctx.starts,
        before: None,
        out: slices.out,
        log_sums: slices.log_sums,
        shape: slices.shape,
        slices: ctx.shape.slices,
    });
}

pub(super) fn backward(ctx: &Context, slices: SliceActivations, dout: View, dqkv: View) {
    let (keys, parts) = (all_keys(ctx, slices.qkv), ctx.shape.slices.parts);
    let dkeys = ctx.key_room(parts, ctx.shape.key_gradients());
    ctx.backend.sliced_attention_backward(SlicedAttentionBackward {
        qkv: slices.qkv,
        keys: keys.view(),
        first_owner: 0,
        owners: parts,
        starts: ctx.starts,
        out: slices.out,
        dout,
        log_sums: slices.log_sums,
        dqueries: Columns { view: dqkv, width: ctx.shape.attention.qkv_width(), first: 0 },
        add_queries: false,
        dkeys: dkeys.view(),
        add_keys: false,
        shape: slices.shape,
        slices: ctx.shape.slices,
    });
    drop(keys);
    let dkeys = ctx.context.run(Collective::ReduceScatter, dkeys);
    let (own, part) = (dkeys.len() / parts, ctx.context.rank());
    ctx.place_key_gradients(dkeys.slice(part * own..(part + 1) * own), dqkv);
}

/// The keys and values of all ranks of cp, `[cp, rows, 2·kv_heads, head_dim]`.
fn all_keys(ctx: &Context, qkv: View) -> Buffer {
    let parts = ctx.shape.slices.parts;
    let keys = ctx.key_room(parts, ctx.shape.compute);
    let (own, part) = (keys.len() / parts, ctx.context.rank());
    ctx.copy_keys(qkv, keys.slice(part * own..(part + 1) * own));
    ctx.context.run(Collective::AllGather, keys)
}

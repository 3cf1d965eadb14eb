//! Keys and values pass around the ranks of cp, and a rank attends to those that it has while the next ones arrive (arXiv
//! 2310.01889).
//!
//! Partial outputs are joined by their log-sum-exp, in the accumulator type until the last. In the backward, the gradients of a
//! rank's keys follow the keys: they start at the first rank that is not the owner, and end at the owner, who adds its own.

use kintsugi_comm::{Pending, Tag};
use kintsugi_tensor::ops::{Columns, CopyColumns, SlicedAttention, SlicedAttentionBackward};
use kintsugi_tensor::{Buffer, View};

use super::SliceActivations;
use crate::Context;

/// Messages of a step of the ring; tags are even, because all go to the next rank.
#[derive(Clone, Copy)]
enum Message {
    Keys,
    Gradients,
}

fn tag(step: usize, message: Message) -> Tag {
    4 * step as Tag + 2 * message as Tag
}

/// A message to the next rank and one from the previous rank.
struct Shift {
    sent: Pending,
    received: Pending,
}

impl Shift {
    fn start(ctx: &Context, tag: Tag, buffer: Buffer) -> Self {
        let (rank, ranks) = (ctx.context.rank(), ctx.context.size());
        let room = ctx.key_room(1, buffer.dtype());
        let sent = ctx.context.send((rank + 1) % ranks, tag, buffer);
        let received = ctx.context.receive((rank + ranks - 1) % ranks, tag, room);
        Shift { sent, received }
    }

    fn wait(self, ctx: &Context) -> Buffer {
        drop(ctx.context.wait(self.sent));
        ctx.context.wait(self.received)
    }
}

/// Calls `attend` with the keys and values of every rank, beginning with this one's, and with their owner. The next keys arrive
/// meanwhile.
fn each_owner(ctx: &Context, qkv: View, mut attend: impl FnMut(usize, usize, View)) {
    let (ranks, rank) = (ctx.context.size(), ctx.context.rank());
    let mut keys = ctx.key_room(1, ctx.shape.compute);
    ctx.copy_keys(qkv, keys.view());
    for step in 0..ranks {
        let next = (step + 1 < ranks).then(|| {
            // A buffer that is sent cannot be read meanwhile.
            let copy = ctx.key_room(1, ctx.shape.compute);
            ctx.backend.copy(keys.view(), copy.view());
            Shift::start(ctx, tag(step, Message::Keys), copy)
        });
        attend(step, (rank + ranks - step) % ranks, keys.view());
        if let Some(next) = next {
            drop(keys);
            keys = next.wait(ctx);
        }
    }
}

pub(super) fn forward(ctx: &Context, slices: SliceActivations) {
    let last = ctx.context.size() - 1;
    // With an output in the accumulator type, it holds the partial results itself.
    let narrow = ctx.shape.compute != ctx.accumulator();
    let partial = narrow.then(|| ctx.statistics(slices.out.len()));
    let partial = partial.as_ref().map_or(slices.out, Buffer::view);
    each_owner(ctx, slices.qkv, |step, owner, keys| {
        ctx.backend.sliced_attention(SlicedAttention {
            qkv: slices.qkv,
            keys,
            first_owner: owner,
            owners: 1,
            starts: ctx.starts,
            before: (step > 0).then_some(partial),
            out: if step == last { slices.out } else { partial },
            log_sums: slices.log_sums,
            shape: slices.shape,
            slices: ctx.shape.slices,
        });
    });
}

pub(super) fn backward(ctx: &Context, slices: SliceActivations, dout: View, dqkv: View) {
    let shape = slices.shape;
    let width = shape.heads * shape.head_dim;
    let narrow = ctx.shape.compute != ctx.accumulator();
    let sums = narrow.then(|| ctx.statistics(slices.out.len()));
    let in_place = Columns { view: dqkv, width: shape.qkv_width(), first: 0 };
    let dqueries = sums.as_ref().map_or(in_place, |sums| Columns { view: sums.view(), width, first: 0 });
    let mut own = None;
    let mut arriving: Option<Shift> = None;
    each_owner(ctx, slices.qkv, |step, owner, keys| {
        let dkeys = ctx.key_room(1, ctx.shape.key_gradients());
        ctx.backend.sliced_attention_backward(SlicedAttentionBackward {
            qkv: slices.qkv,
            keys,
            first_owner: owner,
            owners: 1,
            starts: ctx.starts,
            out: slices.out,
            dout,
            log_sums: slices.log_sums,
            dqueries,
            add_queries: step > 0,
            dkeys: dkeys.view(),
            add_keys: false,
            shape,
            slices: ctx.shape.slices,
        });
        if let Some(earlier) = arriving.take() {
            let earlier = earlier.wait(ctx);
            ctx.backend.add(earlier.view(), dkeys.view());
        }
        if step == 0 {
            own = Some(dkeys);
        } else {
            arriving = Some(Shift::start(ctx, tag(step, Message::Gradients), dkeys));
        }
    });
    let own = own.expect("the first keys are this rank's");
    if let Some(others) = arriving {
        let others = others.wait(ctx);
        ctx.backend.add(others.view(), own.view());
    }
    ctx.place_key_gradients(own.view(), dqkv);
    drop(own);
    if let Some(sums) = sums {
        place_queries(ctx, &sums, dqkv);
    }
}

/// Rounds the gradients of the queries and writes them into the gradient of `qkv`.
fn place_queries(ctx: &Context, sums: &Buffer, dqkv: View) {
    let (shape, rounded) = (ctx.shape.attention, ctx.activation(sums.len()));
    ctx.backend.copy(sums.view(), rounded.view());
    let width = shape.heads * shape.head_dim;
    ctx.backend.copy_columns(CopyColumns {
        from: Columns { view: rounded.view(), width, first: 0 },
        to: Columns { view: dqkv, width: shape.qkv_width(), first: 0 },
        rows: ctx.shape.rows,
        columns: width,
    });
}

//! Heads instead of slices inside attention, as DeepSpeed Ulysses (arXiv 2309.14509): every rank of cp exchanges its slices of all
//! heads for whole samples of some heads, and attends to them as without cp.
//!
//! If there are fewer key heads than ranks, several ranks get the same one, and its gradients are summed.

use kintsugi_comm::Collective;
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, Columns, CopyColumns, Slices,
};
use kintsugi_tensor::{Buffer, Category, View};

use crate::Context;

/// What the backward needs: whole samples of this rank's share of the heads.
#[derive(Debug)]
pub(crate) struct ExchangedHeads {
    /// `[batch, sequence, share of the heads, head_dim]`: queries, keys and values.
    qkv: Buffer,
    /// `[batch, sequence, share of the query heads, head_dim]`.
    out: Buffer,
    /// `[batch, share of the query heads, sequence]`.
    log_sums: Buffer,
}

/// The heads of a rank of cp.
#[derive(Clone, Copy)]
struct Share {
    ranks: usize,
    /// Whole samples of a share of the heads.
    shape: AttentionShape,
    /// Query and key heads of all shares.
    heads: [usize; 2],
}

impl Share {
    fn of(ctx: &Context, own: AttentionShape) -> Self {
        let ranks = ctx.shape.slices.parts;
        let shape = AttentionShape {
            sequence: own.sequence * ranks,
            heads: own.heads / ranks,
            kv_heads: (own.kv_heads / ranks).max(1),
            ..own
        };
        Share { ranks, shape, heads: [own.heads, own.kv_heads] }
    }

    /// The ranges of columns of a rank's queries, keys and values in rows of all heads, and their places in rows of its share:
    /// first column there, first column here, and number.
    fn columns(self, rank: usize) -> [[usize; 3]; 3] {
        let [heads, kv_heads] = self.heads;
        let AttentionShape { heads: queries, kv_heads: keys, head_dim, .. } = self.shape;
        // With fewer key heads than ranks, adjacent ranks share one.
        let first_key = rank * kv_heads / self.ranks;
        [
            [rank * queries, 0, queries],
            [heads + first_key, queries, keys],
            [heads + kv_heads + first_key, queries + keys, keys],
        ]
        .map(|heads| heads.map(|heads| heads * head_dim))
    }

    /// How many adjacent ranks have the same key heads.
    fn copies(self) -> usize {
        (self.ranks / self.heads[1]).max(1)
    }
}

pub(super) fn forward(ctx: &Context, shape: AttentionShape, qkv: View, out: View) -> ExchangedHeads {
    let share = Share::of(ctx, shape);
    let (rows, width) = (ctx.shape.rows, share.shape.qkv_width());
    let whole = to_heads(ctx, width, |rank, chunk| {
        for [from, to, columns] in share.columns(rank) {
            ctx.backend.copy_columns(CopyColumns {
                from: Columns { view: qkv, width: ctx.shape.attention.qkv_width(), first: from },
                to: Columns { view: chunk, width, first: to },
                rows,
                columns,
            });
        }
    });
    let queries = share.shape.heads * share.shape.head_dim;
    let (result, log_sums) = (
        ctx.activation(rows * share.ranks * queries),
        ctx.statistics(rows * share.ranks * share.shape.heads),
    );
    ctx.backend.attention(Attention {
        qkv: whole.view(),
        starts: ctx.starts,
        out: result.view(),
        saved: AttentionSaved::LogSumExp(log_sums.view()),
        shape: share.shape,
    });
    to_slices(ctx, result.view(), queries, |rank, chunk| {
        ctx.backend.copy_columns(CopyColumns {
            from: Columns { view: chunk, width: queries, first: 0 },
            to: Columns { view: out, width: share.ranks * queries, first: rank * queries },
            rows,
            columns: queries,
        });
    });
    ExchangedHeads { qkv: whole, out: result, log_sums }
}

pub(super) fn backward(ctx: &Context, shape: AttentionShape, saved: ExchangedHeads, dout: View, dqkv: View) {
    let share = Share::of(ctx, shape);
    let (rows, width) = (ctx.shape.rows, share.shape.qkv_width());
    let queries = share.shape.heads * share.shape.head_dim;
    let dresult = to_heads(ctx, queries, |rank, chunk| {
        ctx.backend.copy_columns(CopyColumns {
            from: Columns { view: dout, width: share.ranks * queries, first: rank * queries },
            to: Columns { view: chunk, width: queries, first: 0 },
            rows,
            columns: queries,
        });
    });
    let dwhole = ctx.activation(saved.qkv.len());
    ctx.backend.attention_backward(AttentionBackward {
        qkv: saved.qkv.view(),
        starts: ctx.starts,
        out: saved.out.view(),
        dout: dresult.view(),
        saved: AttentionSaved::LogSumExp(saved.log_sums.view()),
        dqkv: dwhole.view(),
        dbias: None,
        shape: share.shape,
    });
    drop((dresult, saved));
    let copies = share.copies();
    let keys = 2 * share.shape.kv_heads * share.shape.head_dim;
    // The gradients of a key head that several ranks have, in the accumulator type and rounded.
    let sum = (copies > 1).then(|| (ctx.statistics(rows * keys), ctx.activation(rows * keys)));
    to_slices(ctx, dwhole.view(), width, |rank, chunk| {
        let place = |view: View, view_width: usize, [to, from, columns]: [usize; 3], skipped: usize| {
            ctx.backend.copy_columns(CopyColumns {
                from: Columns { view, width: view_width, first: from - skipped },
                to: Columns { view: dqkv, width: ctx.shape.attention.qkv_width(), first: to },
                rows,
                columns,
            });
        };
        let [of_queries, of_keys, of_values] = share.columns(rank);
        place(chunk, width, of_queries, 0);
        let Some((sum, rounded)) = &sum else {
            place(chunk, width, of_keys, 0);
            place(chunk, width, of_values, 0);
            return;
        };
        ctx.backend.copy_columns(CopyColumns {
            from: Columns { view: chunk, width, first: queries },
            to: Columns { view: rounded.view(), width: keys, first: 0 },
            rows,
            columns: keys,
        });
        if rank.is_multiple_of(copies) {
            ctx.backend.copy(rounded.view(), sum.view());
        } else {
            ctx.backend.add(rounded.view(), sum.view());
        }
        if (rank + 1).is_multiple_of(copies) {
            ctx.backend.copy(sum.view(), rounded.view());
            place(rounded.view(), keys, of_keys, queries);
            place(rounded.view(), keys, of_values, queries);
        }
    });
}

/// Sends every rank its share of the columns, which `pack` writes into a chunk `[rows, width]`. Returns whole samples of this
/// rank's share, `[batch, sequence, width]`.
fn to_heads(ctx: &Context, width: usize, mut pack: impl FnMut(usize, View)) -> Buffer {
    let (ranks, chunk) = (ctx.shape.slices.parts, ctx.shape.rows * width);
    let buffer = room(ctx, chunk);
    for rank in 0..ranks {
        pack(rank, buffer.slice(rank * chunk..(rank + 1) * chunk));
    }
    let buffer = ctx.context.run(Collective::AllToAll, buffer);
    let whole = ctx.activation(ranks * chunk);
    for (rank, rows, own) in slices(ctx) {
        let received = (ranks + rank) * chunk;
        let from = buffer.slice(received + own.start * width..received + own.end * width);
        ctx.backend.copy(from, whole.slice(rows.start * width..rows.end * width));
    }
    whole
}

/// Sends every rank its slices of whole samples, `[batch, sequence, width]`. Calls `unpack` with the chunk of every rank, `[rows,
/// width]`: this rank's slices of that rank's share of the heads.
fn to_slices(ctx: &Context, whole: View, width: usize, mut unpack: impl FnMut(usize, View)) {
    let (ranks, chunk) = (ctx.shape.slices.parts, ctx.shape.rows * width);
    let buffer = room(ctx, chunk);
    for (rank, rows, own) in slices(ctx) {
        let to = buffer.slice(rank * chunk + own.start * width..rank * chunk + own.end * width);
        ctx.backend.copy(whole.slice(rows.start * width..rows.end * width), to);
    }
    let buffer = ctx.context.run(Collective::AllToAll, buffer);
    for rank in 0..ranks {
        unpack(rank, buffer.slice((ranks + rank) * chunk..(ranks + rank + 1) * chunk));
    }
}

/// Room for chunks that are sent to all ranks, and for those that are received.
fn room(ctx: &Context, chunk: usize) -> Buffer {
    let len = 2 * ctx.shape.slices.parts * chunk;
    ctx.backend.allocate(len, ctx.shape.compute, Category::Communication)
}

/// Every slice of every sample: the rank that has it, its rows in whole samples, and its rows on that rank.
fn slices(ctx: &Context) -> impl Iterator<Item = (usize, std::ops::Range<usize>, std::ops::Range<usize>)> {
    let (parts, AttentionShape { batch, sequence: own, .. }) = (ctx.shape.slices.parts, ctx.shape.attention);
    let slice = own / 2;
    (0..parts).flat_map(move |part| {
        (0..2 * batch).map(move |number| {
            let row = number * slice;
            let sample = row / own;
            let position = Slices { parts, part }.position(own, row % own);
            let start = sample * own * parts + position;
            (part, start..start + slice, row..row + slice)
        })
    })
}

//! RMSNorm of every query and key head before the rotation, as in Qwen3.
//!
//! Queries and keys are columns of one matrix, so they are copied out, normalised as rows of one head each, and copied back.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_tensor::ops::{Columns, CopyColumns, Norm, NormBackward};
use kintsugi_tensor::{Buffer, View};

use crate::{Context, Gradients, Weights};

/// What the backward of both norms needs: of queries, then of keys.
#[derive(Debug)]
pub(crate) struct QueryKeyActivations([HeadActivations; 2]);

/// The heads before their norm, `[rows · heads, head_dim]`, and the norm's statistics.
#[derive(Debug)]
struct HeadActivations {
    x: Buffer,
    statistics: Buffer,
}

/// The heads of one kind: the weight of their norm, and their columns of `qkv`.
#[derive(Clone, Copy)]
struct Heads {
    weight: ParameterKind,
    count: usize,
    first_column: usize,
}

/// Normalises queries and keys in place, if the model does.
pub(crate) fn forward(ctx: &Context, w: &Weights, qkv: View) -> Option<QueryKeyActivations> {
    w.find(ParameterKind::QueryNormWeight)?;
    Some(QueryKeyActivations(kinds(ctx).map(|heads| normalise(ctx, w, heads, qkv))))
}

fn normalise(ctx: &Context, w: &Weights, heads: Heads, qkv: View) -> HeadActivations {
    let (rows, width) = (ctx.shape.rows * heads.count, ctx.shape.attention.head_dim);
    let (x, statistics) = (ctx.activation(rows * width), ctx.statistics(2 * rows));
    let normed = ctx.activation(rows * width);
    ctx.backend.copy_columns(CopyColumns {
        from: of_qkv(ctx, heads, qkv),
        to: own(ctx, heads, x.view()),
        rows: ctx.shape.rows,
        columns: heads.count * width,
    });
    ctx.backend.norm(Norm {
        x: x.view(),
        weight: w.get(heads.weight),
        bias: None,
        out: normed.view(),
        statistics: statistics.view(),
        epsilon: ctx.shape.epsilon,
        rows,
        width,
    });
    ctx.backend.copy_columns(CopyColumns {
        from: own(ctx, heads, normed.view()),
        to: of_qkv(ctx, heads, qkv),
        rows: ctx.shape.rows,
        columns: heads.count * width,
    });
    HeadActivations { x, statistics }
}

/// Replaces the gradient of the normalised heads by that of the heads before their norm.
pub(crate) fn backward(ctx: &Context, w: &Weights, g: &Gradients, saved: QueryKeyActivations, dqkv: View) {
    for (heads, HeadActivations { x, statistics }) in kinds(ctx).into_iter().zip(saved.0) {
        let (rows, width) = (ctx.shape.rows * heads.count, ctx.shape.attention.head_dim);
        let d = ctx.activation(rows * width);
        ctx.backend.copy_columns(CopyColumns {
            from: of_qkv(ctx, heads, dqkv),
            to: own(ctx, heads, d.view()),
            rows: ctx.shape.rows,
            columns: heads.count * width,
        });
        ctx.backend.norm_backward(NormBackward {
            dy: d.view(),
            x: x.view(),
            statistics: statistics.view(),
            weight: w.get(heads.weight),
            residual: None,
            residual_sum: None,
            dx: d.view(),
            dweight: g.get(heads.weight),
            dbias: None,
            rows,
            width,
        });
        ctx.backend.copy_columns(CopyColumns {
            from: own(ctx, heads, d.view()),
            to: of_qkv(ctx, heads, dqkv),
            rows: ctx.shape.rows,
            columns: heads.count * width,
        });
    }
}

fn kinds(ctx: &Context) -> [Heads; 2] {
    let shape = ctx.shape.attention;
    [
        Heads { weight: ParameterKind::QueryNormWeight, count: shape.heads, first_column: 0 },
        Heads {
            weight: ParameterKind::KeyNormWeight,
            count: shape.kv_heads,
            first_column: shape.heads * shape.head_dim,
        },
    ]
}

fn of_qkv<'a>(ctx: &Context, heads: Heads, qkv: View<'a>) -> Columns<'a> {
    Columns { view: qkv, width: ctx.shape.attention.qkv_width(), first: heads.first_column }
}

fn own<'a>(ctx: &Context, heads: Heads, view: View<'a>) -> Columns<'a> {
    Columns { view, width: heads.count * ctx.shape.attention.head_dim, first: 0 }
}

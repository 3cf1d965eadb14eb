//! RMSNorm of queries and of keys before the rotation: of every head, as in Qwen3, or of all heads together, as in OLMo 2.
//!
//! Queries and keys are columns of one matrix, so they are copied out, normalised, and copied back. The columns of all heads are
//! divided over tp, so a norm over them sums over the ranks.

use kintsugi_comm::Collective;
use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::QueryKeyNorm;
use kintsugi_tensor::ops::{Columns, CopyColumns, Norm, NormBackward, RowDots, SplitNorm, SplitNormBackward};
use kintsugi_tensor::{Buffer, Category, View};

use crate::{Context, Gradients, Weights};

/// What the backward of both norms needs: of queries, then of keys.
#[derive(Debug)]
pub(crate) struct QueryKeyActivations([NormInput; 2]);

/// Queries or keys before their norm, and the norm's statistics.
#[derive(Debug)]
struct NormInput {
    x: Buffer,
    statistics: Buffer,
}

/// Queries or keys: the weight of their norm, their columns of `qkv`, and the rows of the norm.
#[derive(Clone, Copy)]
struct Part {
    weight: ParameterKind,
    first_column: usize,
    columns: usize,
    rows: usize,
    width: usize,
}

/// Normalises queries and keys in place, if the model does.
pub(crate) fn forward(ctx: &Context, w: &Weights, qkv: View) -> Option<QueryKeyActivations> {
    let norm = ctx.shape.query_key_norm?;
    let parts = parts(ctx, norm);
    let inputs = parts.map(|part| copied(ctx, part, qkv));
    let squares = sums_over_tp(ctx, norm, parts, |i| (inputs[i].view(), inputs[i].view(), None));
    let [queries, keys] = [0, 1].map(|i| {
        let (part, x) = (parts[i], &inputs[i]);
        let Part { rows, width, .. } = part;
        let (normed, statistics) = (ctx.activation(rows * width), ctx.statistics(2 * rows));
        let (x, weight, out, epsilon) = (x.view(), w.get(part.weight), normed.view(), ctx.shape.epsilon);
        match &squares {
            None => ctx.backend.norm(Norm {
                x,
                weight,
                bias: None,
                out,
                statistics: statistics.view(),
                epsilon,
                rows,
                width,
            }),
            Some(squares) => ctx.backend.split_norm(SplitNorm {
                x,
                weight,
                squares: squares.slice(i * rows..(i + 1) * rows),
                out,
                statistics: statistics.view(),
                epsilon,
                rows,
                width,
                whole: width * ctx.tensor.size(),
            }),
        }
        place(ctx, part, out, qkv);
        statistics
    });
    let [x_queries, x_keys] = inputs;
    let queries = NormInput { x: x_queries, statistics: queries };
    Some(QueryKeyActivations([queries, NormInput { x: x_keys, statistics: keys }]))
}

/// Replaces the gradient of normalised queries and keys by that before their norms.
pub(crate) fn backward(ctx: &Context, w: &Weights, g: &Gradients, saved: QueryKeyActivations, dqkv: View) {
    let norm = ctx.shape.query_key_norm.expect("the forward had norms");
    let parts = parts(ctx, norm);
    let QueryKeyActivations(saved) = saved;
    let gradients = parts.map(|part| copied(ctx, part, dqkv));
    let dots = sums_over_tp(ctx, norm, parts, |i| {
        (gradients[i].view(), saved[i].x.view(), Some(w.get(parts[i].weight)))
    });
    for (i, (part, d)) in parts.into_iter().zip(gradients).enumerate() {
        let Part { rows, width, .. } = part;
        let (x, statistics) = (saved[i].x.view(), saved[i].statistics.view());
        let (weight, dweight) = (w.get(part.weight), g.find(part.weight));
        match &dots {
            None => ctx.backend.norm_backward(NormBackward {
                dy: d.view(),
                x,
                statistics,
                weight,
                residual: None,
                residual_sum: None,
                dx: d.view(),
                centred: false,
                dweight,
                dbias: None,
                rows,
                width,
            }),
            Some(dots) => ctx.backend.split_norm_backward(SplitNormBackward {
                dy: d.view(),
                x,
                statistics,
                weight,
                dots: dots.slice(i * rows..(i + 1) * rows),
                dx: d.view(),
                dweight,
                rows,
                width,
                whole: width * ctx.tensor.size(),
            }),
        }
        place(ctx, part, d.view(), dqkv);
    }
}

/// The sums over whole rows that norms of all heads need if other ranks have some of them: of queries, then of keys.
fn sums_over_tp<'a>(
    ctx: &Context,
    norm: QueryKeyNorm,
    parts: [Part; 2],
    factors: impl Fn(usize) -> (View<'a>, View<'a>, Option<View<'a>>),
) -> Option<Buffer> {
    if norm == QueryKeyNorm::Head || ctx.tensor.size() == 1 {
        return None;
    }
    let rows = ctx.shape.rows;
    let sums = ctx.backend.allocate(2 * rows, ctx.accumulator(), Category::Communication);
    for (i, part) in parts.into_iter().enumerate() {
        let (x, y, weight) = factors(i);
        let out = sums.slice(i * rows..(i + 1) * rows);
        ctx.backend.row_dots(RowDots { x, y, weight, out, rows, width: part.width });
    }
    Some(ctx.tensor.run(Collective::AllReduce, sums))
}

fn parts(ctx: &Context, norm: QueryKeyNorm) -> [Part; 2] {
    let shape = ctx.shape.attention;
    let queries = shape.heads * shape.head_dim;
    let part = |weight, first_column, heads: usize| {
        let columns = heads * shape.head_dim;
        let (rows, width) = match norm {
            QueryKeyNorm::Head => (ctx.shape.rows * heads, shape.head_dim),
            QueryKeyNorm::AllHeads => (ctx.shape.rows, columns),
        };
        Part { weight, first_column, columns, rows, width }
    };
    [
        part(ParameterKind::QueryNormWeight, 0, shape.heads),
        part(ParameterKind::KeyNormWeight, queries, shape.kv_heads),
    ]
}

/// A part of `qkv` as a matrix of its own.
fn copied(ctx: &Context, part: Part, qkv: View) -> Buffer {
    let own = ctx.activation(ctx.shape.rows * part.columns);
    ctx.backend.copy_columns(CopyColumns {
        from: of_qkv(ctx, part, qkv),
        to: Columns { view: own.view(), width: part.columns, first: 0 },
        rows: ctx.shape.rows,
        columns: part.columns,
    });
    own
}

fn place(ctx: &Context, part: Part, own: View, qkv: View) {
    ctx.backend.copy_columns(CopyColumns {
        from: Columns { view: own, width: part.columns, first: 0 },
        to: of_qkv(ctx, part, qkv),
        rows: ctx.shape.rows,
        columns: part.columns,
    });
}

fn of_qkv<'a>(ctx: &Context, part: Part, qkv: View<'a>) -> Columns<'a> {
    Columns { view: qkv, width: ctx.shape.attention.qkv_width(), first: part.first_column }
}

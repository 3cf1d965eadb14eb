//! Attention between its norm and the residual: column-parallel query, key and value; heads; row-parallel output.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_plan::{AttentionKind, BackwardPart};
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, AttentionSaved, CachedAttention, Gradient, Linear, LinearBackwardInput,
    Rotary, Slices,
};
use kintsugi_tensor::{Buffer, View};

use crate::context_attention::{self, SavedSlices};
use crate::float8::{Float8Matrix, Float8View, Orientation, WeightFactor, WeightGradient};
use crate::layer::BranchInput;
use crate::query_key_norm::{self, QueryKeyActivations};
use crate::residual::BranchOutput;
use crate::rows::{AllRows, Chunks, elements};
use crate::{Context, Gradients, KvCache, Weights};

/// The activations that attention saves for its backward.
#[derive(Debug)]
pub(crate) struct AttentionActivations {
    /// What the norms of queries and keys save.
    query_key: Option<QueryKeyActivations>,
    /// Outputs of the heads, `[rows, heads, head_dim]`.
    out: Buffer,
    saved: SavedAttention,
}

/// What attention itself saves.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a step makes no heap allocations")]
enum SavedAttention {
    /// Over whole samples.
    Whole {
        /// Queries, keys and values after norm and rotation, `[rows, heads + 2·kv_heads, head_dim]`.
        qkv: Buffer,
        /// Log-sum-exp (flash) or probabilities (plain).
        softmax: Buffer,
    },
    /// Over slices of samples.
    Slices(SavedSlices),
}

/// What the weight part of the backward needs.
#[derive(Debug)]
pub(crate) struct AttentionWeightInputs {
    out: Buffer,
    dqkv: Buffer,
}

/// Runs attention on normed rows and projects the result into `branch`. Without a `branch`, only computes the activations.
pub(crate) fn forward(
    ctx: &Context,
    x: &mut AllRows,
    x_float8: Option<&Float8Matrix>,
    w: &Weights,
    branch: Option<BranchOutput>,
) -> (Option<Chunks>, AttentionActivations) {
    let (shape, attention) = (ctx.shape, ctx.shape.attention_of(w.unit()));
    let qkv = projections(ctx, x, x_float8, w);
    let query_key = query_key_norm::forward(ctx, w, qkv.view());
    rotate(ctx, w, qkv.view(), None, false);
    let out = ctx.activation(shape.rows * shape.attention_width());
    let saved = if shape.slices == Slices::WHOLE {
        let softmax = match shape.attention_kind {
            AttentionKind::Flash => ctx.statistics(shape.rows * shape.attention.heads),
            AttentionKind::Plain => ctx.activation(attention.score_elements()),
        };
        ctx.backend.attention(Attention {
            qkv: qkv.view(),
            starts: ctx.starts,
            out: out.view(),
            saved: softmax_view(ctx, &softmax),
            shape: attention,
        });
        SavedAttention::Whole { qkv, softmax }
    } else {
        SavedAttention::Slices(context_attention::forward(ctx, attention, qkv, out.view()))
    };
    let saved = AttentionActivations { query_key, out, saved };
    let end = branch.map(|branch| end(ctx, branch, saved.out.view(), w));
    (end, saved)
}

/// The same for new tokens at `positions`, with the KV cache of the earlier tokens. Saves nothing but the cache.
pub(crate) fn decode(
    ctx: &Context,
    x: &mut AllRows,
    w: &Weights,
    cache: &KvCache,
    positions: View,
    branch: BranchOutput,
) -> Chunks {
    let shape = ctx.shape;
    let qkv = projections(ctx, x, None, w);
    drop(query_key_norm::forward(ctx, w, qkv.view()));
    rotate(ctx, w, qkv.view(), Some(positions), false);
    let out = ctx.activation(shape.rows * shape.attention_width());
    ctx.backend.cached_attention(CachedAttention {
        qkv: qkv.view(),
        positions,
        keys: cache.keys.view(),
        values: cache.values.view(),
        out: out.view(),
        shape: shape.cached_attention_of(w.unit()),
        capacity: cache.capacity,
    });
    end(ctx, branch, out.view(), w)
}

fn projections(ctx: &Context, x: &mut AllRows, x_float8: Option<&Float8Matrix>, w: &Weights) -> Buffer {
    let (shape, width) = (ctx.shape, ctx.shape.attention.qkv_width());
    let qkv = ctx.activation(shape.rows * width);
    let weight = w.span(ParameterKind::QueryWeight, ParameterKind::ValueWeight);
    let weight_float8 = ctx.float8(weight, [width, shape.hidden], Orientation::Rows);
    x.each(ctx, |x, rows| {
        let op = Linear {
            x,
            weight,
            bias: w.find_span(ParameterKind::QueryBias, ParameterKind::ValueBias),
            gelu: None,
            residual: None,
            out: qkv.slice(elements(&rows, width)),
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: width,
            float8: None,
        };
        ctx.linear(op, x_float8.map(|x| x.rows(&rows)), weight_float8.as_ref());
    });
    qkv
}

fn end(ctx: &Context, branch: BranchOutput, out: View, w: &Weights) -> Chunks {
    let weight = w.get(ParameterKind::AttentionOutWeight);
    branch.project(ctx, out, None, weight, ctx.shape.attention_width())
}

/// Computes this rank's part of the gradient of `x` from the gradient of the output. The parts are to be summed over tp.
///
/// With [`BackwardPart::Both`] it also computes the gradients of the weights from `x`, each as soon as its inputs are there.
pub(crate) fn backward(
    ctx: &Context,
    dy: &mut AllRows,
    x: Option<&mut BranchInput>,
    saved: AttentionActivations,
    w: &Weights,
    g: &Gradients,
    part: BackwardPart,
) -> (Chunks, Option<AttentionWeightInputs>) {
    let (shape, width) = (ctx.shape, ctx.shape.attention_width());
    let dout = ctx.activation(shape.rows * width);
    let orientation = if part == BackwardPart::Both { Orientation::Both } else { Orientation::Rows };
    // Rows that are still being gathered are converted chunk by chunk.
    let dy_float8 = if shape.overlap && shape.sequence_parallel {
        None
    } else {
        ctx.float8_gradient(dy.whole(ctx), [shape.rows, shape.hidden], orientation)
    };
    let weight = w.get(ParameterKind::AttentionOutWeight);
    let weight_float8 = ctx.float8(weight, [shape.hidden, width], Orientation::Transposed);
    dy.each(ctx, |dy, rows| {
        let op = LinearBackwardInput {
            dy,
            weight,
            gelu: None,
            dx: dout.slice(elements(&rows, width)),
            dbias: None,
            rows: rows.len(),
            inputs: width,
            outputs: shape.hidden,
            float8: None,
        };
        let dy = dy_float8.as_ref().map(|dy| dy.rows(&rows));
        ctx.linear_backward_input(op, dy, weight_float8.as_ref());
    });
    drop(weight_float8);
    if part == BackwardPart::Both {
        let dy_float8 = dy_float8.as_ref().map(Float8Matrix::transposed);
        output_weight_gradient(ctx, saved.out.view(), dy.whole(ctx), g, dy_float8);
    }
    drop(dy_float8);
    let dqkv = ctx.activation(shape.rows * shape.attention.qkv_width());
    // The attention backward also sums the gradient of the bias, unless queries and keys were rotated or normalised after it,
    // or keys have gradients on other ranks.
    let is_last = !shape.rotates(w.unit()) && saved.query_key.is_none() && shape.slices == Slices::WHOLE;
    let in_passing = part == BackwardPart::Both && is_last;
    let dbias = |wanted: bool| {
        if wanted { g.find_span(ParameterKind::QueryBias, ParameterKind::ValueBias) } else { None }
    };
    let AttentionActivations { query_key, out, saved } = saved;
    let attention = shape.attention_of(w.unit());
    match saved {
        SavedAttention::Whole { qkv, softmax } => ctx.backend.attention_backward(AttentionBackward {
            qkv: qkv.view(),
            starts: ctx.starts,
            out: out.view(),
            dout: dout.view(),
            saved: softmax_view(ctx, &softmax),
            dqkv: dqkv.view(),
            dbias: dbias(in_passing),
            shape: attention,
        }),
        SavedAttention::Slices(saved) => {
            context_attention::backward(ctx, attention, saved, out.view(), dout.view(), dqkv.view());
        }
    }
    drop(dout);
    rotate(ctx, w, dqkv.view(), None, true);
    if let Some(saved) = query_key {
        query_key_norm::backward(ctx, w, g, saved, dqkv.view());
    }
    let width = shape.attention.qkv_width();
    let weight = w.span(ParameterKind::QueryWeight, ParameterKind::ValueWeight);
    let weight_float8 = ctx.float8(weight, [width, shape.hidden], Orientation::Transposed);
    let dqkv_float8 = ctx.float8_gradient(dqkv.view(), [shape.rows, width], orientation);
    let dx = ctx.partial_product(|dx, rows| {
        let op = LinearBackwardInput {
            dy: dqkv.slice(elements(&rows, width)),
            weight,
            gelu: None,
            dx,
            dbias: None,
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: width,
            float8: None,
        };
        let dqkv = dqkv_float8.as_ref().map(|dqkv| dqkv.rows(&rows));
        ctx.linear_backward_input(op, dqkv, weight_float8.as_ref());
    });
    drop(weight_float8);
    let weight_inputs = match (part, x) {
        (BackwardPart::Both, Some(x)) => {
            let dqkv_float8 = dqkv_float8.as_ref().map(Float8Matrix::transposed);
            qkv_weight_gradient(ctx, x.factor(ctx), dqkv.view(), g, dbias(!in_passing), dqkv_float8);
            None
        }
        (BackwardPart::Input, _) => Some(AttentionWeightInputs { out, dqkv }),
        (BackwardPart::Both | BackwardPart::Weight | BackwardPart::Frozen, _) => None,
    };
    (dx, weight_inputs)
}

/// The weight part of the backward.
pub(crate) fn weight_part(
    ctx: &Context,
    weight_inputs: &AttentionWeightInputs,
    x: WeightFactor,
    dy: View,
    g: &Gradients,
) {
    output_weight_gradient(ctx, weight_inputs.out.view(), dy, g, None);
    qkv_weight_gradient(
        ctx,
        x,
        weight_inputs.dqkv.view(),
        g,
        g.find_span(ParameterKind::QueryBias, ParameterKind::ValueBias),
        None,
    );
}

fn output_weight_gradient(ctx: &Context, out: View, dy: View, g: &Gradients, dy_float8: Option<Float8View>) {
    ctx.weight_gradient(WeightGradient {
        dy,
        dy_float8,
        x: WeightFactor::Numbers(out),
        dweight: g.get(ParameterKind::AttentionOutWeight),
        dbias: None,
        rows: ctx.shape.rows,
        inputs: ctx.shape.attention_width(),
        outputs: ctx.shape.hidden,
    });
}

fn qkv_weight_gradient(
    ctx: &Context,
    x: WeightFactor,
    dqkv: View,
    g: &Gradients,
    dbias: Option<Gradient>,
    dqkv_float8: Option<Float8View>,
) {
    ctx.weight_gradient(WeightGradient {
        dy: dqkv,
        dy_float8: dqkv_float8,
        x,
        dweight: g.span(ParameterKind::QueryWeight, ParameterKind::ValueWeight),
        dbias,
        rows: ctx.shape.rows,
        inputs: ctx.shape.hidden,
        outputs: ctx.shape.attention.qkv_width(),
    });
}

fn rotate(ctx: &Context, w: &Weights, qkv: View, positions: Option<View>, inverse: bool) {
    let shape = ctx.shape;
    if shape.rotates(w.unit()) {
        let (dims, base, scaling) = (shape.rotary_dims, shape.rotary_base, shape.rotary_scaling);
        let (slices, shape) = (shape.slices, shape.attention);
        ctx.backend.rotary(Rotary { qkv, shape, dims, base, scaling, inverse, positions, slices });
    }
}

fn softmax_view<'a>(ctx: &Context, softmax: &'a Buffer) -> AttentionSaved<'a> {
    match ctx.shape.attention_kind {
        AttentionKind::Flash => AttentionSaved::LogSumExp(softmax.view()),
        AttentionKind::Plain => AttentionSaved::Probabilities(softmax.view()),
    }
}

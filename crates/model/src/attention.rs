//! Attention between its norm and the residual: column-parallel query, key and value; heads; row-parallel output.

use kintsugi_plan::parameters::Slot;
use kintsugi_plan::{AttentionKind, Part};
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, AttentionSaved, CachedAttention, Gradient, Linear, LinearBackwardInput,
    LinearBackwardWeight, Rotary,
};
use kintsugi_tensor::{Buffer, View};

use crate::stream::Ending;
use crate::{Cache, Context, Gradients, Weights};

/// What attention keeps for its backward.
#[derive(Debug)]
pub(crate) struct Saved {
    /// Projections after the rotation, `[rows, heads + 2·kv_heads, head_dim]`.
    qkv: Buffer,
    /// Heads' outputs, `[rows, heads, head_dim]`.
    out: Buffer,
    /// Log-sum-exp (flash) or probabilities (plain).
    softmax: Buffer,
}

/// What the weight part needs.
#[derive(Debug)]
pub(crate) struct Deferred {
    out: Buffer,
    dqkv: Buffer,
}

/// From normed rows to the branch's end; without an ending only what is saved.
pub(crate) fn forward(
    ctx: &Context,
    x: View,
    w: &Weights,
    ending: Option<Ending>,
) -> (Option<Buffer>, Saved) {
    let shape = ctx.shape;
    let qkv = projections(ctx, x, w);
    rotate(ctx, qkv.view(), None, false);
    let out = ctx.activation(shape.rows * shape.attention_width());
    let softmax = match shape.attention_kind {
        AttentionKind::Flash => ctx.statistics(shape.rows * shape.attention.heads),
        AttentionKind::Plain => ctx.activation(shape.attention.scores()),
    };
    let saved = Saved { qkv, out, softmax };
    ctx.backend.attention(Attention {
        qkv: saved.qkv.view(),
        starts: ctx.starts,
        out: saved.out.view(),
        saved: softmax_view(ctx, &saved),
        shape: shape.attention,
    });
    let end = ending.map(|ending| end(ctx, ending, saved.out.view(), w));
    (end, saved)
}

/// The same for new tokens at `positions`, over what the cache holds of those before them; keeps nothing else.
pub(crate) fn decode(
    ctx: &Context,
    x: View,
    w: &Weights,
    cache: &Cache,
    positions: View,
    ending: Ending,
) -> Buffer {
    let shape = ctx.shape;
    let qkv = projections(ctx, x, w);
    rotate(ctx, qkv.view(), Some(positions), false);
    let out = ctx.activation(shape.rows * shape.attention_width());
    ctx.backend.cached_attention(CachedAttention {
        qkv: qkv.view(),
        positions,
        keys: cache.keys.view(),
        values: cache.values.view(),
        out: out.view(),
        shape: shape.attention,
        capacity: cache.capacity,
    });
    end(ctx, ending, out.view(), w)
}

fn projections(ctx: &Context, x: View, w: &Weights) -> Buffer {
    let shape = ctx.shape;
    let qkv = ctx.activation(shape.rows * shape.attention.qkv_width());
    ctx.backend.linear(Linear {
        x,
        weight: w.span(Slot::QueryWeight, Slot::ValueWeight),
        bias: w.find_span(Slot::QueryBias, Slot::ValueBias),
        gelu: None,
        residual: None,
        out: qkv.view(),
        rows: shape.rows,
        inputs: shape.hidden,
        outputs: shape.attention.qkv_width(),
    });
    qkv
}

fn end(ctx: &Context, ending: Ending, out: View, w: &Weights) -> Buffer {
    ending.project(ctx, out, w.get(Slot::AttentionOutWeight), ctx.shape.attention_width())
}

/// From the gradient of the output to this rank's part of the gradient of `x`, to be summed over tp.
///
/// With [`Part::Both`] the weights' gradients are done on the way, each as soon as it can be.
pub(crate) fn backward(
    ctx: &Context,
    dy: View,
    x: View,
    saved: Saved,
    w: &Weights,
    g: &Gradients,
    part: Part,
) -> (Buffer, Option<Deferred>) {
    let shape = ctx.shape;
    let dout = ctx.activation(shape.rows * shape.attention_width());
    ctx.backend.linear_backward_input(LinearBackwardInput {
        dy,
        weight: w.get(Slot::AttentionOutWeight),
        gelu: None,
        dx: dout.view(),
        dbias: None,
        rows: shape.rows,
        inputs: shape.attention_width(),
        outputs: shape.hidden,
    });
    if part == Part::Both {
        output_weight_gradient(ctx, saved.out.view(), dy, g);
    }
    let dqkv = ctx.activation(saved.qkv.len());
    // The bias's gradient is summed in passing, unless queries and keys must be rotated back first.
    let in_passing = part == Part::Both && shape.rotary_dims == 0;
    let dbias = |wanted: bool| if wanted { g.find_span(Slot::QueryBias, Slot::ValueBias) } else { None };
    ctx.backend.attention_backward(AttentionBackward {
        qkv: saved.qkv.view(),
        starts: ctx.starts,
        out: saved.out.view(),
        dout: dout.view(),
        saved: softmax_view(ctx, &saved),
        dqkv: dqkv.view(),
        dbias: dbias(in_passing),
        shape: shape.attention,
    });
    let Saved { qkv, out, softmax } = saved;
    drop((dout, qkv, softmax));
    rotate(ctx, dqkv.view(), None, true);
    let dx = ctx.activation(shape.rows * shape.hidden);
    ctx.backend.linear_backward_input(LinearBackwardInput {
        dy: dqkv.view(),
        weight: w.span(Slot::QueryWeight, Slot::ValueWeight),
        gelu: None,
        dx: dx.view(),
        dbias: None,
        rows: shape.rows,
        inputs: shape.hidden,
        outputs: shape.attention.qkv_width(),
    });
    if part == Part::Both {
        qkv_weight_gradient(ctx, x, dqkv.view(), g, dbias(!in_passing));
        return (dx, None);
    }
    (dx, Some(Deferred { out, dqkv }))
}

/// The weight part, from what was deferred and the two gradients' other factors.
pub(crate) fn weight_part(ctx: &Context, deferred: &Deferred, x: View, dy: View, g: &Gradients) {
    output_weight_gradient(ctx, deferred.out.view(), dy, g);
    qkv_weight_gradient(ctx, x, deferred.dqkv.view(), g, g.find_span(Slot::QueryBias, Slot::ValueBias));
}

fn output_weight_gradient(ctx: &Context, out: View, dy: View, g: &Gradients) {
    ctx.backend.linear_backward_weight(LinearBackwardWeight {
        dy,
        x: out,
        dweight: g.get(Slot::AttentionOutWeight),
        dbias: None,
        rows: ctx.shape.rows,
        inputs: ctx.shape.attention_width(),
        outputs: ctx.shape.hidden,
    });
}

fn qkv_weight_gradient(ctx: &Context, x: View, dqkv: View, g: &Gradients, dbias: Option<Gradient>) {
    ctx.backend.linear_backward_weight(LinearBackwardWeight {
        dy: dqkv,
        x,
        dweight: g.span(Slot::QueryWeight, Slot::ValueWeight),
        dbias,
        rows: ctx.shape.rows,
        inputs: ctx.shape.hidden,
        outputs: ctx.shape.attention.qkv_width(),
    });
}

fn rotate(ctx: &Context, qkv: View, positions: Option<View>, inverse: bool) {
    let shape = ctx.shape;
    if shape.rotary_dims > 0 {
        let (dims, base, scaling) = (shape.rotary_dims, shape.rotary_base, shape.rotary_scaling);
        let shape = shape.attention;
        ctx.backend.rotary(Rotary { qkv, shape, dims, base, scaling, inverse, positions });
    }
}

fn softmax_view<'a>(ctx: &Context, saved: &'a Saved) -> AttentionSaved<'a> {
    match ctx.shape.attention_kind {
        AttentionKind::Flash => AttentionSaved::LogSumExp(saved.softmax.view()),
        AttentionKind::Plain => AttentionSaved::Probabilities(saved.softmax.view()),
    }
}

//! The MLP between its norm and the residual: column-parallel in, GELU or SwiGLU, row-parallel out.
//!
//! GELU in its tanh form is part of the first product; the others follow it.

use kintsugi_plan::parameters::Slot;
use kintsugi_plan::{Part, Recompute};
use kintsugi_spec::Activation;
use kintsugi_tensor::ops::{
    Gradient, Linear, LinearBackwardInput, LinearBackwardWeight, Swiglu, SwigluBackward,
};
use kintsugi_tensor::{Buffer, View};

use crate::stream::Ending;
use crate::{Context, Gradients, Weights};

/// What the MLP keeps for its backward.
#[derive(Debug)]
pub(crate) struct Saved {
    /// Result of the first product, before the activation: `[rows, ffn]`, or `[rows, 2·ffn]` (gate, up).
    pre: Buffer,
    /// Activation, `[rows, ffn]`; not kept under selective recomputation.
    act: Option<Buffer>,
}

/// What the weight part needs.
#[derive(Debug)]
pub(crate) struct Deferred {
    act: Buffer,
    dpre: Buffer,
}

/// From normed rows to the branch's end; without an ending only what is saved.
pub(crate) fn forward(
    ctx: &Context,
    x: View,
    w: &Weights,
    ending: Option<Ending>,
) -> (Option<Buffer>, Saved) {
    let shape = ctx.shape;
    let pre = ctx.activation(shape.rows * shape.mlp_in_width());
    let act = ctx.activation(shape.rows * shape.ffn);
    let gelu = shape.activation == Activation::Gelu;
    ctx.backend.linear(Linear {
        x,
        weight: in_weight(ctx, w),
        bias: w.find(Slot::MlpInBias),
        gelu: gelu.then(|| pre.view()),
        residual: None,
        out: if gelu { act.view() } else { pre.view() },
        rows: shape.rows,
        inputs: shape.hidden,
        outputs: shape.mlp_in_width(),
    });
    if !gelu {
        activate_into(ctx, pre.view(), act.view());
    }
    let weight = w.get(Slot::MlpOutWeight);
    let end = ending.map(|ending| ending.project(ctx, act.view(), weight, shape.ffn));
    let act = (shape.recompute != Recompute::Selective).then_some(act);
    (end, Saved { pre, act })
}

/// From the gradient of the output to this rank's part of the gradient of the input, to be summed over tp.
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
    let Saved { pre, act } = saved;
    let act = act.unwrap_or_else(|| activate(ctx, pre.view()));
    let act = if part == Part::Both {
        out_weight_gradient(ctx, act.view(), dy, g);
        drop(act);
        None
    } else {
        Some(act)
    };
    // GELU's derivative can sum the bias's gradient in passing.
    let in_passing = part == Part::Both && shape.activation == Activation::Gelu;
    let dbias = if in_passing { g.find(Slot::MlpInBias) } else { None };
    let dpre = input_gradient(ctx, dy, pre, w, dbias);
    let dx = ctx.activation(shape.rows * shape.hidden);
    ctx.backend.linear_backward_input(LinearBackwardInput {
        dy: dpre.view(),
        weight: in_weight(ctx, w),
        gelu: None,
        dx: dx.view(),
        dbias: None,
        rows: shape.rows,
        inputs: shape.hidden,
        outputs: shape.mlp_in_width(),
    });
    if part == Part::Both {
        let dbias = if in_passing { None } else { g.find(Slot::MlpInBias) };
        in_weight_gradient(ctx, x, dpre.view(), g, dbias);
    }
    (dx, act.map(|act| Deferred { act, dpre }))
}

/// The weight part, from what was deferred and the two gradients' other factors.
pub(crate) fn weight_part(ctx: &Context, deferred: &Deferred, x: View, dy: View, g: &Gradients) {
    out_weight_gradient(ctx, deferred.act.view(), dy, g);
    in_weight_gradient(ctx, x, deferred.dpre.view(), g, g.find(Slot::MlpInBias));
}

/// The gradient of the pre-activation, and with `dbias`, which is for GELU only, its sum over the rows.
fn input_gradient(ctx: &Context, dy: View, pre: Buffer, w: &Weights, dbias: Option<Gradient>) -> Buffer {
    let shape = ctx.shape;
    let gelu = shape.activation == Activation::Gelu;
    let dact = ctx.activation(shape.rows * shape.ffn);
    ctx.backend.linear_backward_input(LinearBackwardInput {
        dy,
        weight: w.get(Slot::MlpOutWeight),
        gelu: gelu.then(|| pre.view()),
        dx: dact.view(),
        dbias,
        rows: shape.rows,
        inputs: shape.ffn,
        outputs: shape.hidden,
    });
    match shape.activation {
        Activation::Gelu => dact,
        Activation::ExactGelu => {
            ctx.backend.exact_gelu_backward(pre.view(), dact.view());
            dact
        }
        Activation::Swiglu => {
            ctx.backend.swiglu_backward(SwigluBackward {
                dout: dact.view(),
                x: pre.view(),
                dx: pre.view(),
                rows: shape.rows,
                width: shape.ffn,
            });
            pre
        }
    }
}

/// The activation again, from what was kept.
fn activate(ctx: &Context, pre: View) -> Buffer {
    let act = ctx.activation(ctx.shape.rows * ctx.shape.ffn);
    activate_into(ctx, pre, act.view());
    act
}

fn activate_into(ctx: &Context, pre: View, act: View) {
    let (rows, width) = (ctx.shape.rows, ctx.shape.ffn);
    match ctx.shape.activation {
        Activation::Gelu => ctx.backend.gelu(pre, act),
        Activation::ExactGelu => ctx.backend.exact_gelu(pre, act),
        Activation::Swiglu => ctx.backend.swiglu(Swiglu { x: pre, out: act, rows, width }),
    }
}

fn in_weight<'a>(ctx: &Context, w: &Weights<'a>) -> View<'a> {
    match ctx.shape.activation {
        Activation::Gelu | Activation::ExactGelu => w.get(Slot::MlpInWeight),
        Activation::Swiglu => w.span(Slot::MlpGateWeight, Slot::MlpInWeight),
    }
}

fn out_weight_gradient(ctx: &Context, act: View, dy: View, g: &Gradients) {
    ctx.backend.linear_backward_weight(LinearBackwardWeight {
        dy,
        x: act,
        dweight: g.get(Slot::MlpOutWeight),
        dbias: None,
        rows: ctx.shape.rows,
        inputs: ctx.shape.ffn,
        outputs: ctx.shape.hidden,
    });
}

fn in_weight_gradient(ctx: &Context, x: View, dpre: View, g: &Gradients, dbias: Option<Gradient>) {
    ctx.backend.linear_backward_weight(LinearBackwardWeight {
        dy: dpre,
        x,
        dweight: match ctx.shape.activation {
            Activation::Gelu | Activation::ExactGelu => g.get(Slot::MlpInWeight),
            Activation::Swiglu => g.span(Slot::MlpGateWeight, Slot::MlpInWeight),
        },
        dbias,
        rows: ctx.shape.rows,
        inputs: ctx.shape.hidden,
        outputs: ctx.shape.mlp_in_width(),
    });
}

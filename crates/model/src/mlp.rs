//! The MLP between its norm and the residual: column-parallel in, GELU or SwiGLU, row-parallel out.
//!
//! The tanh form of GELU is fused into the first matrix product. The other activation functions are separate kernels.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_plan::{BackwardPart, Recompute};
use kintsugi_spec::Activation;
use kintsugi_tensor::ops::{
    Gradient, Linear, LinearBackwardInput, LinearBackwardWeight, Swiglu, SwigluBackward,
};
use kintsugi_tensor::{Buffer, View};

use crate::residual::BranchOutput;
use crate::rows::{Chunks, GradientRows, elements};
use crate::{Context, Gradients, Weights};

/// The activations that the MLP saves for its backward.
#[derive(Debug)]
pub(crate) struct MlpActivations {
    /// Result of the first product, before the activation: `[rows, ffn]`, or `[rows, 2·ffn]` (gate, up).
    pre: Buffer,
    /// Activation, `[rows, ffn]`. Not saved with selective recomputation.
    act: Option<Buffer>,
}

/// What the weight part of the backward needs.
#[derive(Debug)]
pub(crate) struct MlpWeightInputs {
    act: Buffer,
    dpre: Buffer,
}

/// Runs the MLP on normed rows and projects the result into `branch`. Without a `branch`, only computes the activations.
pub(crate) fn forward(
    ctx: &Context,
    x: &mut Chunks,
    w: &Weights,
    branch: Option<BranchOutput>,
) -> (Option<Chunks>, MlpActivations) {
    let (shape, width) = (ctx.shape, ctx.shape.mlp_in_width());
    let pre = ctx.activation(shape.rows * width);
    let act = ctx.activation(shape.rows * shape.ffn);
    let gelu = shape.activation == Activation::Gelu;
    x.each(ctx, |x, rows| {
        let pre = pre.slice(elements(&rows, width));
        ctx.backend.linear(Linear {
            x,
            weight: in_weight(ctx, w),
            bias: w.find(ParameterKind::MlpInBias),
            gelu: gelu.then_some(pre),
            residual: None,
            out: if gelu { act.slice(elements(&rows, width)) } else { pre },
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: width,
        });
    });
    if !gelu {
        activate_into(ctx, pre.view(), act.view());
    }
    let weight = w.get(ParameterKind::MlpOutWeight);
    let end = branch.map(|branch| branch.project(ctx, act.view(), weight, shape.ffn));
    let act = (shape.recompute != Recompute::Selective).then_some(act);
    (end, MlpActivations { pre, act })
}

/// Computes this rank's part of the gradient of the input from the gradient of the output. The parts are to be summed
/// over tp.
///
/// With [`BackwardPart::Both`] it also computes the gradients of the weights, each as soon as its inputs are there.
pub(crate) fn backward(
    ctx: &Context,
    dy: &mut GradientRows,
    x: &mut Chunks,
    saved: MlpActivations,
    w: &Weights,
    g: &Gradients,
    part: BackwardPart,
) -> (Chunks, Option<MlpWeightInputs>) {
    let (shape, width) = (ctx.shape, ctx.shape.mlp_in_width());
    let MlpActivations { pre, act } = saved;
    let mut act = Some(act.unwrap_or_else(|| activate(ctx, pre.view())));
    // The gradient of the output matrix comes first, so that its input is freed early. It needs all rows of `dy`, so if
    // these are still being gathered, the product that takes them chunk by chunk comes first.
    let gathering = shape.overlap && shape.sequence_parallel;
    let out_weight = |act: &mut Option<Buffer>, dy: &mut GradientRows| {
        if part == BackwardPart::Both {
            let act = act.take().expect("it is used once");
            out_weight_gradient(ctx, act.view(), dy.whole(ctx), g);
        }
    };
    if !gathering {
        out_weight(&mut act, dy);
    }
    // The kernel of GELU's derivative can also sum the gradient of the bias, over all rows at once.
    let in_passing = part == BackwardPart::Both && shape.activation == Activation::Gelu && !gathering;
    let dbias = if in_passing { g.find(ParameterKind::MlpInBias) } else { None };
    let dpre = input_gradient(ctx, dy, pre, w, dbias);
    if gathering {
        out_weight(&mut act, dy);
    }
    let dx = ctx.partial_product(|dx, rows| {
        ctx.backend.linear_backward_input(LinearBackwardInput {
            dy: dpre.slice(elements(&rows, width)),
            weight: in_weight(ctx, w),
            gelu: None,
            dx,
            dbias: None,
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: width,
        });
    });
    if part == BackwardPart::Both {
        let dbias = if in_passing { None } else { g.find(ParameterKind::MlpInBias) };
        in_weight_gradient(ctx, x.whole(ctx), dpre.view(), g, dbias);
    }
    (dx, act.map(|act| MlpWeightInputs { act, dpre }))
}

/// The weight part of the backward.
pub(crate) fn weight_part(ctx: &Context, weight_inputs: &MlpWeightInputs, x: View, dy: View, g: &Gradients) {
    out_weight_gradient(ctx, weight_inputs.act.view(), dy, g);
    in_weight_gradient(ctx, x, weight_inputs.dpre.view(), g, g.find(ParameterKind::MlpInBias));
}

/// The gradient of the pre-activation. Writes its sum over the rows to `dbias`, which only GELU supports.
fn input_gradient(
    ctx: &Context,
    dy: &mut GradientRows,
    pre: Buffer,
    w: &Weights,
    dbias: Option<Gradient>,
) -> Buffer {
    let shape = ctx.shape;
    let gelu = shape.activation == Activation::Gelu;
    let dact = ctx.activation(shape.rows * shape.ffn);
    dy.each(ctx, |dy, rows| {
        let part = elements(&rows, shape.ffn);
        ctx.backend.linear_backward_input(LinearBackwardInput {
            dy,
            weight: w.get(ParameterKind::MlpOutWeight),
            gelu: gelu.then(|| pre.slice(part.clone())),
            dx: dact.slice(part),
            dbias,
            rows: rows.len(),
            inputs: shape.ffn,
            outputs: shape.hidden,
        });
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

/// Recomputes the activation from the saved pre-activation.
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
    w.span(first_in_weight(ctx), ParameterKind::MlpInWeight)
}

/// The first of the adjacent matrices that are multiplied with the MLP's input.
fn first_in_weight(ctx: &Context) -> ParameterKind {
    let gated = ctx.shape.activation.is_gated();
    if gated { ParameterKind::MlpGateWeight } else { ParameterKind::MlpInWeight }
}

fn out_weight_gradient(ctx: &Context, act: View, dy: View, g: &Gradients) {
    ctx.backend.linear_backward_weight(LinearBackwardWeight {
        dy,
        x: act,
        dweight: g.get(ParameterKind::MlpOutWeight),
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
        dweight: g.span(first_in_weight(ctx), ParameterKind::MlpInWeight),
        dbias,
        rows: ctx.shape.rows,
        inputs: ctx.shape.hidden,
        outputs: ctx.shape.mlp_in_width(),
    });
}

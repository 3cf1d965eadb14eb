//! The MLP between its norm and the residual: column-parallel in, GELU or a gated unit, row-parallel out.
//!
//! The tanh form of GELU is fused into the first matrix product, or into the conversion to 8 bits. The other activation functions
//! are separate kernels.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_plan::{BackwardPart, Products, Recompute};
use kintsugi_spec::Activation;
use kintsugi_tensor::ops::{
    Float8Source, GateFunction, Gated, GatedBackward, Gradient, Linear, LinearBackwardInput,
};
use kintsugi_tensor::{Buffer, View};

use crate::float8::{Float8Matrix, Float8View, Orientation, SavedFactor, WeightFactor, WeightGradient};
use crate::layer::BranchInput;
use crate::residual::BranchOutput;
use crate::rows::{AllRows, Chunks, elements};
use crate::{Context, Gradients, Weights};

/// The activations that the MLP saves for its backward.
#[derive(Debug)]
pub(crate) struct MlpActivations {
    /// Result of the first product, before the activation: `[rows, ffn]`, or `[rows, 2·ffn]` (gate, up).
    pre: Buffer,
    /// Activation, `[rows, ffn]`. Not saved with selective recomputation.
    act: Option<SavedFactor>,
}

/// What the weight part of the backward needs.
#[derive(Debug)]
pub(crate) struct MlpWeightInputs {
    act: SavedFactor,
    dpre: Buffer,
}

/// Runs the MLP on normed rows and projects the result into `branch`. Without a `branch`, only computes the activations.
pub(crate) fn forward(
    ctx: &Context,
    x: &mut AllRows,
    x_float8: Option<&Float8Matrix>,
    w: &Weights,
    branch: Option<BranchOutput>,
) -> (Option<Chunks>, MlpActivations) {
    let (shape, width) = (ctx.shape, ctx.shape.mlp_in_width());
    let pre = ctx.activation(shape.rows * width);
    // In 8 bits GELU is computed while its input is converted, and is never in memory as numbers.
    let converts = shape.activation == Activation::Gelu && shape.products == Products::Fp8;
    let gelu = shape.activation == Activation::Gelu && !converts;
    let act = (!converts).then(|| ctx.activation(shape.rows * shape.ffn));
    let weight = ctx.float8(in_weight(ctx, w), [width, shape.hidden], Orientation::Rows);
    x.each(ctx, |x, rows| {
        let pre = pre.slice(elements(&rows, width));
        let op = Linear {
            x,
            weight: in_weight(ctx, w),
            bias: w.find(ParameterKind::MlpInBias),
            gelu: gelu.then_some(pre),
            residual: None,
            out: act.as_ref().filter(|_| gelu).map_or(pre, |act| act.slice(elements(&rows, width))),
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: width,
            float8: None,
        };
        ctx.linear(op, x_float8.map(|x| x.rows(&rows)), weight.as_ref());
    });
    drop(weight);
    if let Some(act) = act.as_ref().filter(|_| !gelu) {
        activate_into(ctx, pre.view(), act.view());
    }
    let weight = w.get(ParameterKind::MlpOutWeight);
    let saves = shape.recompute != Recompute::Selective;
    let orientation = match (branch.is_some(), saves) {
        (true, true) => Some(Orientation::Both),
        (true, false) => Some(Orientation::Rows),
        (false, true) => Some(Orientation::Transposed),
        (false, false) => None,
    };
    let source = act.as_ref().map_or(Float8Source::Gelu(pre.view()), |act| Float8Source::Numbers(act.view()));
    let act_float8 = orientation.and_then(|which| ctx.float8_of(source, [shape.rows, shape.ffn], which));
    let x = source.view();
    let end = branch.map(|branch| branch.project(ctx, x, act_float8.as_ref(), weight, shape.ffn));
    let act = if saves { SavedFactor::new(act, act_float8) } else { None };
    (end, MlpActivations { pre, act })
}

/// Computes this rank's part of the gradient of the input from the gradient of the output. The parts are to be summed
/// over tp.
///
/// With [`BackwardPart::Both`] it also computes the gradients of the weights from `x`, each as soon as its inputs are there.
pub(crate) fn backward(
    ctx: &Context,
    dy: &mut AllRows,
    x: Option<&mut BranchInput>,
    saved: MlpActivations,
    w: &Weights,
    g: &Gradients,
    part: BackwardPart,
) -> (Chunks, Option<MlpWeightInputs>) {
    let (shape, width) = (ctx.shape, ctx.shape.mlp_in_width());
    let MlpActivations { pre, act } = saved;
    let trained = part != BackwardPart::Frozen;
    let mut act = if trained { act.or_else(|| Some(activated(ctx, pre.view()))) } else { None };
    // The gradient of the output matrix comes first, so that its input is freed early. It needs all rows of `dy`, so if
    // these are still being gathered, the product that takes them chunk by chunk comes first.
    let gathering = shape.overlap && shape.sequence_parallel;
    let orientation = if part == BackwardPart::Both { Orientation::Both } else { Orientation::Rows };
    let dy_float8 = if gathering {
        None
    } else {
        ctx.float8_gradient(dy.whole(ctx), [shape.rows, shape.hidden], orientation)
    };
    let out_weight = |act: &mut Option<SavedFactor>, dy: &mut AllRows| {
        if part == BackwardPart::Both {
            let act = act.take().expect("it is used once");
            let dy_float8 = dy_float8.as_ref().map(Float8Matrix::transposed);
            out_weight_gradient(ctx, act.factor(), dy.whole(ctx), g, dy_float8);
        }
    };
    if !gathering {
        out_weight(&mut act, dy);
    }
    // The kernel of GELU's derivative can also sum the gradient of the bias, over all rows at once.
    let in_passing = part == BackwardPart::Both && shape.activation == Activation::Gelu && !gathering;
    let dbias = if in_passing { g.find(ParameterKind::MlpInBias) } else { None };
    let dpre = input_gradient(ctx, dy, dy_float8.as_ref(), pre, w, dbias);
    if gathering {
        out_weight(&mut act, dy);
    }
    drop(dy_float8);
    let dpre_float8 = ctx.float8_gradient(dpre.view(), [shape.rows, width], orientation);
    let weight = ctx.float8(in_weight(ctx, w), [width, shape.hidden], Orientation::Transposed);
    let dx = ctx.partial_product(|dx, rows| {
        let op = LinearBackwardInput {
            dy: dpre.slice(elements(&rows, width)),
            weight: in_weight(ctx, w),
            gelu: None,
            dx,
            dbias: None,
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: width,
            float8: None,
        };
        ctx.linear_backward_input(op, dpre_float8.as_ref().map(|dpre| dpre.rows(&rows)), weight.as_ref());
    });
    drop(weight);
    if let Some(x) = x.filter(|_| part == BackwardPart::Both) {
        let dbias = if in_passing { None } else { g.find(ParameterKind::MlpInBias) };
        let dpre_float8 = dpre_float8.as_ref().map(Float8Matrix::transposed);
        in_weight_gradient(ctx, x.factor(ctx), dpre.view(), g, dbias, dpre_float8);
    }
    (dx, act.map(|act| MlpWeightInputs { act, dpre }))
}

/// The weight part of the backward.
pub(crate) fn weight_part(
    ctx: &Context,
    weight_inputs: &MlpWeightInputs,
    x: WeightFactor,
    dy: View,
    g: &Gradients,
) {
    out_weight_gradient(ctx, weight_inputs.act.factor(), dy, g, None);
    in_weight_gradient(ctx, x, weight_inputs.dpre.view(), g, g.find(ParameterKind::MlpInBias), None);
}

/// The gradient of the pre-activation. Writes its sum over the rows to `dbias`, which only GELU supports.
fn input_gradient(
    ctx: &Context,
    dy: &mut AllRows,
    dy_float8: Option<&Float8Matrix>,
    pre: Buffer,
    w: &Weights,
    dbias: Option<Gradient>,
) -> Buffer {
    let shape = ctx.shape;
    let gelu = shape.activation == Activation::Gelu;
    let dact = ctx.activation(shape.rows * shape.ffn);
    let weight = w.get(ParameterKind::MlpOutWeight);
    let weight_float8 = ctx.float8(weight, [shape.hidden, shape.ffn], Orientation::Transposed);
    dy.each(ctx, |dy, rows| {
        let part = elements(&rows, shape.ffn);
        let op = LinearBackwardInput {
            dy,
            weight,
            gelu: gelu.then(|| pre.slice(part.clone())),
            dx: dact.slice(part),
            dbias,
            rows: rows.len(),
            inputs: shape.ffn,
            outputs: shape.hidden,
            float8: None,
        };
        ctx.linear_backward_input(op, dy_float8.map(|dy| dy.rows(&rows)), weight_float8.as_ref());
    });
    match shape.activation {
        Activation::Gelu => dact,
        Activation::ExactGelu => {
            ctx.backend.exact_gelu_backward(pre.view(), dact.view());
            dact
        }
        Activation::Swiglu | Activation::Geglu => {
            ctx.backend.gated_backward(GatedBackward {
                dout: dact.view(),
                x: pre.view(),
                dx: pre.view(),
                gate: gate(shape.activation),
                rows: shape.rows,
                width: shape.ffn,
            });
            pre
        }
    }
}

/// Recomputes the activation as a factor of the gradient of the output matrix.
fn activated(ctx: &Context, pre: View) -> SavedFactor {
    let sizes = [ctx.shape.rows, ctx.shape.ffn];
    let float8 = match ctx.shape.activation {
        Activation::Gelu => ctx.float8_of(Float8Source::Gelu(pre), sizes, Orientation::Transposed),
        Activation::ExactGelu | Activation::Swiglu | Activation::Geglu => None,
    };
    float8.map_or_else(|| SavedFactor::Numbers(activate(ctx, pre)), SavedFactor::Float8)
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
        gated @ (Activation::Swiglu | Activation::Geglu) => {
            ctx.backend.gated(Gated { x: pre, out: act, gate: gate(gated), rows, width });
        }
    }
}

/// The function of the gate.
fn gate(activation: Activation) -> GateFunction {
    if activation == Activation::Geglu { GateFunction::Gelu } else { GateFunction::Silu }
}

fn in_weight<'a>(ctx: &Context, w: &Weights<'a>) -> View<'a> {
    w.span(first_in_weight(ctx), ParameterKind::MlpInWeight)
}

/// The first of the adjacent matrices that are multiplied with the MLP's input.
fn first_in_weight(ctx: &Context) -> ParameterKind {
    let gated = ctx.shape.activation.is_gated();
    if gated { ParameterKind::MlpGateWeight } else { ParameterKind::MlpInWeight }
}

fn out_weight_gradient(
    ctx: &Context,
    act: WeightFactor,
    dy: View,
    g: &Gradients,
    dy_float8: Option<Float8View>,
) {
    ctx.weight_gradient(WeightGradient {
        dy,
        dy_float8,
        x: act,
        dweight: g.get(ParameterKind::MlpOutWeight),
        dbias: None,
        rows: ctx.shape.rows,
        inputs: ctx.shape.ffn,
        outputs: ctx.shape.hidden,
    });
}

fn in_weight_gradient(
    ctx: &Context,
    x: WeightFactor,
    dpre: View,
    g: &Gradients,
    dbias: Option<Gradient>,
    dpre_float8: Option<Float8View>,
) {
    ctx.weight_gradient(WeightGradient {
        dy: dpre,
        dy_float8: dpre_float8,
        x,
        dweight: g.span(first_in_weight(ctx), ParameterKind::MlpInWeight),
        dbias,
        rows: ctx.shape.rows,
        inputs: ctx.shape.hidden,
        outputs: ctx.shape.mlp_in_width(),
    });
}

//! A transformer layer: norms, attention, MLP and residuals.
//!
//! The sequential form adds attention to the residual stream, and then the MLP of the sum. The parallel form of GPT-NeoX
//! computes both from the same input and adds them together, with one reduction over tp instead of two. In the sequential form,
//! norms may also follow attention and MLP, before their outputs are added to the stream; and those before them may be missing.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_plan::{BackwardPart, Recompute};
use kintsugi_tensor::ops::{ColumnSum, Norm, NormBackward, Residual};
use kintsugi_tensor::{Buffer, View};

use crate::context::NormWeights;
use crate::float8::{Float8Matrix, Orientation, SavedFactor, WeightFactor};
use crate::residual::{BranchOutput, add_both_to_stream, add_to_stream};
use crate::rows::{AllRows, Chunks};
use crate::{Context, Gradients, KvCache, Weights, attention, mlp};

/// The activations that a layer saves for its backward.
#[derive(Debug)]
pub struct LayerActivations {
    /// The layer's input, this rank's rows.
    x: Buffer,
    /// The residual stream between attention and MLP. `None` in the parallel form.
    middle: Option<Buffer>,
    attention_norm: NormActivations,
    attention: attention::AttentionActivations,
    attention_end: Option<EndNormActivations>,
    mlp_norm: NormActivations,
    mlp: mlp::MlpActivations,
    mlp_end: Option<EndNormActivations>,
}

/// The activations of a norm before a branch: its statistics if there is a norm, and its output unless the backward recomputes it.
#[derive(Debug)]
struct NormActivations {
    statistics: Option<Buffer>,
    out: Option<SavedFactor>,
}

/// The activations of a norm after a branch: its input, this rank's rows, and its statistics.
#[derive(Debug)]
struct EndNormActivations {
    x: Buffer,
    statistics: Buffer,
}

/// The input of a branch in the backward: the output of its norm, or rows of the residual stream.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a step makes no heap allocations")]
pub(crate) enum BranchInput<'a> {
    /// Recomputed, or saved as numbers.
    Numbers(AllRows<'a>),
    /// Saved in 8 bits, transposed.
    Float8(Float8Matrix),
}

impl BranchInput<'_> {
    /// It as a factor of the gradient of a weight.
    pub(crate) fn factor(&mut self, ctx: &Context) -> WeightFactor<'_> {
        match self {
            BranchInput::Numbers(rows) => WeightFactor::Numbers(rows.whole(ctx)),
            BranchInput::Float8(matrix) => WeightFactor::Float8(matrix.transposed()),
        }
    }

    /// `None` if they are rows of the residual stream.
    fn into_saved(self, ctx: &Context) -> Option<SavedFactor> {
        match self {
            BranchInput::Numbers(rows) => rows.into_gathered(ctx).map(SavedFactor::Numbers),
            BranchInput::Float8(matrix) => Some(SavedFactor::Float8(matrix)),
        }
    }
}

/// What the weight part of a layer's backward needs.
#[derive(Debug)]
pub struct LayerWeightInputs {
    attention: attention::AttentionWeightInputs,
    attention_x: SavedFactor,
    attention_dy: Option<Buffer>,
    mlp: mlp::MlpWeightInputs,
    mlp_x: SavedFactor,
    mlp_dy: Buffer,
}

/// Runs the layer and saves the activations for its backward.
pub fn forward(ctx: &Context, x: Buffer, w: &Weights) -> (Buffer, LayerActivations) {
    let (y, saved) = run(ctx, x, w, true);
    (y.expect("the output was asked for"), saved)
}

/// Runs the layer without saving activations. Returns the output and the input.
pub fn evaluate(ctx: &Context, x: Buffer, w: &Weights) -> (Buffer, Buffer) {
    let (y, saved) = forward(ctx, x, w);
    (y, saved.x)
}

/// Recomputes the activations for the backward from the layer's input. Does not compute the output.
pub fn rebuild(ctx: &Context, x: Buffer, w: &Weights) -> LayerActivations {
    run(ctx, x, w, false).1
}

/// Runs the layer on new tokens at `positions`, with the KV cache of the earlier tokens. Saves nothing but the cache.
pub fn decode(ctx: &Context, x: &Buffer, w: &Weights, cache: &KvCache, positions: View) -> Buffer {
    let biases = [w.find(ParameterKind::AttentionOutBias), w.find(ParameterKind::MlpOutBias)];
    let parallel = ctx.shape.parallel_residual;
    let (mut input, _) = enter(ctx, x.view(), attention_norm(w));
    let branch = if parallel { BranchOutput::first } else { BranchOutput::new };
    let end_norms = [ParameterKind::AttentionEndNormWeight, ParameterKind::MlpEndNormWeight];
    let [attention_end_norm, mlp_end_norm] = end_norms.map(|kind| w.find(kind));
    let branch = branch(ctx, x.view(), biases[0]).before_norm(attention_end_norm.is_some());
    let attention_end = attention::decode(ctx, &mut input, w, cache, positions, branch);
    drop(input);
    let mlp = |x: View, branch: BranchOutput| {
        let (mut input, _) = enter(ctx, x, mlp_norm(w));
        mlp::forward(ctx, &mut input, None, w, Some(branch)).0.expect("the output was asked for")
    };
    if parallel {
        let attention_end = attention_end.into_whole(ctx);
        let mlp_end = mlp(x.view(), BranchOutput::second(ctx, attention_end.view(), biases[1]));
        drop(attention_end);
        return add_both_to_stream(ctx, x.view(), mlp_end, biases);
    }
    let (middle, _) = add_end(ctx, x.view(), attention_end, biases[0], attention_end_norm);
    let branch = BranchOutput::new(ctx, middle.view(), biases[1]).before_norm(mlp_end_norm.is_some());
    let mlp_end = mlp(middle.view(), branch);
    add_end(ctx, middle.view(), mlp_end, biases[1], mlp_end_norm).0
}

fn run(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, LayerActivations) {
    if ctx.shape.parallel_residual { parallel(ctx, x, w, output) } else { sequential(ctx, x, w, output) }
}

/// `middle = x + attention(norm(x))`, `y = middle + mlp(norm(middle))`; with norms after the branches,
/// `middle = x + norm(attention(…))` and `y = middle + norm(mlp(…))`.
fn sequential(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, LayerActivations) {
    let (mut input, statistics) = enter(ctx, x.view(), attention_norm(w));
    let (bias, end_norm) =
        (w.find(ParameterKind::AttentionOutBias), w.find(ParameterKind::AttentionEndNormWeight));
    let branch = BranchOutput::new(ctx, x.view(), bias).before_norm(end_norm.is_some());
    let float8 = input_float8(ctx, &mut input);
    let (end, attention) = attention::forward(ctx, &mut input, float8.as_ref(), w, Some(branch));
    let attention_norm = NormActivations { statistics, out: kept(ctx, input, float8) };
    let end = end.expect("the output was asked for");
    let (middle, attention_end) = add_end(ctx, x.view(), end, bias, end_norm);

    let (mut input, statistics) = enter(ctx, middle.view(), mlp_norm(w));
    let (bias, end_norm) = (w.find(ParameterKind::MlpOutBias), w.find(ParameterKind::MlpEndNormWeight));
    // The backward of a norm after the branch needs the branch's output.
    let branch = (output || end_norm.is_some())
        .then(|| BranchOutput::new(ctx, middle.view(), bias).before_norm(end_norm.is_some()));
    let float8 = input_float8(ctx, &mut input);
    let (end, mlp) = mlp::forward(ctx, &mut input, float8.as_ref(), w, branch);
    let mlp_norm = NormActivations { statistics, out: kept(ctx, input, float8) };
    let end = end.map(|end| add_end(ctx, middle.view(), end, bias, end_norm));
    let (y, mlp_end) = end.map_or((None, None), |(y, saved)| (Some(y), saved));
    let middle = Some(middle);
    (y, LayerActivations { x, middle, attention_norm, attention, attention_end, mlp_norm, mlp, mlp_end })
}

/// `y = x + attention(norm(x)) + mlp(norm(x))`. Each branch has its own norm.
fn parallel(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, LayerActivations) {
    let (mut input, statistics) = enter(ctx, x.view(), attention_norm(w));
    let biases = [w.find(ParameterKind::AttentionOutBias), w.find(ParameterKind::MlpOutBias)];
    let branch = output.then(|| BranchOutput::first(ctx, x.view(), biases[0]));
    let float8 = input_float8(ctx, &mut input);
    let (attention_end, attention) = attention::forward(ctx, &mut input, float8.as_ref(), w, branch);
    let attention_end = attention_end.map(|end| end.into_whole(ctx));
    let attention_norm = NormActivations { statistics, out: kept(ctx, input, float8) };

    let (mut input, statistics) = enter(ctx, x.view(), mlp_norm(w));
    let branch = attention_end.as_ref().map(|end| BranchOutput::second(ctx, end.view(), biases[1]));
    let float8 = input_float8(ctx, &mut input);
    let (mlp_end, mlp) = mlp::forward(ctx, &mut input, float8.as_ref(), w, branch);
    let mlp_norm = NormActivations { statistics, out: kept(ctx, input, float8) };
    drop(attention_end);
    let y = mlp_end.map(|end| add_both_to_stream(ctx, x.view(), end, biases));
    let (middle, attention_end, mlp_end) = (None, None, None);
    (y, LayerActivations { x, middle, attention_norm, attention, attention_end, mlp_norm, mlp, mlp_end })
}

/// Runs the layer's backward. Returns the gradient of its input and, if `part` is [`BackwardPart::Input`], the inputs of the
/// weight part.
pub fn backward(
    ctx: &Context,
    dy: Buffer,
    saved: LayerActivations,
    w: &Weights,
    g: &Gradients,
    part: BackwardPart,
) -> (Buffer, Option<LayerWeightInputs>) {
    let LayerActivations {
        x,
        middle,
        attention_norm: attention_saved,
        attention,
        attention_end,
        mlp_norm: mlp_saved,
        mlp,
        mlp_end,
    } = saved;

    let trained = part != BackwardPart::Frozen;

    // The MLP, and the gradient of the stream before it.
    let mlp_end =
        mlp_end.map(|saved| end_norm_backward(ctx, dy.view(), saved, w, g, ParameterKind::MlpEndNormWeight));
    let mut mlp_dy = ctx.all_rows(mlp_end.as_ref().unwrap_or(&dy).view());
    let sequential = middle.is_some();
    let mlp_stream = middle.as_ref().unwrap_or(&x);
    let NormActivations { statistics, out } = mlp_saved;
    let mut mlp_x =
        trained.then(|| input_again(ctx, mlp_stream.view(), mlp_norm(w), statistics.as_ref(), out));
    let (dinput, mlp) = mlp::backward(ctx, &mut mlp_dy, mlp_x.as_mut(), mlp, w, g, part);
    let mlp_x = mlp_x.filter(|_| part == BackwardPart::Input).map(|x| x.into_saved(ctx));
    let norm = mlp_norm(w).zip(statistics.as_ref());
    let norm = norm.map(|(weights, statistics)| StreamNorm {
        x: mlp_stream.view(),
        statistics: statistics.view(),
        weights,
        weight: ParameterKind::MlpNormWeight,
        bias: ParameterKind::MlpNormBias,
        residual_bias: Some(ParameterKind::MlpOutBias),
    });
    let dmiddle = input_backward(ctx, dinput, norm, dy.view(), g);
    // The weight part needs the stream if it is the input itself.
    let mlp_x = mlp_x
        .map(|saved| saved.or_else(|| middle.map(SavedFactor::Numbers)).expect("the form is sequential"));
    drop(statistics);

    // Attention. In the parallel form, the gradient of its output is that of the layer's output, and the gradients of both
    // branches add up in the residual stream.
    let attention_end = attention_end.map(|saved| {
        end_norm_backward(ctx, dmiddle.view(), saved, w, g, ParameterKind::AttentionEndNormWeight)
    });
    let mut attention_dy =
        sequential.then(|| ctx.all_rows(attention_end.as_ref().unwrap_or(&dmiddle).view()));
    if !sequential {
        bias_gradient(ctx, dy.view(), g, ParameterKind::AttentionOutBias);
    }
    let NormActivations { statistics, out } = attention_saved;
    let mut attention_x =
        trained.then(|| input_again(ctx, x.view(), attention_norm(w), statistics.as_ref(), out));
    let dout = attention_dy.as_mut().unwrap_or(&mut mlp_dy);
    let (dinput, attention) = attention::backward(ctx, dout, attention_x.as_mut(), attention, w, g, part);
    let attention_x = attention_x.filter(|_| part == BackwardPart::Input).map(|x| x.into_saved(ctx));
    let norm = attention_norm(w).zip(statistics.as_ref());
    let norm = norm.map(|(weights, statistics)| StreamNorm {
        x: x.view(),
        statistics: statistics.view(),
        weights,
        weight: ParameterKind::AttentionNormWeight,
        bias: ParameterKind::AttentionNormBias,
        residual_bias: sequential.then_some(ParameterKind::AttentionOutBias),
    });
    let dx = input_backward(ctx, dinput, norm, dmiddle.view(), g);
    let attention_x = attention_x.map(|saved| saved.unwrap_or(SavedFactor::Numbers(x)));

    let mlp_dy = mlp_dy.into_gathered(ctx);
    let attention_dy = attention_dy.map(|rows| rows.into_gathered(ctx));
    let weight_inputs =
        mlp.zip(attention).zip(mlp_x.zip(attention_x)).map(|((mlp, attention), (mlp_x, attention_x))| {
            LayerWeightInputs {
                attention,
                attention_x,
                attention_dy: attention_dy.map(|gathered| gathered.or(attention_end).unwrap_or(dmiddle)),
                mlp,
                mlp_x,
                mlp_dy: mlp_dy.or(mlp_end).unwrap_or(dy),
            }
        });
    (dx, weight_inputs)
}

/// The weight part of the layer's backward: the gradients of all matrices.
pub fn weight_part(ctx: &Context, weight_inputs: LayerWeightInputs, g: &Gradients) {
    let LayerWeightInputs { attention, attention_x, attention_dy, mlp, mlp_x, mlp_dy } = weight_inputs;
    mlp::weight_part(ctx, &mlp, mlp_x.factor(), mlp_dy.view(), g);
    drop((mlp, mlp_x));
    let attention_dy = attention_dy.as_ref().unwrap_or(&mlp_dy);
    attention::weight_part(ctx, &attention, attention_x.factor(), attention_dy.view(), g);
}

fn attention_norm<'a>(w: &Weights<'a>) -> Option<NormWeights<'a>> {
    let bias = w.find(ParameterKind::AttentionNormBias);
    w.find(ParameterKind::AttentionNormWeight).map(|weight| NormWeights { weight, bias })
}

fn mlp_norm<'a>(w: &Weights<'a>) -> Option<NormWeights<'a>> {
    let bias = w.find(ParameterKind::MlpNormBias);
    w.find(ParameterKind::MlpNormWeight).map(|weight| NormWeights { weight, bias })
}

/// The input of a branch, all rows: the stream after its norm, if there is one, and the norm's statistics.
fn enter<'a>(ctx: &Context, x: View<'a>, norm: Option<NormWeights>) -> (AllRows<'a>, Option<Buffer>) {
    let Some(weights) = norm else { return (ctx.all_rows(x), None) };
    let statistics = ctx.statistics(2 * ctx.shape.own_rows);
    let normed = ctx.normed(x, weights, statistics.view());
    (AllRows::Gathered(normed), Some(statistics))
}

/// The output of a norm, if it is saved. Selective recomputation does not save it. Sequence-parallel ranks do not save it
/// either, since they would have to save all rows: they recompute and gather it again. Rows of the stream are saved anyway.
fn kept(ctx: &Context, input: AllRows, float8: Option<Float8Matrix>) -> Option<SavedFactor> {
    match input {
        AllRows::Gathered(normed) if keeps_norms(ctx) => {
            SavedFactor::new(Some(normed.into_whole(ctx)), float8)
        }
        AllRows::Gathered(_) | AllRows::Local(_) => None,
    }
}

fn keeps_norms(ctx: &Context) -> bool {
    ctx.shape.recompute != Recompute::Selective && !ctx.shape.sequence_parallel
}

/// The input of a branch in 8 bits, in both orientations, if products are in 8 bits and it is saved.
fn input_float8(ctx: &Context, input: &mut AllRows) -> Option<Float8Matrix> {
    if !keeps_norms(ctx) {
        return None;
    }
    ctx.float8(input.whole(ctx), [ctx.shape.rows, ctx.shape.hidden], Orientation::Both)
}

fn input_again<'a>(
    ctx: &Context,
    x: View<'a>,
    norm: Option<NormWeights>,
    statistics: Option<&Buffer>,
    kept: Option<SavedFactor>,
) -> BranchInput<'a> {
    match (kept, norm.zip(statistics)) {
        (Some(SavedFactor::Numbers(normed)), _) => {
            BranchInput::Numbers(AllRows::Gathered(Chunks::one(normed)))
        }
        (Some(SavedFactor::Float8(matrix)), _) => BranchInput::Float8(matrix),
        (None, Some((weights, statistics))) => {
            BranchInput::Numbers(AllRows::Gathered(ctx.normed(x, weights, statistics.view())))
        }
        (None, None) => BranchInput::Numbers(ctx.all_rows(x)),
    }
}

/// The residual stream after a branch, whose output may be normalised first.
fn add_end(
    ctx: &Context,
    stream: View,
    end: Chunks,
    bias: Option<View>,
    norm: Option<View>,
) -> (Buffer, Option<EndNormActivations>) {
    let Some(weight) = norm else { return (add_to_stream(ctx, stream, end, bias.as_slice()), None) };
    let x = ctx.own_sum(end);
    let (statistics, y) = (ctx.statistics(2 * ctx.shape.own_rows), ctx.activation(x.len()));
    ctx.backend.norm(Norm {
        x: x.view(),
        weight,
        bias: None,
        out: y.view(),
        statistics: statistics.view(),
        epsilon: ctx.shape.epsilon,
        rows: ctx.shape.own_rows,
        width: ctx.shape.hidden,
    });
    ctx.backend.add(stream, y.view());
    (y, Some(EndNormActivations { x, statistics }))
}

/// The gradient of a branch's output from that of the norm after it.
fn end_norm_backward(
    ctx: &Context,
    dy: View,
    saved: EndNormActivations,
    w: &Weights,
    g: &Gradients,
    kind: ParameterKind,
) -> Buffer {
    let EndNormActivations { x, statistics } = saved;
    let dx = ctx.activation(x.len());
    ctx.backend.norm_backward(NormBackward {
        dy,
        x: x.view(),
        statistics: statistics.view(),
        weight: w.get(kind),
        residual: None,
        residual_sum: None,
        dx: dx.view(),
        centred: false,
        dweight: g.find(kind),
        dbias: None,
        rows: ctx.shape.own_rows,
        width: ctx.shape.hidden,
    });
    dx
}

/// The norm before a branch, for its backward: its input, statistics and weights, and the parameters whose gradients it writes: its
/// own, and the bias that was added to the residual stream before it.
#[derive(Clone, Copy)]
struct StreamNorm<'a> {
    x: View<'a>,
    statistics: View<'a>,
    weights: NormWeights<'a>,
    weight: ParameterKind,
    bias: ParameterKind,
    residual_bias: Option<ParameterKind>,
}

/// Sums the gradient of a branch's input over tp, runs the backward of its norm, if there is one, and adds the gradient of the
/// residual stream.
fn input_backward(
    ctx: &Context,
    partial: Chunks,
    norm: Option<StreamNorm>,
    residual: View,
    g: &Gradients,
) -> Buffer {
    let (rows, width) = (ctx.shape.own_rows, ctx.shape.hidden);
    ctx.sum_at_once(partial, |dy, dx| {
        let Some(norm) = norm else {
            let addends = &[residual];
            return ctx.backend.residual(Residual { x: dy, addends, biases: &[], out: dx, rows, width });
        };
        ctx.backend.norm_backward(NormBackward {
            dy,
            x: norm.x,
            statistics: norm.statistics,
            weight: norm.weights.weight,
            residual: Some(residual),
            residual_sum: norm.residual_bias.and_then(|kind| g.find(kind)),
            dx,
            centred: norm.weights.bias.is_some(),
            dweight: g.find(norm.weight),
            dbias: g.find(norm.bias),
            rows,
            width,
        });
    })
}

/// Sums the gradient of a bias that was added after a reduction, if no norm's backward does it.
fn bias_gradient(ctx: &Context, dy: View, g: &Gradients, kind: ParameterKind) {
    if let Some(out) = g.find(kind) {
        ctx.backend.column_sum(ColumnSum { x: dy, out, rows: ctx.shape.own_rows, width: ctx.shape.hidden });
    }
}

//! A transformer layer: norms, attention, MLP and residuals.
//!
//! The sequential form adds attention to the residual stream, and then the MLP of the sum. The parallel form of GPT-NeoX
//! computes both from the same input and adds them together, with one reduction over tp instead of two.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_plan::{BackwardPart, Recompute};
use kintsugi_tensor::ops::{ColumnSum, NormBackward};
use kintsugi_tensor::{Buffer, View};

use crate::context::NormWeights;
use crate::float8::{Float8Matrix, Orientation, SavedFactor, WeightFactor};
use crate::residual::{BranchOutput, add_both_to_stream, add_to_stream};
use crate::rows::Chunks;
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
    mlp_norm: NormActivations,
    mlp: mlp::MlpActivations,
}

/// The activations of a norm: its statistics, and its output unless the backward recomputes it.
#[derive(Debug)]
struct NormActivations {
    statistics: Buffer,
    out: Option<SavedFactor>,
}

/// The output of a norm in the backward.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a step makes no heap allocations")]
pub(crate) enum NormedRows {
    /// Recomputed, or saved as numbers.
    Numbers(Chunks),
    /// Saved in 8 bits, transposed.
    Float8(Float8Matrix),
}

impl NormedRows {
    /// It as a factor of the gradient of a weight.
    pub(crate) fn factor(&mut self, ctx: &Context) -> WeightFactor<'_> {
        match self {
            NormedRows::Numbers(chunks) => WeightFactor::Numbers(chunks.whole(ctx)),
            NormedRows::Float8(matrix) => WeightFactor::Float8(matrix.transposed()),
        }
    }

    fn into_saved(self, ctx: &Context) -> SavedFactor {
        match self {
            NormedRows::Numbers(chunks) => SavedFactor::Numbers(chunks.into_whole(ctx)),
            NormedRows::Float8(matrix) => SavedFactor::Float8(matrix),
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
    let (mut normed, _) = norm(ctx, x.view(), attention_norm(w));
    let branch = if parallel { BranchOutput::first } else { BranchOutput::new };
    let branch = branch(ctx, x.view(), biases[0]);
    let attention_end = attention::decode(ctx, &mut normed, w, cache, positions, branch);
    drop(normed);
    let mlp = |x: View, branch: BranchOutput| {
        let (mut normed, _) = norm(ctx, x, mlp_norm(w));
        mlp::forward(ctx, &mut normed, None, w, Some(branch)).0.expect("the output was asked for")
    };
    if parallel {
        let attention_end = attention_end.into_whole(ctx);
        let mlp_end = mlp(x.view(), BranchOutput::second(ctx, attention_end.view(), biases[1]));
        drop(attention_end);
        return add_both_to_stream(ctx, x.view(), mlp_end, biases);
    }
    let middle = add_to_stream(ctx, x.view(), attention_end, biases[0].as_slice());
    let mlp_end = mlp(middle.view(), BranchOutput::new(ctx, middle.view(), biases[1]));
    add_to_stream(ctx, middle.view(), mlp_end, biases[1].as_slice())
}

fn run(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, LayerActivations) {
    if ctx.shape.parallel_residual { parallel(ctx, x, w, output) } else { sequential(ctx, x, w, output) }
}

/// `middle = x + attention(norm(x))`, `y = middle + mlp(norm(middle))`.
fn sequential(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, LayerActivations) {
    let (mut normed, attention_statistics) = norm(ctx, x.view(), attention_norm(w));
    let bias = w.find(ParameterKind::AttentionOutBias);
    let branch = BranchOutput::new(ctx, x.view(), bias);
    let float8 = normed_float8(ctx, &mut normed);
    let (end, attention) = attention::forward(ctx, &mut normed, float8.as_ref(), w, Some(branch));
    let attention_norm = NormActivations { statistics: attention_statistics, out: kept(ctx, normed, float8) };
    let middle = add_to_stream(ctx, x.view(), end.expect("the output was asked for"), bias.as_slice());

    let (mut normed, mlp_statistics) = norm(ctx, middle.view(), mlp_norm(w));
    let bias = w.find(ParameterKind::MlpOutBias);
    let branch = output.then(|| BranchOutput::new(ctx, middle.view(), bias));
    let float8 = normed_float8(ctx, &mut normed);
    let (end, mlp) = mlp::forward(ctx, &mut normed, float8.as_ref(), w, branch);
    let mlp_norm = NormActivations { statistics: mlp_statistics, out: kept(ctx, normed, float8) };
    let y = end.map(|end| add_to_stream(ctx, middle.view(), end, bias.as_slice()));
    (y, LayerActivations { x, middle: Some(middle), attention_norm, attention, mlp_norm, mlp })
}

/// `y = x + attention(norm(x)) + mlp(norm(x))`. Each branch has its own norm.
fn parallel(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, LayerActivations) {
    let (mut normed, attention_statistics) = norm(ctx, x.view(), attention_norm(w));
    let biases = [w.find(ParameterKind::AttentionOutBias), w.find(ParameterKind::MlpOutBias)];
    let branch = output.then(|| BranchOutput::first(ctx, x.view(), biases[0]));
    let float8 = normed_float8(ctx, &mut normed);
    let (attention_end, attention) = attention::forward(ctx, &mut normed, float8.as_ref(), w, branch);
    let attention_end = attention_end.map(|end| end.into_whole(ctx));
    let attention_norm = NormActivations { statistics: attention_statistics, out: kept(ctx, normed, float8) };

    let (mut normed, mlp_statistics) = norm(ctx, x.view(), mlp_norm(w));
    let branch = attention_end.as_ref().map(|end| BranchOutput::second(ctx, end.view(), biases[1]));
    let float8 = normed_float8(ctx, &mut normed);
    let (mlp_end, mlp) = mlp::forward(ctx, &mut normed, float8.as_ref(), w, branch);
    let mlp_norm = NormActivations { statistics: mlp_statistics, out: kept(ctx, normed, float8) };
    drop(attention_end);
    let y = mlp_end.map(|end| add_both_to_stream(ctx, x.view(), end, biases));
    (y, LayerActivations { x, middle: None, attention_norm, attention, mlp_norm, mlp })
}

/// Runs the layer's backward. Returns the gradient of its input and, unless `part` is [`BackwardPart::Both`], the inputs of
/// the weight part.
pub fn backward(
    ctx: &Context,
    dy: Buffer,
    saved: LayerActivations,
    w: &Weights,
    g: &Gradients,
    part: BackwardPart,
) -> (Buffer, Option<LayerWeightInputs>) {
    let LayerActivations { x, middle, attention_norm: attention_saved, attention, mlp_norm: mlp_saved, mlp } =
        saved;

    // The MLP, and the gradient of the stream before it.
    let mut mlp_dy = ctx.all_rows(dy.view());
    let mlp_input = middle.as_ref().unwrap_or(&x);
    let mut mlp_x = normed_again(ctx, mlp_input.view(), mlp_norm(w), &mlp_saved.statistics, mlp_saved.out);
    let (dnormed, mlp) = mlp::backward(ctx, &mut mlp_dy, &mut mlp_x, mlp, w, g, part);
    let mlp_x = (part == BackwardPart::Input).then(|| mlp_x.into_saved(ctx));
    let sequential = middle.is_some();
    let norm =
        StreamNorm { x: mlp_input.view(), statistics: mlp_saved.statistics.view(), weights: mlp_norm(w) };
    let norm_parameters = NormParameters {
        weight: ParameterKind::MlpNormWeight,
        bias: ParameterKind::MlpNormBias,
        residual_bias: Some(ParameterKind::MlpOutBias),
    };
    let dmiddle = norm_backward(ctx, dnormed, norm, dy.view(), g, norm_parameters);
    drop((middle, mlp_saved.statistics));

    // Attention. In the parallel form, the gradient of its output is that of the layer's output, and the gradients of both
    // branches add up in the residual stream.
    let mut attention_dy = sequential.then(|| ctx.all_rows(dmiddle.view()));
    if !sequential {
        bias_gradient(ctx, dy.view(), g, ParameterKind::AttentionOutBias);
    }
    let mut attention_x =
        normed_again(ctx, x.view(), attention_norm(w), &attention_saved.statistics, attention_saved.out);
    let dout = attention_dy.as_mut().unwrap_or(&mut mlp_dy);
    let (dnormed, attention) = attention::backward(ctx, dout, &mut attention_x, attention, w, g, part);
    let attention_x = (part == BackwardPart::Input).then(|| attention_x.into_saved(ctx));
    let norm =
        StreamNorm { x: x.view(), statistics: attention_saved.statistics.view(), weights: attention_norm(w) };
    let norm_parameters = NormParameters {
        weight: ParameterKind::AttentionNormWeight,
        bias: ParameterKind::AttentionNormBias,
        residual_bias: sequential.then_some(ParameterKind::AttentionOutBias),
    };
    let dx = norm_backward(ctx, dnormed, norm, dmiddle.view(), g, norm_parameters);

    let mlp_dy = mlp_dy.into_gathered(ctx);
    let attention_dy = attention_dy.map(|rows| rows.into_gathered(ctx));
    let weight_inputs =
        mlp.zip(attention).zip(mlp_x.zip(attention_x)).map(|((mlp, attention), (mlp_x, attention_x))| {
            LayerWeightInputs {
                attention,
                attention_x,
                attention_dy: attention_dy.map(|gathered| gathered.unwrap_or(dmiddle)),
                mlp,
                mlp_x,
                mlp_dy: mlp_dy.unwrap_or(dy),
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

fn attention_norm<'a>(w: &Weights<'a>) -> NormWeights<'a> {
    NormWeights {
        weight: w.get(ParameterKind::AttentionNormWeight),
        bias: w.find(ParameterKind::AttentionNormBias),
    }
}

fn mlp_norm<'a>(w: &Weights<'a>) -> NormWeights<'a> {
    NormWeights { weight: w.get(ParameterKind::MlpNormWeight), bias: w.find(ParameterKind::MlpNormBias) }
}

fn norm(ctx: &Context, x: View, weights: NormWeights) -> (Chunks, Buffer) {
    let statistics = ctx.statistics(2 * ctx.shape.own_rows);
    let normed = ctx.normed(x, weights, statistics.view());
    (normed, statistics)
}

/// The output of a norm, if it is saved. Selective recomputation does not save it. Sequence-parallel ranks do not save it
/// either, since they would have to save all rows: they recompute and gather it again.
fn kept(ctx: &Context, normed: Chunks, float8: Option<Float8Matrix>) -> Option<SavedFactor> {
    if keeps_norms(ctx) { SavedFactor::new(Some(normed.into_whole(ctx)), float8) } else { None }
}

fn keeps_norms(ctx: &Context) -> bool {
    ctx.shape.recompute != Recompute::Selective && !ctx.shape.sequence_parallel
}

/// The output of a norm in 8 bits, in both orientations, if products are in 8 bits and it is saved.
fn normed_float8(ctx: &Context, normed: &mut Chunks) -> Option<Float8Matrix> {
    if !keeps_norms(ctx) {
        return None;
    }
    ctx.float8(normed.whole(ctx), [ctx.shape.rows, ctx.shape.hidden], Orientation::Both)
}

fn normed_again(
    ctx: &Context,
    x: View,
    weights: NormWeights,
    statistics: &Buffer,
    kept: Option<SavedFactor>,
) -> NormedRows {
    match kept {
        Some(SavedFactor::Numbers(normed)) => NormedRows::Numbers(Chunks::one(normed)),
        Some(SavedFactor::Float8(matrix)) => NormedRows::Float8(matrix),
        None => NormedRows::Numbers(ctx.normed(x, weights, statistics.view())),
    }
}

/// A norm's input, statistics and weights, for its backward.
#[derive(Clone, Copy)]
struct StreamNorm<'a> {
    x: View<'a>,
    statistics: View<'a>,
    weights: NormWeights<'a>,
}

/// The parameters whose gradients a norm's backward writes: its own, and the bias that was added to the residual stream before it.
#[derive(Clone, Copy)]
struct NormParameters {
    weight: ParameterKind,
    bias: ParameterKind,
    residual_bias: Option<ParameterKind>,
}

/// Sums the gradient of a norm's output over tp, runs the norm's backward, and adds the gradient of the residual stream.
fn norm_backward(
    ctx: &Context,
    partial: Chunks,
    norm: StreamNorm,
    residual: View,
    g: &Gradients,
    norm_parameters: NormParameters,
) -> Buffer {
    ctx.sum_at_once(partial, |dy, dx| {
        ctx.backend.norm_backward(NormBackward {
            dy,
            x: norm.x,
            statistics: norm.statistics,
            weight: norm.weights.weight,
            residual: Some(residual),
            residual_sum: norm_parameters.residual_bias.and_then(|kind| g.find(kind)),
            dx,
            dweight: g.get(norm_parameters.weight),
            dbias: g.find(norm_parameters.bias),
            rows: ctx.shape.own_rows,
            width: ctx.shape.hidden,
        });
    })
}

/// Sums the gradient of a bias that was added after a reduction, if no norm's backward does it.
fn bias_gradient(ctx: &Context, dy: View, g: &Gradients, kind: ParameterKind) {
    if let Some(out) = g.find(kind) {
        ctx.backend.column_sum(ColumnSum { x: dy, out, rows: ctx.shape.own_rows, width: ctx.shape.hidden });
    }
}

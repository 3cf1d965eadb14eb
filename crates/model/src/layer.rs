//! A transformer layer: norms, attention, MLP and residuals.
//!
//! In turn, attention is added to the stream and then the MLP of the sum; in parallel, as GPT-NeoX does, both are added
//! at once, from the same input, which needs one reduction over tp instead of two.

use kintsugi_plan::parameters::Slot;
use kintsugi_plan::{Part, Recompute};
use kintsugi_tensor::ops::{ColumnSum, NormBackward};
use kintsugi_tensor::{Buffer, View};

use crate::context::NormWeights;
use crate::stream::{Ending, add_both_to_stream, add_to_stream};
use crate::{Cache, Context, Gradients, Weights, attention, mlp};

/// What a layer keeps for its backward.
#[derive(Debug)]
pub struct Saved {
    /// The layer's input, this rank's rows.
    x: Buffer,
    /// The stream between attention and MLP; the parallel form has none.
    middle: Option<Buffer>,
    attention_norm: NormSaved,
    attention: attention::Saved,
    mlp_norm: NormSaved,
    mlp: mlp::Saved,
}

/// What a norm keeps: its statistics, and its output unless that is made again in the backward.
#[derive(Debug)]
struct NormSaved {
    statistics: Buffer,
    out: Option<Buffer>,
}

/// What a layer's weight part needs.
#[derive(Debug)]
pub struct Deferred {
    attention: attention::Deferred,
    attention_x: Buffer,
    attention_dy: Option<Buffer>,
    mlp: mlp::Deferred,
    mlp_x: Buffer,
    mlp_dy: Buffer,
}

/// Runs the layer and keeps what its backward needs.
pub fn forward(ctx: &Context, x: Buffer, w: &Weights) -> (Buffer, Saved) {
    let (y, saved) = run(ctx, x, w, true);
    (y.expect("the output was asked for"), saved)
}

/// Runs the layer and keeps only its input, which is given back beside the output.
pub fn evaluate(ctx: &Context, x: Buffer, w: &Weights) -> (Buffer, Buffer) {
    let (y, saved) = forward(ctx, x, w);
    (y, saved.x)
}

/// Runs the layer again from its input, for what its backward needs: the output itself is left out.
pub fn rebuild(ctx: &Context, x: Buffer, w: &Weights) -> Saved {
    run(ctx, x, w, false).1
}

/// Runs the layer on new tokens at `positions`, over the cache of those before them, and keeps nothing else.
pub fn decode(ctx: &Context, x: &Buffer, w: &Weights, cache: &Cache, positions: View) -> Buffer {
    let biases = [w.find(Slot::AttentionOutBias), w.find(Slot::MlpOutBias)];
    let (normed, _) = norm(ctx, x.view(), attention_norm(w));
    let ending = Ending::new(ctx, x.view(), biases[0]);
    let attention_end = attention::decode(ctx, normed.view(), w, cache, positions, ending);
    drop(normed);
    let mlp = |x: View, stream: View| {
        let (normed, _) = norm(ctx, x, mlp_norm(w));
        let ending = Ending::new(ctx, stream, biases[1]);
        mlp::forward(ctx, normed.view(), w, Some(ending)).0.expect("the output was asked for")
    };
    if ctx.shape.parallel_residual {
        let mlp_end = mlp(x.view(), attention_end.view());
        return add_both_to_stream(ctx, x.view(), attention_end, mlp_end, biases);
    }
    let middle = add_to_stream(ctx, x.view(), attention_end, biases[0].as_slice());
    let mlp_end = mlp(middle.view(), middle.view());
    add_to_stream(ctx, middle.view(), mlp_end, biases[1].as_slice())
}

fn run(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, Saved) {
    if ctx.shape.parallel_residual { parallel(ctx, x, w, output) } else { sequential(ctx, x, w, output) }
}

/// `middle = x + attention(norm(x))`, `y = middle + mlp(norm(middle))`.
fn sequential(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, Saved) {
    let (normed, attention_statistics) = norm(ctx, x.view(), attention_norm(w));
    let bias = w.find(Slot::AttentionOutBias);
    let ending = Ending::new(ctx, x.view(), bias);
    let (end, attention) = attention::forward(ctx, normed.view(), w, Some(ending));
    let attention_norm = NormSaved { statistics: attention_statistics, out: kept(ctx, normed) };
    let middle = add_to_stream(ctx, x.view(), end.expect("the output was asked for"), bias.as_slice());

    let (normed, mlp_statistics) = norm(ctx, middle.view(), mlp_norm(w));
    let bias = w.find(Slot::MlpOutBias);
    let ending = output.then(|| Ending::new(ctx, middle.view(), bias));
    let (end, mlp) = mlp::forward(ctx, normed.view(), w, ending);
    let mlp_norm = NormSaved { statistics: mlp_statistics, out: kept(ctx, normed) };
    let y = end.map(|end| add_to_stream(ctx, middle.view(), end, bias.as_slice()));
    (y, Saved { x, middle: Some(middle), attention_norm, attention, mlp_norm, mlp })
}

/// `y = x + attention(norm(x)) + mlp(norm(x))`, each branch with a norm of its own.
fn parallel(ctx: &Context, x: Buffer, w: &Weights, output: bool) -> (Option<Buffer>, Saved) {
    let (normed, attention_statistics) = norm(ctx, x.view(), attention_norm(w));
    let biases = [w.find(Slot::AttentionOutBias), w.find(Slot::MlpOutBias)];
    let ending = output.then(|| Ending::new(ctx, x.view(), biases[0]));
    let (attention_end, attention) = attention::forward(ctx, normed.view(), w, ending);
    let attention_norm = NormSaved { statistics: attention_statistics, out: kept(ctx, normed) };

    let (normed, mlp_statistics) = norm(ctx, x.view(), mlp_norm(w));
    // A rank that is alone adds the MLP to a stream that has attention in it already.
    let ending = attention_end.as_ref().map(|end| Ending::new(ctx, end.view(), biases[1]));
    let (mlp_end, mlp) = mlp::forward(ctx, normed.view(), w, ending);
    let mlp_norm = NormSaved { statistics: mlp_statistics, out: kept(ctx, normed) };
    let ends = attention_end.zip(mlp_end);
    let y = ends.map(|(attention, mlp)| add_both_to_stream(ctx, x.view(), attention, mlp, biases));
    (y, Saved { x, middle: None, attention_norm, attention, mlp_norm, mlp })
}

/// Runs the layer's backward: the gradient of its input, and what the weight part needs unless it is done too.
pub fn backward(
    ctx: &Context,
    dy: Buffer,
    saved: Saved,
    w: &Weights,
    g: &Gradients,
    part: Part,
) -> (Buffer, Option<Deferred>) {
    let Saved { x, middle, attention_norm: attention_saved, attention, mlp_norm: mlp_saved, mlp } = saved;

    // The MLP, and the gradient of the stream before it.
    let gathered = ctx.all_rows(dy.view());
    let mlp_dy = gathered.as_ref().unwrap_or(&dy);
    let mlp_input = middle.as_ref().unwrap_or(&x);
    let mlp_x = normed_again(ctx, mlp_input.view(), mlp_norm(w), &mlp_saved.statistics, mlp_saved.out);
    let (dnormed, mlp) = mlp::backward(ctx, mlp_dy.view(), mlp_x.view(), mlp, w, g, part);
    let mlp_x = (part == Part::Input).then_some(mlp_x);
    let sequential = middle.is_some();
    let norm =
        StreamNorm { x: mlp_input.view(), statistics: mlp_saved.statistics.view(), weights: mlp_norm(w) };
    let slots =
        NormSlots { weight: Slot::MlpNormWeight, bias: Slot::MlpNormBias, past: Some(Slot::MlpOutBias) };
    let dmiddle = norm_backward(ctx, dnormed, norm, dy.view(), g, slots);
    drop((middle, mlp_saved.statistics));

    // Attention. In the parallel form its output's gradient is the layer's, and the stream's gradient adds up.
    let gathered_attention = if sequential { ctx.all_rows(dmiddle.view()) } else { None };
    if !sequential {
        bias_gradient(ctx, dy.view(), g, Slot::AttentionOutBias);
    }
    let attention_dy = gathered_attention.as_ref().unwrap_or(if sequential { &dmiddle } else { mlp_dy });
    let attention_x =
        normed_again(ctx, x.view(), attention_norm(w), &attention_saved.statistics, attention_saved.out);
    let (dnormed, attention) =
        attention::backward(ctx, attention_dy.view(), attention_x.view(), attention, w, g, part);
    let attention_x = (part == Part::Input).then_some(attention_x);
    let norm =
        StreamNorm { x: x.view(), statistics: attention_saved.statistics.view(), weights: attention_norm(w) };
    let slots = NormSlots {
        weight: Slot::AttentionNormWeight,
        bias: Slot::AttentionNormBias,
        past: sequential.then_some(Slot::AttentionOutBias),
    };
    let dx = norm_backward(ctx, dnormed, norm, dmiddle.view(), g, slots);

    let deferred =
        mlp.zip(attention).zip(mlp_x.zip(attention_x)).map(|((mlp, attention), (mlp_x, attention_x))| {
            let attention_dy = sequential.then(|| gathered_attention.unwrap_or(dmiddle));
            Deferred { attention, attention_x, attention_dy, mlp, mlp_x, mlp_dy: gathered.unwrap_or(dy) }
        });
    (dx, deferred)
}

/// The layer's weight part: every matrix's gradient, from what the input part kept.
pub fn weight_part(ctx: &Context, deferred: Deferred, g: &Gradients) {
    let Deferred { attention, attention_x, attention_dy, mlp, mlp_x, mlp_dy } = deferred;
    mlp::weight_part(ctx, &mlp, mlp_x.view(), mlp_dy.view(), g);
    drop((mlp, mlp_x));
    let attention_dy = attention_dy.as_ref().unwrap_or(&mlp_dy);
    attention::weight_part(ctx, &attention, attention_x.view(), attention_dy.view(), g);
}

fn attention_norm<'a>(w: &Weights<'a>) -> NormWeights<'a> {
    NormWeights { weight: w.get(Slot::AttentionNormWeight), bias: w.find(Slot::AttentionNormBias) }
}

fn mlp_norm<'a>(w: &Weights<'a>) -> NormWeights<'a> {
    NormWeights { weight: w.get(Slot::MlpNormWeight), bias: w.find(Slot::MlpNormBias) }
}

fn norm(ctx: &Context, x: View, weights: NormWeights) -> (Buffer, Buffer) {
    let statistics = ctx.statistics(2 * ctx.shape.own_rows);
    let normed = ctx.normed(x, weights, statistics.view());
    (normed, statistics)
}

/// A norm's output is kept if nothing is recomputed; sequence-parallel ranks would have to keep all rows of it, so
/// they norm and gather again instead.
fn kept(ctx: &Context, normed: Buffer) -> Option<Buffer> {
    (ctx.shape.recompute != Recompute::Selective && !ctx.shape.sequence_parallel).then_some(normed)
}

fn normed_again(
    ctx: &Context,
    x: View,
    weights: NormWeights,
    statistics: &Buffer,
    kept: Option<Buffer>,
) -> Buffer {
    kept.unwrap_or_else(|| ctx.normed(x, weights, statistics.view()))
}

/// A norm in the stream, for its backward.
#[derive(Clone, Copy)]
struct StreamNorm<'a> {
    x: View<'a>,
    statistics: View<'a>,
    weights: NormWeights<'a>,
}

/// Where a norm's gradients go, and that of the bias that the stream got past it.
#[derive(Clone, Copy)]
struct NormSlots {
    weight: Slot,
    bias: Slot,
    past: Option<Slot>,
}

/// Sums the gradient of a norm's output over tp and takes it back through the norm, onto the stream's own gradient.
fn norm_backward(
    ctx: &Context,
    partial: Buffer,
    norm: StreamNorm,
    residual: View,
    g: &Gradients,
    slots: NormSlots,
) -> Buffer {
    let reduced = ctx.reduced(partial);
    ctx.trimmed(reduced, |dy, dx| {
        ctx.backend.norm_backward(NormBackward {
            dy,
            x: norm.x,
            statistics: norm.statistics,
            weight: norm.weights.weight,
            residual: Some(residual),
            residual_sum: slots.past.and_then(|slot| g.find(slot)),
            dx,
            dweight: g.get(slots.weight),
            dbias: g.find(slots.bias),
            rows: ctx.shape.own_rows,
            width: ctx.shape.hidden,
        });
    })
}

/// The gradient of a bias that was added to this rank's rows after the reduction, where no norm's backward reads them.
fn bias_gradient(ctx: &Context, dy: View, g: &Gradients, slot: Slot) {
    if let Some(out) = g.find(slot) {
        ctx.backend.column_sum(ColumnSum { x: dy, out, rows: ctx.shape.own_rows, width: ctx.shape.hidden });
    }
}

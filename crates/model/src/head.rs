//! The head: final norm, vocabulary-parallel output matrix, and cross-entropy over all parts of the vocabulary.
//!
//! The loss is fused with its gradient and works in place on the logits. There is never a second copy of them, and no rank
//! holds another rank's columns. The ranks exchange three numbers per row.
//!
//! With `memory.head_rows` only the logits of some rows are in memory at a time: the forward computes their loss and frees
//! them, and the backward computes them again.

use std::ops::Range;

use kintsugi_comm::Collective;
use kintsugi_plan::BackwardPart;
use kintsugi_plan::parameters::ParameterKind;
use kintsugi_tensor::ops::{
    CrossEntropy, Embedding, Linear, LinearBackwardInput, LinearBackwardWeight, LossStatistics, NormBackward,
};
use kintsugi_tensor::{Buffer, Category, View};

use crate::context::NormWeights;
use crate::rows::{Chunks, elements};
use crate::{Context, Gradients, Weights};

/// The activations that the head saves for its backward.
#[derive(Debug)]
pub struct HeadActivations {
    /// The head's input, this rank's rows.
    x: Buffer,
    statistics: Buffer,
    /// The norm's output. Sequence-parallel ranks recompute it instead.
    normed: Option<Buffer>,
    logits: LogitsGradient,
}

/// Where the backward has the gradient of the logits from.
#[derive(Debug)]
enum LogitsGradient {
    /// The forward has computed it, `[rows, this rank's vocabulary]`.
    Computed(Buffer),
    /// The backward computes it, some rows at a time, from the targets.
    FromTargets(Buffer),
}

/// What the weight part of the head's backward needs: the norm's output and the gradient of the logits. With divided
/// logits, nothing: then the input part has written the gradient of the output matrix.
#[derive(Debug)]
pub struct HeadWeightInputs(Option<(Buffer, Buffer)>);

/// The head's weights. The output matrix is the tied token table, or the head's own.
#[derive(Clone, Copy, Debug)]
pub struct HeadWeights<'a> {
    /// The final norm's unit.
    pub norm: Weights<'a>,
    /// The output matrix, `[this rank's vocabulary, hidden]`.
    pub output: View<'a>,
}

/// The sum that the loss is added to, and the loss scale.
#[derive(Clone, Copy, Debug)]
pub struct Loss<'a> {
    /// `[1]`: the head adds the sum of all tokens' losses.
    pub sum: View<'a>,
    /// `[1]`: the loss scale.
    pub scale: View<'a>,
}

/// Runs the head and saves the activations for its backward. `targets` are `[rows]` token ids.
pub fn forward(ctx: &Context, x: Buffer, targets: Buffer, w: &HeadWeights, loss: Loss) -> HeadActivations {
    let statistics = ctx.statistics(2 * ctx.shape.own_rows);
    let mut normed = ctx.normed(x.view(), norm_weights(w), statistics.view());
    let (normed, logits) = if ctx.shape.divides_head() {
        let normed = normed.into_whole(ctx);
        add_loss(ctx, normed.view(), targets.view(), w, loss);
        (normed, LogitsGradient::FromTargets(targets))
    } else {
        let logits = logits(ctx, &mut normed, w);
        cross_entropy(ctx, logits.view(), targets.view(), loss.sum, Some(loss.scale));
        (normed.into_whole(ctx), LogitsGradient::Computed(logits))
    };
    HeadActivations { x, statistics, normed: (!ctx.shape.sequence_parallel).then_some(normed), logits }
}

/// Runs the head for its loss only.
pub fn evaluate(ctx: &Context, x: &Buffer, targets: View, w: &HeadWeights, loss: Loss) {
    let statistics = ctx.statistics(2 * ctx.shape.own_rows);
    let mut normed = ctx.normed(x.view(), norm_weights(w), statistics.view());
    if ctx.shape.divides_head() {
        add_loss(ctx, normed.into_whole(ctx).view(), targets, w, loss);
    } else {
        cross_entropy(ctx, logits(ctx, &mut normed, w).view(), targets, loss.sum, None);
    }
}

/// Adds the loss of all rows, a part of them at a time.
fn add_loss(ctx: &Context, normed: View, targets: View, w: &HeadWeights, loss: Loss) {
    for rows in parts(0..ctx.shape.rows, ctx.shape.head_rows) {
        let logits = logits_of_rows(ctx, normed, &rows, w);
        cross_entropy(ctx, logits.view(), targets.slice(rows), loss.sum, None);
    }
}

/// The logits of one row of each sample, `[tp, samples, part of the vocabulary]`, on every tp rank. `last` has the indices of
/// the rows.
pub fn decode(ctx: &Context, x: &Buffer, last: View, w: &HeadWeights) -> Buffer {
    let (samples, width) = (last.len(), ctx.shape.hidden);
    let (chosen, statistics) = (ctx.activation(samples * width), ctx.statistics(2 * samples));
    // The embedding kernel gathers the rows.
    ctx.backend.embedding(Embedding {
        tokens: last,
        table: x.view(),
        first: 0,
        out: chosen.view(),
        rows: samples,
        width,
    });
    let shape = ctx.shape.with_new_tokens(samples, 1);
    let ctx = Context { shape: &shape, ..*ctx };
    let mut normed = ctx.normed(chosen.view(), norm_weights(w), statistics.view());
    let own = logits(&ctx, &mut normed, w);
    let parts = ctx.tensor.size();
    if parts == 1 {
        return own;
    }
    let all = ctx.backend.allocate(parts * own.len(), shape.compute, Category::Communication);
    let start = ctx.tensor.rank() * own.len();
    ctx.backend.copy(own.view(), all.slice(start..start + own.len()));
    ctx.tensor.run(Collective::AllGather, all)
}

/// Runs the head's backward. Returns the gradient of its input and, if `part` is [`BackwardPart::Input`], the inputs of the
/// weight part.
///
/// `output` is where the gradient of the output matrix is written: by [`BackwardPart::Both`], and by
/// [`BackwardPart::Input`] if the logits are divided.
pub fn backward(
    ctx: &Context,
    saved: HeadActivations,
    w: &HeadWeights,
    scale: View,
    norm: &Gradients,
    output: &OutputGradient,
    part: BackwardPart,
) -> (Buffer, Option<HeadWeightInputs>) {
    let HeadActivations { x, statistics, normed, logits } = saved;
    let shape = ctx.shape;
    let trained = output.gradients.are_trained();
    let normed_again = || ctx.normed(x.view(), norm_weights(w), statistics.view());
    let (dnormed, weight_inputs) = match logits {
        LogitsGradient::Computed(dlogits) => {
            let normed = trained.then(|| normed.map_or_else(normed_again, Chunks::one));
            let dnormed = ctx.partial_product(|dnormed, rows| {
                input_gradient(ctx, dlogits.slice(elements(&rows, shape.vocab)), w, dnormed);
            });
            (dnormed, HeadWeightInputs(normed.map(|normed| (normed.into_whole(ctx), dlogits))))
        }
        LogitsGradient::FromTargets(targets) => {
            let normed = normed.map_or_else(normed_again, Chunks::one).into_whole(ctx);
            let dnormed = ctx.partial_product(|dnormed, rows| {
                for part in parts(rows.clone(), shape.head_rows) {
                    let dlogits = logits_of_rows(ctx, normed.view(), &part, w);
                    // The forward has added this loss.
                    let again = ctx.statistics(1);
                    ctx.backend.fill(0.0, again.view());
                    cross_entropy(
                        ctx,
                        dlogits.view(),
                        targets.slice(part.clone()),
                        again.view(),
                        Some(scale),
                    );
                    let of_chunk = part.start - rows.start..part.end - rows.start;
                    let dnormed = dnormed.slice(elements(&of_chunk, shape.hidden));
                    input_gradient(ctx, dlogits.view(), w, dnormed);
                    let normed = normed.slice(elements(&part, shape.hidden));
                    output_gradient(ctx, dlogits.view(), normed, part.len(), output);
                }
            });
            (dnormed, HeadWeightInputs(None))
        }
    };
    if part == BackwardPart::Both {
        weight_part(ctx, &weight_inputs, output);
    }
    let weight_inputs = (part == BackwardPart::Input).then_some(weight_inputs);
    let dx = ctx.sum_at_once(dnormed, |dy, dx| {
        ctx.backend.norm_backward(NormBackward {
            dy,
            x: x.view(),
            statistics: statistics.view(),
            weight: norm_weights(w).weight,
            residual: None,
            residual_sum: None,
            dx,
            centred: norm_weights(w).bias.is_some(),
            dweight: norm.find(ParameterKind::FinalNormWeight),
            dbias: norm.find(ParameterKind::FinalNormBias),
            rows: shape.own_rows,
            width: shape.hidden,
        });
    });
    (dx, weight_inputs)
}

/// The gradient of the norm's output, from that of the logits of some rows.
fn input_gradient(ctx: &Context, dlogits: View, w: &HeadWeights, dnormed: View) {
    let shape = ctx.shape;
    ctx.backend.linear_backward_input(LinearBackwardInput {
        dy: dlogits,
        weight: w.output,
        gelu: None,
        dx: dnormed,
        dbias: None,
        rows: dlogits.len() / shape.vocab,
        inputs: shape.hidden,
        outputs: shape.vocab,
        float8: None,
    });
}

/// Where the gradient of the output matrix is written.
#[derive(Clone, Copy, Debug)]
pub struct OutputGradient<'a> {
    /// The unit that holds the matrix.
    pub gradients: Gradients<'a>,
    /// [`ParameterKind::Table`] of a tied model, else [`ParameterKind::Output`].
    pub kind: ParameterKind,
}

/// The weight part of the head's backward: the gradient of the output matrix.
pub fn weight_part(ctx: &Context, weight_inputs: &HeadWeightInputs, output: &OutputGradient) {
    if let Some((normed, dlogits)) = &weight_inputs.0 {
        output_gradient(ctx, dlogits.view(), normed.view(), ctx.shape.rows, output);
    }
}

/// Adds the gradient of the output matrix by some rows, unless the matrix is frozen.
fn output_gradient(ctx: &Context, dlogits: View, normed: View, rows: usize, output: &OutputGradient) {
    let Some(dweight) = output.gradients.find(output.kind) else { return };
    ctx.backend.linear_backward_weight(LinearBackwardWeight {
        dy: dlogits,
        x: normed,
        dweight,
        dbias: None,
        rows,
        inputs: ctx.shape.hidden,
        outputs: ctx.shape.vocab,
        float8: None,
    });
}

fn norm_weights<'a>(w: &HeadWeights<'a>) -> NormWeights<'a> {
    NormWeights {
        weight: w.norm.get(ParameterKind::FinalNormWeight),
        bias: w.norm.find(ParameterKind::FinalNormBias),
    }
}

/// The logits of all rows.
fn logits(ctx: &Context, normed: &mut Chunks, w: &HeadWeights) -> Buffer {
    let shape = ctx.shape;
    let logits = ctx.activation(shape.rows * shape.vocab);
    normed.each(ctx, |normed, rows| {
        product(ctx, normed, w, logits.slice(elements(&rows, shape.vocab)), rows.len());
    });
    logits
}

/// The logits of some rows.
fn logits_of_rows(ctx: &Context, normed: View, rows: &Range<usize>, w: &HeadWeights) -> Buffer {
    let logits = ctx.activation(rows.len() * ctx.shape.vocab);
    product(ctx, normed.slice(elements(rows, ctx.shape.hidden)), w, logits.view(), rows.len());
    logits
}

fn product(ctx: &Context, normed: View, w: &HeadWeights, logits: View, rows: usize) {
    ctx.backend.linear(Linear {
        x: normed,
        weight: w.output,
        bias: None,
        gelu: None,
        residual: None,
        out: logits,
        rows,
        inputs: ctx.shape.hidden,
        outputs: ctx.shape.vocab,
        float8: None,
    });
}

/// Adds the loss of the rows of `targets` to `sum`. With a loss scale, their gradient overwrites the logits.
fn cross_entropy(ctx: &Context, logits: View, targets: View, sum: View, scale: Option<View>) {
    let (shape, rows) = (ctx.shape, targets.len());
    let (parts, own) = (ctx.tensor.size(), 3 * rows);
    let statistics = ctx.backend.allocate(parts * own, ctx.accumulator(), Category::Communication);
    let statistics = if parts > 1 {
        ctx.backend.loss_statistics(LossStatistics {
            logits,
            targets,
            first: shape.first_token,
            valid: shape.valid_tokens,
            statistics: statistics.slice(ctx.tensor.rank() * own..(ctx.tensor.rank() + 1) * own),
            soft_cap: shape.logit_soft_cap,
            rows,
            columns: shape.vocab,
        });
        ctx.tensor.run(Collective::AllGather, statistics)
    } else {
        statistics
    };
    ctx.backend.cross_entropy(CrossEntropy {
        logits,
        targets,
        first: shape.first_token,
        valid: shape.valid_tokens,
        statistics: statistics.view(),
        parts,
        loss: sum,
        scale,
        factor: 1.0 / shape.tokens_per_step as f64,
        z_loss: shape.z_loss,
        soft_cap: shape.logit_soft_cap,
        rows,
        columns: shape.vocab,
    });
}

/// Consecutive parts of a range of at most `len` numbers each.
fn parts(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(len).map(move |start| start..(start + len).min(range.end))
}

//! The head: final norm, vocabulary-parallel output matrix, and cross-entropy over all parts of the vocabulary.
//!
//! The loss is fused with its gradient and works in place on the logits. There is never a second copy of them, and no rank
//! holds another rank's columns. The ranks exchange three numbers per row.

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
    /// The gradient of the logits, `[rows, this rank's vocabulary]`.
    dlogits: Buffer,
}

/// What the weight part of the head's backward needs.
#[derive(Debug)]
pub struct HeadWeightInputs {
    normed: Buffer,
    dlogits: Buffer,
}

/// The head's weights. The output matrix is the tied token table, or the head's own.
#[derive(Clone, Copy, Debug)]
pub struct HeadWeights<'a> {
    /// The final norm's unit.
    pub norm: Weights<'a>,
    /// The output matrix, `[this rank's vocabulary, hidden]`.
    pub output: View<'a>,
}

/// The targets, the sum that the loss is added to, and the loss scale.
#[derive(Clone, Copy, Debug)]
pub struct Loss<'a> {
    /// `[rows]` token ids.
    pub targets: View<'a>,
    /// `[1]`: the head adds the sum of all tokens' losses.
    pub sum: View<'a>,
    /// `[1]`: the loss scale.
    pub scale: View<'a>,
}

/// Runs the head and saves the activations for its backward. The gradient of the logits overwrites the logits.
pub fn forward(ctx: &Context, x: Buffer, w: &HeadWeights, loss: Loss) -> HeadActivations {
    let statistics = ctx.statistics(2 * ctx.shape.own_rows);
    let mut normed = ctx.normed(x.view(), norm_weights(w), statistics.view());
    let logits = logits(ctx, &mut normed, w);
    cross_entropy(ctx, logits.view(), loss, true);
    let normed = (!ctx.shape.sequence_parallel).then(|| normed.into_whole(ctx));
    HeadActivations { x, statistics, normed, dlogits: logits }
}

/// Runs the head for its loss only.
pub fn evaluate(ctx: &Context, x: &Buffer, w: &HeadWeights, loss: Loss) {
    let statistics = ctx.statistics(2 * ctx.shape.own_rows);
    let mut normed = ctx.normed(x.view(), norm_weights(w), statistics.view());
    let logits = logits(ctx, &mut normed, w);
    cross_entropy(ctx, logits.view(), loss, false);
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

/// Runs the head's backward. Returns the gradient of its input and, unless `part` is [`BackwardPart::Both`], the inputs of the
/// weight part.
///
/// `output` is where [`BackwardPart::Both`] writes the gradient of the output matrix.
pub fn backward(
    ctx: &Context,
    saved: HeadActivations,
    w: &HeadWeights,
    norm: &Gradients,
    output: &OutputGradient,
    part: BackwardPart,
) -> (Buffer, Option<HeadWeightInputs>) {
    let HeadActivations { x, statistics, normed, dlogits } = saved;
    let shape = ctx.shape;
    let normed = match normed {
        Some(normed) => Chunks::one(normed),
        None => ctx.normed(x.view(), norm_weights(w), statistics.view()),
    };
    let dnormed = ctx.partial_product(|dnormed, rows| {
        ctx.backend.linear_backward_input(LinearBackwardInput {
            dy: dlogits.slice(elements(&rows, shape.vocab)),
            weight: w.output,
            gelu: None,
            dx: dnormed,
            dbias: None,
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: shape.vocab,
            float8: None,
        });
    });
    let normed = normed.into_whole(ctx);
    let weight_inputs = HeadWeightInputs { normed, dlogits };
    let weight_inputs = if part == BackwardPart::Both {
        weight_part(ctx, &weight_inputs, output);
        drop(weight_inputs);
        None
    } else {
        Some(weight_inputs)
    };
    let dx = ctx.sum_at_once(dnormed, |dy, dx| {
        ctx.backend.norm_backward(NormBackward {
            dy,
            x: x.view(),
            statistics: statistics.view(),
            weight: norm_weights(w).weight,
            residual: None,
            residual_sum: None,
            dx,
            dweight: norm.get(ParameterKind::FinalNormWeight),
            dbias: norm.find(ParameterKind::FinalNormBias),
            rows: shape.own_rows,
            width: shape.hidden,
        });
    });
    (dx, weight_inputs)
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
    ctx.backend.linear_backward_weight(LinearBackwardWeight {
        dy: weight_inputs.dlogits.view(),
        x: weight_inputs.normed.view(),
        dweight: output.gradients.get(output.kind),
        dbias: None,
        rows: ctx.shape.rows,
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

fn logits(ctx: &Context, normed: &mut Chunks, w: &HeadWeights) -> Buffer {
    let shape = ctx.shape;
    let logits = ctx.activation(shape.rows * shape.vocab);
    normed.each(ctx, |normed, rows| {
        ctx.backend.linear(Linear {
            x: normed,
            weight: w.output,
            bias: None,
            gelu: None,
            residual: None,
            out: logits.slice(elements(&rows, shape.vocab)),
            rows: rows.len(),
            inputs: shape.hidden,
            outputs: shape.vocab,
            float8: None,
        });
    });
    logits
}

fn cross_entropy(ctx: &Context, logits: View, loss: Loss, gradient: bool) {
    let shape = ctx.shape;
    let (parts, own) = (ctx.tensor.size(), 3 * shape.rows);
    let statistics = ctx.backend.allocate(parts * own, ctx.accumulator(), Category::Communication);
    let statistics = if parts > 1 {
        ctx.backend.loss_statistics(LossStatistics {
            logits,
            targets: loss.targets,
            first: shape.first_token,
            valid: shape.valid_tokens,
            statistics: statistics.slice(ctx.tensor.rank() * own..(ctx.tensor.rank() + 1) * own),
            rows: shape.rows,
            columns: shape.vocab,
        });
        ctx.tensor.run(Collective::AllGather, statistics)
    } else {
        statistics
    };
    ctx.backend.cross_entropy(CrossEntropy {
        logits,
        targets: loss.targets,
        first: shape.first_token,
        valid: shape.valid_tokens,
        statistics: statistics.view(),
        parts,
        loss: loss.sum,
        scale: gradient.then_some(loss.scale),
        factor: 1.0 / shape.tokens_per_step as f64,
        z_loss: shape.z_loss,
        rows: shape.rows,
        columns: shape.vocab,
    });
}

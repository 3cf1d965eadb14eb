//! Adds the output of a layer's branch to the residual stream.
//!
//! Without tensor parallelism, the last matrix product of the branch adds residual stream and bias before it rounds, which
//! saves a pass over memory. With tensor parallelism, the partial results of the ranks are summed first.

use kintsugi_tensor::ops::{Linear, Residual};
use kintsugi_tensor::{Buffer, View};

use crate::Context;
use crate::float8::{Float8Matrix, Orientation};
use crate::rows::{Chunks, elements};

/// What the last matrix product of a branch adds to its result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchOutput<'a> {
    stream: Option<View<'a>>,
    bias: Option<View<'a>>,
    /// This rank's partial result of another branch.
    other: Option<View<'a>>,
    /// Whether the result is summed over tp.
    summed: bool,
}

impl<'a> BranchOutput<'a> {
    /// The output of a branch that is added to `stream` with a bias.
    pub fn new(ctx: &Context, stream: View<'a>, bias: Option<View<'a>>) -> Self {
        let alone = ctx.tensor.size() == 1;
        BranchOutput {
            stream: alone.then_some(stream),
            bias: bias.filter(|_| alone),
            other: None,
            summed: true,
        }
    }

    /// The same for an output that is normalised before it is added, and so has neither stream nor bias yet.
    pub fn before_norm(self, normalised: bool) -> Self {
        if normalised { BranchOutput { stream: None, bias: None, ..self } } else { self }
    }

    /// The output of the first of two branches with the same input.
    pub fn first(ctx: &Context, stream: View<'a>, bias: Option<View<'a>>) -> Self {
        BranchOutput { summed: false, ..BranchOutput::new(ctx, stream, bias) }
    }

    /// The output of the second of two branches. The output of the `first` is added to it.
    pub fn second(ctx: &Context, first: View<'a>, bias: Option<View<'a>>) -> Self {
        let alone = BranchOutput::new(ctx, first, bias);
        BranchOutput { other: (ctx.tensor.size() > 1).then_some(first), ..alone }
    }

    /// The row-parallel product with `x`, `[rows, inputs]`. Without tensor parallelism the result is the new residual stream,
    /// otherwise this rank's partial result of the branch.
    ///
    /// `float8` has the rows of `x` in 8 bits, if they exist. Then `x` is not read.
    pub fn project(
        self,
        ctx: &Context,
        x: View,
        float8: Option<&Float8Matrix>,
        weight: View,
        inputs: usize,
    ) -> Chunks {
        let width = ctx.shape.hidden;
        let weight_float8 = ctx.float8(weight, [width, inputs], Orientation::Rows);
        let cast = match float8 {
            Some(_) => None,
            None => ctx.float8(x, [ctx.shape.rows, inputs], Orientation::Rows),
        };
        let x_float8 = float8.or(cast.as_ref());
        let multiply = |out: View, rows: std::ops::Range<usize>| {
            let op = Linear {
                x: x.slice(elements(&rows, inputs)),
                weight,
                bias: self.bias,
                gelu: None,
                residual: self.stream,
                out,
                rows: rows.len(),
                inputs,
                outputs: width,
                float8: None,
            };
            ctx.linear(op, x_float8.map(|x| x.rows(&rows)), weight_float8.as_ref());
            if let Some(other) = self.other {
                ctx.backend.add(other.slice(elements(&rows, width)), out);
            }
        };
        if self.summed {
            return ctx.partial_product(multiply);
        }
        let out = ctx.activation(ctx.shape.rows * width);
        multiply(out.view(), 0..ctx.shape.rows);
        Chunks::one(out)
    }
}

/// The residual stream after a branch. Without tensor parallelism `end` already includes it. Otherwise sums `end` over tp and
/// adds stream and biases.
pub(crate) fn add_to_stream(ctx: &Context, stream: View, end: Chunks, biases: &[View]) -> Buffer {
    if ctx.tensor.size() == 1 {
        return end.into_whole(ctx);
    }
    let width = ctx.shape.hidden;
    ctx.sum_by_parts(end, |rows, branch, out| {
        let stream = stream.slice(elements(&rows, width));
        ctx.backend.residual(Residual {
            x: branch,
            addends: &[stream],
            biases,
            out,
            rows: rows.len(),
            width,
        });
    })
}

/// The residual stream after two branches with the same input. `end` is the output of the second and includes the first.
pub(crate) fn add_both_to_stream(
    ctx: &Context,
    stream: View,
    end: Chunks,
    biases: [Option<View>; 2],
) -> Buffer {
    match biases {
        [Some(one), Some(other)] => add_to_stream(ctx, stream, end, &[one, other]),
        [one, other] => add_to_stream(ctx, stream, end, one.or(other).as_slice()),
    }
}

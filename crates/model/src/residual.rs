//! Adds the output of a layer's branch to the residual stream.
//!
//! Without tensor parallelism, the last matrix product of the branch adds residual stream and bias before it rounds, which
//! saves a pass over memory. With tensor parallelism, the partial results of the ranks are summed first.

use kintsugi_tensor::ops::{Linear, Residual};
use kintsugi_tensor::{Buffer, View};

use crate::Context;

/// What the last matrix product of a branch adds to its result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchOutput<'a> {
    stream: Option<View<'a>>,
    bias: Option<View<'a>>,
}

impl<'a> BranchOutput<'a> {
    /// The output of a branch that is added to `stream` with a bias.
    pub fn new(ctx: &Context, stream: View<'a>, bias: Option<View<'a>>) -> Self {
        if ctx.tensor.size() == 1 {
            BranchOutput { stream: Some(stream), bias }
        } else {
            BranchOutput { stream: None, bias: None }
        }
    }

    /// The row-parallel product with `x`, `[rows, inputs]`. Without tensor parallelism the result is the new residual stream,
    /// otherwise this rank's partial result of the branch.
    pub fn project(self, ctx: &Context, x: View, weight: View, inputs: usize) -> Buffer {
        let shape = ctx.shape;
        let out = ctx.activation(shape.rows * shape.hidden);
        ctx.backend.linear(Linear {
            x,
            weight,
            bias: self.bias,
            gelu: None,
            residual: self.stream,
            out: out.view(),
            rows: shape.rows,
            inputs,
            outputs: shape.hidden,
        });
        out
    }
}

/// The residual stream after a branch. Without tensor parallelism `end` already includes it. Otherwise sums `end` over tp and
/// adds stream and biases.
pub(crate) fn add_to_stream(ctx: &Context, stream: View, end: Buffer, biases: &[View]) -> Buffer {
    if ctx.tensor.size() == 1 {
        return end;
    }
    let (rows, width) = (ctx.shape.own_rows, ctx.shape.hidden);
    let reduced = ctx.reduced(end);
    ctx.trimmed(reduced, |branch, out| {
        ctx.backend.residual(Residual { x: branch, addends: &[stream], biases, out, rows, width });
    })
}

/// The residual stream after two branches with the same input. Without tensor parallelism, the second branch must already
/// include the first: its [`BranchOutput`] has the result of the first as its stream.
pub(crate) fn add_both_to_stream(
    ctx: &Context,
    stream: View,
    first: Buffer,
    second: Buffer,
    biases: [Option<View>; 2],
) -> Buffer {
    if ctx.tensor.size() > 1 {
        ctx.backend.add(first.view(), second.view());
    }
    drop(first);
    match biases {
        [Some(one), Some(other)] => add_to_stream(ctx, stream, second, &[one, other]),
        [one, other] => add_to_stream(ctx, stream, second, one.or(other).as_slice()),
    }
}

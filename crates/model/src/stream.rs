//! How a branch of a layer ends in the residual stream.
//!
//! A rank that is alone in its tensor-parallel group has the whole sum of the last product: stream and bias are added
//! there, before anything is rounded, and no pass over memory is left to do. Otherwise the ranks' parts are summed first.

use kintsugi_tensor::ops::{Linear, Residual};
use kintsugi_tensor::{Buffer, View};

use crate::Context;

/// What the last product of a branch adds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending<'a> {
    stream: Option<View<'a>>,
    bias: Option<View<'a>>,
}

impl<'a> Ending<'a> {
    /// The end of a branch that is added to `stream` with a bias.
    pub fn new(ctx: &Context, stream: View<'a>, bias: Option<View<'a>>) -> Self {
        if ctx.tensor.size() == 1 {
            Ending { stream: Some(stream), bias }
        } else {
            Ending { stream: None, bias: None }
        }
    }

    /// The row-parallel product from `x`, `[rows, inputs]`: the stream, or this rank's part of the branch.
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

/// The stream after a branch: `end` itself where it has the stream in it, else the sum over tp with stream and biases.
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

/// The stream after two branches from the same input, where the second's ending was made with the first's end.
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

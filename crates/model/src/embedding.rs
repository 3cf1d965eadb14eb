//! The embedding: vocabulary-parallel token table, and learned positions where the family has them.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_tensor::ops::{Embedding, EmbeddingBackward, Positions, PositionsBackward};
use kintsugi_tensor::{Buffer, View};

use crate::rows::elements;
use crate::{Context, Gradients, Weights};

/// Computes this rank's rows of the residual stream from token ids. Each tp rank looks up the tokens of its part of the
/// vocabulary, and the sum over tp has all of them.
pub fn forward(ctx: &Context, tokens: View, table: &Weights, positions: Option<&Weights>) -> Buffer {
    let shape = ctx.shape;
    let x = look_up(ctx, tokens, table);
    if let Some(positions) = positions {
        for (first_row, rows) in ctx.consecutive_rows() {
            ctx.backend.positions(Positions {
                x: x.slice(elements(&rows, shape.hidden)),
                table: positions.get(ParameterKind::Positions),
                first_row,
                sequence: shape.sequence,
                rows: rows.len(),
                width: shape.hidden,
            });
        }
    }
    x
}

/// The same for new tokens at positions `at` of their samples.
pub fn decode(ctx: &Context, tokens: View, at: View, table: &Weights, positions: Option<&Weights>) -> Buffer {
    let (rows, width) = (ctx.shape.rows, ctx.shape.hidden);
    let x = look_up(ctx, tokens, table);
    if let Some(positions) = positions {
        let (table, own) = (positions.get(ParameterKind::Positions), ctx.activation(rows * width));
        ctx.backend.embedding(Embedding { tokens: at, table, first: 0, out: own.view(), rows, width });
        ctx.backend.add(own.view(), x.view());
    }
    x
}

fn look_up(ctx: &Context, tokens: View, table: &Weights) -> Buffer {
    let shape = ctx.shape;
    let partial = ctx.partial_product(|out, rows| {
        ctx.backend.embedding(Embedding {
            tokens: tokens.slice(rows.clone()),
            table: table.get(ParameterKind::Table),
            first: shape.first_token,
            out,
            rows: rows.len(),
            width: shape.hidden,
        });
    });
    let x = ctx.own_sum(partial);
    if let Some(factor) = shape.embedding_scale {
        ctx.backend.scale(factor, x.view());
    }
    x
}

/// Computes the gradients of table and positions, unless they are frozen, from the gradient of this rank's rows, which it may change.
pub fn backward(ctx: &Context, dx: &Buffer, tokens: View, table: &Gradients, positions: Option<&Gradients>) {
    let shape = ctx.shape;
    for (first_row, rows) in ctx.consecutive_rows() {
        // The first part overwrites the gradient of an earlier step, and the others accumulate.
        let dtable = positions.and_then(|positions| positions.find(ParameterKind::Positions));
        let Some(dtable) = dtable else { break };
        ctx.backend.positions_backward(PositionsBackward {
            dx: dx.slice(elements(&rows, shape.hidden)),
            dtable,
            first_row,
            sequence: shape.sequence,
            rows: rows.len(),
            width: shape.hidden,
        });
    }
    let Some(dtable) = table.find(ParameterKind::Table) else { return };
    if let Some(factor) = shape.embedding_scale {
        ctx.backend.scale(factor, dx.view());
    }
    let mut gathered = ctx.all_rows(dx.view());
    ctx.backend.embedding_backward(EmbeddingBackward {
        tokens,
        dout: gathered.whole(ctx),
        first: shape.first_token,
        dtable,
        rows: shape.rows,
        width: shape.hidden,
    });
}

//! Shapes of operations, checked before they are run on any backend.

use super::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, ColumnSum, CopyColumns, CrossEntropy,
    Embedding, EmbeddingBackward, Float8Factors, Gated, GatedBackward, Linear, LinearBackwardInput,
    LinearBackwardWeight, LossStatistics, Norm, NormBackward, Parameters, Positions, PositionsBackward,
    Residual, Rotary, SumsOfSquares, Update, UpdateControl, control,
};
use crate::{DType, View};

/// An operation whose shapes can be checked.
pub trait Check {
    /// Panics if a view does not have the elements or the type that the operation needs.
    fn check(&self);
}

pub(super) fn expect(name: &str, view: View, len: usize) {
    assert_eq!(view.len(), len, "{name} has the wrong number of elements");
}

pub(super) fn expect_type(name: &str, view: View, dtype: DType) {
    assert_eq!(view.dtype(), dtype, "{name} has the wrong type");
}

impl Check for Linear<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.inputs);
        expect("weight", self.weight, self.outputs * self.inputs);
        expect("out", self.out, self.rows * self.outputs);
        Float8Factors::check(self.float8, self.x, self.weight);
        if let Some(bias) = self.bias {
            expect("bias", bias, self.outputs);
        }
        if let Some(gelu) = self.gelu {
            expect("gelu", gelu, self.rows * self.outputs);
        }
        if let Some(residual) = self.residual {
            expect("residual", residual, self.rows * self.outputs);
            assert!(self.gelu.is_none(), "a GELU that is added to");
        }
    }
}

impl Check for LinearBackwardInput<'_> {
    fn check(&self) {
        expect("dy", self.dy, self.rows * self.outputs);
        expect("weight", self.weight, self.outputs * self.inputs);
        expect("dx", self.dx, self.rows * self.inputs);
        Float8Factors::check(self.float8, self.dy, self.weight);
        if let Some(gelu) = self.gelu {
            expect("gelu", gelu, self.rows * self.inputs);
        }
        if let Some(dbias) = self.dbias {
            expect("dbias", dbias.view, self.inputs);
        }
    }
}

impl Check for LinearBackwardWeight<'_> {
    fn check(&self) {
        expect("dy", self.dy, self.rows * self.outputs);
        expect("x", self.x, self.rows * self.inputs);
        expect("dweight", self.dweight.view, self.outputs * self.inputs);
        Float8Factors::check(self.float8, self.dy, self.x);
        assert!(self.float8.is_none() || self.dbias.is_none(), "the sum of codes");
        if let Some(dbias) = self.dbias {
            expect("dbias", dbias.view, self.outputs);
        }
    }
}

impl Check for Residual<'_> {
    fn check(&self) {
        let len = self.rows * self.width;
        expect("x", self.x, len);
        expect("out", self.out, len);
        self.addends.iter().for_each(|&a| expect("addend", a, len));
        self.biases.iter().for_each(|&b| expect("bias", b, self.width));
    }
}

impl Check for ColumnSum<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        expect("out", self.out.view, self.width);
    }
}

impl Check for Norm<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        expect("out", self.out, self.rows * self.width);
        expect("weight", self.weight, self.width);
        expect("statistics", self.statistics, self.rows * 2);
        expect_type("statistics", self.statistics, self.x.dtype().accumulator());
        if let Some(bias) = self.bias {
            expect("bias", bias, self.width);
        }
    }
}

impl Check for NormBackward<'_> {
    fn check(&self) {
        let len = self.rows * self.width;
        expect("dy", self.dy, len);
        expect("x", self.x, len);
        expect("dx", self.dx, len);
        expect("statistics", self.statistics, self.rows * 2);
        expect("weight", self.weight, self.width);
        if let Some(dweight) = self.dweight {
            expect("dweight", dweight.view, self.width);
        }
        if let Some(residual) = self.residual {
            expect("residual", residual, len);
        }
        if let Some(sum) = self.residual_sum {
            expect("sum of the residual", sum.view, self.width);
            assert!(self.residual.is_some(), "the sum of a residual that is not there");
        }
        if let Some(dbias) = self.dbias {
            expect("dbias", dbias.view, self.width);
            assert!(self.centred, "the gradient of a bias that is not there");
        }
        let others = self.dbias.is_some() || self.residual_sum.is_some();
        assert!(self.dweight.is_some() || !others, "gradients of biases without that of the weight");
    }
}

impl Check for CopyColumns<'_> {
    fn check(&self) {
        expect_type("from", self.from.view, self.to.view.dtype());
        for (name, matrix) in [("from", self.from), ("to", self.to)] {
            expect(name, matrix.view, self.rows * matrix.width);
            assert!(matrix.first + self.columns <= matrix.width, "{name} has too few columns");
        }
    }
}

impl AttentionSaved<'_> {
    fn check(&self, shape: AttentionShape, compute: DType) {
        match *self {
            AttentionSaved::LogSumExp(view) => {
                expect("log-sum-exp", view, shape.rows() * shape.heads);
                expect_type("log-sum-exp", view, compute.accumulator());
            }
            AttentionSaved::Probabilities(view) => {
                expect("probabilities", view, shape.score_elements());
                expect_type("probabilities", view, compute);
            }
        }
    }
}

pub(super) fn check_starts(starts: Option<View>, shape: AttentionShape) {
    assert!(starts.is_some() || shape.scores.window.is_none(), "a window without starts");
    if let Some(starts) = starts {
        expect("starts", starts, shape.rows());
        expect_type("starts", starts, DType::U32);
    }
}

impl Check for Attention<'_> {
    fn check(&self) {
        expect("qkv", self.qkv, self.shape.rows() * self.shape.qkv_width());
        expect("out", self.out, self.shape.rows() * self.shape.heads * self.shape.head_dim);
        self.saved.check(self.shape, self.qkv.dtype());
        check_starts(self.starts, self.shape);
    }
}

impl Check for AttentionBackward<'_> {
    fn check(&self) {
        let out = self.shape.rows() * self.shape.heads * self.shape.head_dim;
        expect("qkv", self.qkv, self.shape.rows() * self.shape.qkv_width());
        expect("dqkv", self.dqkv, self.qkv.len());
        expect("out", self.out, out);
        expect("dout", self.dout, out);
        if let Some(dbias) = self.dbias {
            expect("dbias", dbias.view, self.shape.qkv_width());
        }
        self.saved.check(self.shape, self.qkv.dtype());
        check_starts(self.starts, self.shape);
    }
}

impl Check for Rotary<'_> {
    fn check(&self) {
        expect("qkv", self.qkv, self.shape.rows() * self.shape.qkv_width());
        assert!(self.dims.is_multiple_of(2) && self.dims <= self.shape.head_dim, "{} rotary dims", self.dims);
        if let Some(positions) = self.positions {
            expect("positions", positions, self.shape.rows());
            expect_type("positions", positions, DType::U32);
        }
    }
}

impl Check for Gated<'_> {
    fn check(&self) {
        expect("x", self.x, 2 * self.rows * self.width);
        expect("out", self.out, self.rows * self.width);
    }
}

impl Check for GatedBackward<'_> {
    fn check(&self) {
        expect("dout", self.dout, self.rows * self.width);
        expect("x", self.x, 2 * self.rows * self.width);
        expect("dx", self.dx, 2 * self.rows * self.width);
    }
}

impl Check for Embedding<'_> {
    fn check(&self) {
        expect("tokens", self.tokens, self.rows);
        expect_type("tokens", self.tokens, DType::U32);
        expect("out", self.out, self.rows * self.width);
        assert!(self.table.len().is_multiple_of(self.width), "table is not whole rows");
    }
}

impl Check for EmbeddingBackward<'_> {
    fn check(&self) {
        expect("tokens", self.tokens, self.rows);
        expect_type("tokens", self.tokens, DType::U32);
        expect("dout", self.dout, self.rows * self.width);
        assert!(self.dtable.view.len().is_multiple_of(self.width), "table is not whole rows");
    }
}

impl Check for Positions<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        assert!(self.table.len() >= self.sequence * self.width, "the table has too few positions");
    }
}

impl Check for PositionsBackward<'_> {
    fn check(&self) {
        expect("dx", self.dx, self.rows * self.width);
        assert!(self.dtable.view.len() >= self.sequence * self.width, "the table has too few positions");
    }
}

impl Check for LossStatistics<'_> {
    fn check(&self) {
        expect("logits", self.logits, self.rows * self.columns);
        expect("targets", self.targets, self.rows);
        expect_type("targets", self.targets, DType::U32);
        expect("statistics", self.statistics, self.rows * 3);
        expect_type("statistics", self.statistics, self.logits.dtype().accumulator());
        assert!(self.valid <= self.columns, "{} valid of {} columns", self.valid, self.columns);
    }
}

impl Check for CrossEntropy<'_> {
    fn check(&self) {
        expect("logits", self.logits, self.rows * self.columns);
        expect("targets", self.targets, self.rows);
        expect("statistics", self.statistics, self.parts * self.rows * 3);
        if let Some(statistics) = self.own_statistics() {
            statistics.check();
        }
        expect("loss", self.loss, 1);
        if let Some(scale) = self.scale {
            expect("scale", scale, 1);
        }
    }
}

impl Check for Update<'_> {
    fn check(&self) {
        expect("control", self.control, control::LEN);
        self.parameters.iter().for_each(Check::check);
        let types = |p: &Parameters| {
            let states = p.states.map(|state| state.map(|state| state.dtype()));
            (p.gradient.dtype(), p.master.dtype(), states, p.weights.map(|weights| weights.dtype()))
        };
        let alike = self.parameters.windows(2).all(|pair| types(&pair[0]) == types(&pair[1]));
        assert!(alike, "parameters of different types in one update");
        let has_its_states = |p: &Parameters| {
            let states = p.states.iter().flatten();
            states.clone().count() == self.rule.states()
                && states.clone().all(|state| Some(state.dtype()) == p.states[0].map(|first| first.dtype()))
        };
        assert!(self.parameters.iter().all(has_its_states), "{} has other states", self.rule.name());
    }
}

impl Check for Parameters<'_> {
    fn check(&self) {
        let len = self.gradient.len();
        expect("master", self.master, len);
        self.states.iter().flatten().for_each(|&state| expect("state", state, len));
        if let Some(weights) = self.weights {
            expect("weights", weights, len);
        }
        assert!(self.segments.iter().all(|s| s.start + s.len <= len), "a segment lies outside");
    }
}

impl Check for SumsOfSquares<'_> {
    fn check(&self) {
        for part in self.parts {
            assert_eq!(part.from.dtype(), self.parts[0].from.dtype(), "squares of different types at once");
            if let Some(own) = part.own {
                expect("own sum", own, 1);
            }
        }
        if let Some(total) = self.total {
            expect("total", total, 1);
        }
    }
}

impl Check for UpdateControl<'_> {
    fn check(&self) {
        expect("control", self.control, control::LEN);
        expect("sum of squares", self.sum_of_squares, 1);
        expect("loss sum", self.loss_sum, 1);
    }
}

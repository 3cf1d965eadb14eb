//! The products of a layer: in the compute type, or in 8 bits (arXiv 2209.05433).
//!
//! Every matrix gets one scale, from its own largest number. Activations and weights are in E4M3, gradients in E5M2. Products
//! in 8 bits need factors whose summed dimension is adjacent in memory, so the two backwards read transposed copies. The
//! copies live as long as the products that read them.

use std::ops::Range;

use kintsugi_plan::Products;
use kintsugi_tensor::ops::{
    CastToFloat8, ColumnSum, Float8Factors, Float8Scale, Float8Source, Gradient, Linear, LinearBackwardInput,
    LinearBackwardWeight,
};
use kintsugi_tensor::{Buffer, Category, DType, Float8, View};

use crate::Context;
use crate::rows::elements;

/// A matrix in 8 bits, in the orientations that were asked for.
#[derive(Debug)]
pub(crate) struct Float8Matrix {
    codes: Option<Buffer>,
    transposed: Option<Buffer>,
    inverse: Buffer,
    format: Float8,
    columns: usize,
}

/// The orientations of a matrix that products read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Orientation {
    /// As it is.
    Rows,
    /// Transposed.
    Transposed,
    /// Both.
    Both,
}

/// Codes in one orientation, and their scale.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Float8View<'a> {
    codes: View<'a>,
    scale: Float8Scale<'a>,
}

/// A factor of the gradient of a weight.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WeightFactor<'a> {
    /// Its numbers, `[rows, columns]`.
    Numbers(View<'a>),
    /// Its transpose in 8 bits.
    Float8(Float8View<'a>),
}

/// The same, as it is saved for the backward. In 8 bits it has half the bytes.
#[derive(Debug)]
pub(crate) enum SavedFactor {
    /// Its numbers.
    Numbers(Buffer),
    /// Its transpose in 8 bits.
    Float8(Float8Matrix),
}

impl SavedFactor {
    /// Saves a matrix: its transpose in 8 bits, if there is one, or else its numbers.
    pub fn new(numbers: Option<Buffer>, float8: Option<Float8Matrix>) -> Option<Self> {
        let transposed = |matrix| SavedFactor::Float8(Float8Matrix { codes: None, ..matrix });
        float8.map(transposed).or(numbers.map(SavedFactor::Numbers))
    }

    /// It as a factor.
    pub fn factor(&self) -> WeightFactor<'_> {
        match self {
            SavedFactor::Numbers(numbers) => WeightFactor::Numbers(numbers.view()),
            SavedFactor::Float8(matrix) => WeightFactor::Float8(matrix.transposed()),
        }
    }
}

/// The gradient of a weight: [`LinearBackwardWeight`] with any kind of factors. `dy` is also needed as numbers if there is a
/// bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightGradient<'a> {
    pub dy: View<'a>,
    /// The transpose of `dy` in 8 bits, if it exists.
    pub dy_float8: Option<Float8View<'a>>,
    pub x: WeightFactor<'a>,
    pub dweight: Gradient<'a>,
    pub dbias: Option<Gradient<'a>>,
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
}

impl Float8Matrix {
    fn new(
        ctx: &Context,
        x: Float8Source,
        [rows, columns]: [usize; 2],
        format: Float8,
        which: Orientation,
    ) -> Self {
        let bytes = |wanted: bool| {
            wanted.then(|| ctx.backend.allocate(rows * columns, DType::U8, Category::Activations))
        };
        let matrix = Float8Matrix {
            codes: bytes(which != Orientation::Transposed),
            transposed: bytes(which != Orientation::Rows),
            inverse: ctx.backend.allocate(1, DType::F32, Category::Activations),
            format,
            columns,
        };
        ctx.backend.cast_to_float8(CastToFloat8 {
            x,
            codes: matrix.codes.as_ref().map(Buffer::view),
            transposed: matrix.transposed.as_ref().map(Buffer::view),
            scale: matrix.scale(),
            rows,
            columns,
        });
        matrix
    }

    fn scale(&self) -> Float8Scale<'_> {
        Float8Scale { format: self.format, inverse: self.inverse.view() }
    }

    /// Some rows.
    pub fn rows(&self, rows: &Range<usize>) -> Float8View<'_> {
        let codes = self.codes.as_ref().expect("its rows were asked for");
        Float8View { codes: codes.slice(elements(rows, self.columns)), scale: self.scale() }
    }

    /// The transposed matrix.
    pub fn transposed(&self) -> Float8View<'_> {
        let codes = self.transposed.as_ref().expect("its transpose was asked for");
        Float8View { codes: codes.view(), scale: self.scale() }
    }

    fn whole(&self) -> Float8View<'_> {
        let codes = self.codes.as_ref().expect("its rows were asked for");
        Float8View { codes: codes.view(), scale: self.scale() }
    }
}

fn factors<'a>(left: Float8View<'a>, right: Float8View<'a>) -> Float8Factors<'a> {
    Float8Factors { left: left.scale, right: right.scale }
}

impl Context<'_> {
    /// An activation or a weight of these sizes in 8 bits, if products are.
    pub(crate) fn float8(&self, x: View, sizes: [usize; 2], which: Orientation) -> Option<Float8Matrix> {
        self.float8_of(Float8Source::Numbers(x), sizes, which)
    }

    /// The same of numbers that are computed on the way.
    pub(crate) fn float8_of(
        &self,
        x: Float8Source,
        sizes: [usize; 2],
        which: Orientation,
    ) -> Option<Float8Matrix> {
        let float8 = self.shape.products == Products::Fp8;
        float8.then(|| Float8Matrix::new(self, x, sizes, Float8::E4M3, which))
    }

    /// A gradient of these sizes in 8 bits, if products are.
    pub(crate) fn float8_gradient(
        &self,
        dy: View,
        sizes: [usize; 2],
        which: Orientation,
    ) -> Option<Float8Matrix> {
        (self.shape.products == Products::Fp8)
            .then(|| Float8Matrix::new(self, Float8Source::Numbers(dy), sizes, Float8::E5M2, which))
    }

    /// [`Linear`] with the rows of a weight in 8 bits, if products are. `x` is the operation's own in 8 bits, if it exists.
    pub(crate) fn linear(&self, op: Linear, x: Option<Float8View>, weight: Option<&Float8Matrix>) {
        let Some(weight) = weight else { return self.backend.linear(op) };
        let cast = match x {
            Some(_) => None,
            None => self.float8(op.x, [op.rows, op.inputs], Orientation::Rows),
        };
        let x = x.or(cast.as_ref().map(Float8Matrix::whole)).expect("products are in 8 bits");
        let weight = weight.whole();
        let float8 = Some(factors(x, weight));
        self.backend.linear(Linear { x: x.codes, weight: weight.codes, float8, ..op });
    }

    /// [`LinearBackwardInput`] with the transpose of a weight in 8 bits, if products are. `dy` is the operation's own in 8
    /// bits, if it exists.
    pub(crate) fn linear_backward_input(
        &self,
        op: LinearBackwardInput,
        dy: Option<Float8View>,
        weight: Option<&Float8Matrix>,
    ) {
        let Some(weight) = weight else { return self.backend.linear_backward_input(op) };
        let cast = match dy {
            Some(_) => None,
            None => self.float8_gradient(op.dy, [op.rows, op.outputs], Orientation::Rows),
        };
        let dy = dy.or(cast.as_ref().map(Float8Matrix::whole)).expect("products are in 8 bits");
        let weight = weight.transposed();
        let float8 = Some(factors(dy, weight));
        self.backend.linear_backward_input(LinearBackwardInput {
            dy: dy.codes,
            weight: weight.codes,
            float8,
            ..op
        });
    }

    /// Computes the gradient of a weight.
    pub(crate) fn weight_gradient(&self, op: WeightGradient) {
        let WeightGradient { dy, dy_float8, x, dweight, dbias, rows, inputs, outputs } = op;
        let plain = LinearBackwardWeight { dy, x: dy, dweight, dbias, rows, inputs, outputs, float8: None };
        let cast_x = match x {
            WeightFactor::Float8(_) => None,
            WeightFactor::Numbers(numbers) => {
                let cast = self.float8(numbers, [rows, inputs], Orientation::Transposed);
                if cast.is_none() {
                    return self.backend.linear_backward_weight(LinearBackwardWeight { x: numbers, ..plain });
                }
                cast
            }
        };
        let x = match x {
            WeightFactor::Float8(x) => Some(x),
            WeightFactor::Numbers(_) => cast_x.as_ref().map(Float8Matrix::transposed),
        };
        let x = x.expect("products are in 8 bits");
        if let Some(out) = dbias {
            self.backend.column_sum(ColumnSum { x: dy, out, rows, width: outputs });
        }
        let cast = match dy_float8 {
            Some(_) => None,
            None => self.float8_gradient(dy, [rows, outputs], Orientation::Transposed),
        };
        let dy = dy_float8.or(cast.as_ref().map(Float8Matrix::transposed)).expect("products are in 8 bits");
        let (dbias, float8) = (None, Some(factors(dy, x)));
        self.backend.linear_backward_weight(LinearBackwardWeight {
            dy: dy.codes,
            x: x.codes,
            dbias,
            float8,
            ..plain
        });
    }
}

//! Rates of matrix products as in training: 16-bit factors, and weight gradients in fp32 or in 16 bits, as the run has them.

use std::cell::Cell;

use kintsugi_spec::ProductPoint;
use kintsugi_tensor::ops::{Gradient, Linear, LinearBackwardInput, LinearBackwardWeight};
use kintsugi_tensor::{Buffer, DType};

use super::Timing;
use super::bench::Bench;
use super::shapes::{LinearProduct, ProductShape};

/// Bytes of weights that no cache holds.
const LARGER_THAN_CACHES: usize = 256 << 20;

/// The FLOP/s of a product.
pub fn rate<'a>(
    bench: &mut Bench<'a>,
    types: ProductTypes,
    shape: ProductShape,
    timing: Timing<'a>,
) -> ProductPoint {
    let ProductShape { rows, inputs, outputs, pass, .. } = shape;
    let [m, n, k] = match pass {
        LinearProduct::Forward => [rows, outputs, inputs],
        LinearProduct::Input => [rows, inputs, outputs],
        LinearProduct::Weight => [outputs, inputs, rows],
    };
    let seconds = with(bench, types, shape, timing);
    let flops = 2.0 * m as f64 * n as f64 * k as f64 / seconds;
    ProductPoint { m, n, k, fp32: types.factors == DType::F32, flops, burst: None }
}

/// The types of a product.
#[derive(Clone, Copy, Debug)]
pub struct ProductTypes {
    /// Activations and weights.
    pub factors: DType,
    /// The gradient of the weight.
    pub gradient: DType,
}

/// Calls `measure` with a function that runs the product.
///
/// Every run has the weights of the next layer, so caches hold them only if they hold those of a whole model.
pub fn with<'a, T>(
    bench: &mut Bench<'a>,
    types: ProductTypes,
    shape: ProductShape,
    measure: impl FnOnce(&mut Bench<'a>, &dyn Fn()) -> T,
) -> T {
    let ProductShape { rows, inputs, outputs, pass, layers } = shape;
    let backend = bench.backend;
    let x = bench.numbers(rows * inputs, types.factors);
    let y = bench.numbers(rows * outputs, types.factors);
    let dtype = if pass == LinearProduct::Weight { types.gradient } else { types.factors };
    let layers = layers.min(LARGER_THAN_CACHES / (outputs * inputs * dtype.bytes()) + 1);
    // Weights, or their gradients.
    let weights: Vec<Buffer> = (0..layers).map(|_| bench.numbers(outputs * inputs, dtype)).collect();
    let layer = Cell::new(0);
    let next = || {
        layer.set((layer.get() + 1) % layers);
        weights[layer.get()].view()
    };
    match pass {
        LinearProduct::Forward => measure(bench, &|| {
            let (x, weight, out) = (x.view(), next(), y.view());
            backend.linear(Linear {
                x,
                weight,
                bias: None,
                gelu: None,
                residual: None,
                out,
                rows,
                inputs,
                outputs,
                float8: None,
            });
        }),
        LinearProduct::Input => measure(bench, &|| {
            let (dy, weight, dx) = (y.view(), next(), x.view());
            backend.linear_backward_input(LinearBackwardInput {
                dy,
                weight,
                gelu: None,
                dx,
                dbias: None,
                rows,
                inputs,
                outputs,
                float8: None,
            });
        }),
        LinearProduct::Weight => measure(bench, &|| {
            let dweight = Gradient { view: next(), accumulate: false };
            let (dy, x) = (y.view(), x.view());
            backend.linear_backward_weight(LinearBackwardWeight {
                dy,
                x,
                dweight,
                dbias: None,
                rows,
                inputs,
                outputs,
                float8: None,
            });
        }),
    }
}

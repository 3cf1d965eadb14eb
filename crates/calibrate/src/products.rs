//! Rates of matrix products as in training: 16-bit factors, and weight gradients that are accumulated in fp32.

use kintsugi_spec::ProductPoint;
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{Gradient, Linear, LinearBackwardInput, LinearBackwardWeight};

use super::Timing;
use super::bench::Bench;
use super::shapes::{Pass, ProductShape};

/// The FLOP/s of a product.
pub fn rate<'a>(
    bench: &mut Bench<'a>,
    dtype: DType,
    shape: ProductShape,
    timing: Timing<'a>,
) -> ProductPoint {
    let ProductShape { rows, inputs, outputs, pass } = shape;
    let [m, n, k] = match pass {
        Pass::Forward => [rows, outputs, inputs],
        Pass::Input => [rows, inputs, outputs],
        Pass::Weight => [outputs, inputs, rows],
    };
    let seconds = with(bench, dtype, shape, timing);
    let flops = 2.0 * m as f64 * n as f64 * k as f64 / seconds;
    ProductPoint { m, n, k, fp32: dtype == DType::F32, flops, burst: None }
}

/// Calls `measure` with a function that runs the product.
pub fn with<'a, T>(
    bench: &mut Bench<'a>,
    dtype: DType,
    shape: ProductShape,
    measure: impl FnOnce(&mut Bench<'a>, &dyn Fn()) -> T,
) -> T {
    let ProductShape { rows, inputs, outputs, pass } = shape;
    let backend = bench.backend;
    let x = bench.numbers(rows * inputs, dtype);
    let y = bench.numbers(rows * outputs, dtype);
    let weight = bench.numbers(outputs * inputs, dtype);
    match pass {
        Pass::Forward => measure(bench, &|| {
            let (x, weight, out) = (x.view(), weight.view(), y.view());
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
            });
        }),
        Pass::Input => measure(bench, &|| {
            let (dy, weight, dx) = (y.view(), weight.view(), x.view());
            backend.linear_backward_input(LinearBackwardInput {
                dy,
                weight,
                gelu: None,
                dx,
                dbias: None,
                rows,
                inputs,
                outputs,
            });
        }),
        Pass::Weight => {
            let gradient = bench.numbers(outputs * inputs, dtype.accumulator());
            measure(bench, &|| {
                let dweight = Gradient { view: gradient.view(), accumulate: false };
                let (dy, x) = (y.view(), x.view());
                backend.linear_backward_weight(LinearBackwardWeight {
                    dy,
                    x,
                    dweight,
                    dbias: None,
                    rows,
                    inputs,
                    outputs,
                });
            })
        }
    }
}

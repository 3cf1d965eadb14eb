//! Matrices in 8 bits: see [`crate::ops::CastToFloat8`].

use super::access::Access;
use super::element::Element;
use super::parallel::{CHUNKS, Rows, Threads};
use crate::ops::{CastToFloat8, Float8Factors};
use crate::{DType, Float8};

/// Codes of a format, as elements of products.
macro_rules! codes {
    ($name:ident, $format:expr, $what:literal) => {
        #[doc = $what]
        #[derive(Clone, Copy, Debug, Default)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl Element for $name {
            type Accumulator = f32;
            const DTYPE: DType = DType::U8;
            #[inline(always)]
            fn widen(self) -> f32 {
                $format.decode(self.0)
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                $name($format.encode(x))
            }
        }
    };
}

codes!(E4M3, Float8::E4M3, "A code of [`Float8::E4M3`].");
codes!(E5M2, Float8::E5M2, "A code of [`Float8::E5M2`].");

/// What the sums of a product's codes are multiplied by: a power of two.
pub fn factor(factors: &Float8Factors) -> f32 {
    let access = Access::new();
    [factors.left, factors.right].map(|scale| access.read::<f32>(scale.inverse)[0]).iter().product()
}

/// See [`CastToFloat8`]. The numbers are `function` of what is read.
pub fn cast<T>(threads: Threads, op: &CastToFloat8, function: impl Fn(f32) -> f32 + Sync)
where
    T: Element<Accumulator = f32>,
{
    let access = Access::new();
    let x = access.read::<T>(op.x.view());
    let (scale, inverse) = op.scale.format.scale(maximum(threads, x, &function));
    access.write::<f32>(op.scale.inverse)[0] = inverse;
    let (rows, columns, format) = (op.rows, op.columns, op.scale.format);
    let code = |x: T| format.encode(function(x.widen()) * scale);
    if let Some(codes) = op.codes {
        threads.each(x.len(), 4, (x, access.write_bytes(codes)), |_, (x, codes)| {
            for (to, &x) in codes.iter_mut().zip(x) {
                *to = code(x);
            }
        });
    }
    if let Some(transposed) = op.transposed {
        let parts = Rows(access.write_bytes(transposed), rows);
        threads.each(columns, 4 * rows, parts, |range, transposed| {
            for (column, codes) in range.zip(transposed.0.chunks_exact_mut(rows)) {
                for (to, x) in codes.iter_mut().zip(x.chunks_exact(columns)) {
                    *to = code(x[column]);
                }
            }
        });
    }
}

/// The largest magnitude of the numbers that are finite.
fn maximum<T>(threads: Threads, x: &[T], function: impl Fn(f32) -> f32 + Sync) -> f32
where
    T: Element<Accumulator = f32>,
{
    let mut maxima = [0.0_f32; CHUNKS];
    let size = x.len().div_ceil(CHUNKS).max(64);
    let count = x.len().div_ceil(size);
    threads.each(count, size, &mut maxima[..count], |range, maxima| {
        for (chunk, maximum) in range.zip(maxima) {
            for x in &x[chunk * size..x.len().min((chunk + 1) * size)] {
                let magnitude = function(x.widen()).abs();
                if magnitude.is_finite() {
                    *maximum = maximum.max(magnitude);
                }
            }
        }
    });
    maxima.into_iter().fold(0.0, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, added, fresh, random};
    use crate::ops::{Float8Scale, Float8Source, Linear, LinearBackwardInput, LinearBackwardWeight};
    use crate::{Backend, Buffer, Category, View};

    const ROWS: usize = 32;
    const INPUTS: usize = 48;
    const OUTPUTS: usize = 16;

    /// A matrix in both orientations, and the numbers that its codes stand for.
    struct Matrix {
        codes: Buffer,
        transposed: Buffer,
        inverse: Buffer,
        format: Float8,
        rounded: Vec<f64>,
    }

    impl Matrix {
        fn new(backend: &TestBackend, x: &[f64], rows: usize, dtype: DType, format: Float8) -> Self {
            let x = backend.buffer(x, dtype);
            let bytes = || backend.cpu.allocate(x.len(), DType::U8, Category::Activations);
            let (codes, transposed, inverse) = (bytes(), bytes(), backend.blank(1, DType::F32));
            let columns = x.len() / rows;
            backend.cpu.cast_to_float8(CastToFloat8 {
                x: Float8Source::Numbers(x.view()),
                codes: Some(codes.view()),
                transposed: Some(transposed.view()),
                scale: Float8Scale { format, inverse: inverse.view() },
                rows,
                columns,
            });
            let factor = backend.values(inverse.view())[0];
            let number = |&code: &u8| f64::from(format.decode(code)) * factor;
            let rounded: Vec<f64> = Access::new().bytes(codes.view()).iter().map(number).collect();
            let other: Vec<f64> = Access::new().bytes(transposed.view()).iter().map(number).collect();
            for (i, x) in rounded.iter().enumerate() {
                assert_eq!(x.to_bits(), other[i % columns * rows + i / columns].to_bits());
            }
            Matrix { codes, transposed, inverse, format, rounded }
        }

        fn scale(&self) -> Float8Scale<'_> {
            Float8Scale { format: self.format, inverse: self.inverse.view() }
        }
    }

    fn factors<'a>(left: &'a Matrix, right: &'a Matrix) -> Float8Factors<'a> {
        Float8Factors { left: left.scale(), right: right.scale() }
    }

    /// `Σ left[i] · right[i]` for every pair of lines of `k` numbers.
    fn product(left: &[f64], right: &[f64], k: usize) -> Vec<f64> {
        let lines = left.chunks(k).flat_map(|a| right.chunks(k).map(move |b| (a, b)));
        lines.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum()).collect()
    }

    fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
        (0..columns).flat_map(|column| x.chunks(columns).map(move |row| row[column])).collect()
    }

    fn assert_near(found: &[f64], expected: &[f64], tolerance: f64) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        let relative = error / norm(&mut expected.iter().copied());
        assert!(relative <= tolerance, "relative error {relative}");
    }

    #[test]
    fn products_are_those_of_the_rounded_factors() {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, 4e-3), (DType::F16, 5e-4)] {
            let backend = TestBackend::new(1);
            let small: Vec<f64> = random(ROWS * OUTPUTS, 3).iter().map(|x| x * 1e-3).collect();
            let x = Matrix::new(&backend, &random(ROWS * INPUTS, 1), ROWS, dtype, Float8::E4M3);
            let weight = Matrix::new(&backend, &random(OUTPUTS * INPUTS, 2), OUTPUTS, dtype, Float8::E4M3);
            let dy = Matrix::new(&backend, &small, ROWS, dtype, Float8::E5M2);
            let (rows, inputs, outputs) = (ROWS, INPUTS, OUTPUTS);
            let [out, end, dx] =
                [ROWS * OUTPUTS, ROWS * OUTPUTS, ROWS * INPUTS].map(|len| backend.blank(len, dtype));
            let bias = backend.buffer(&random(OUTPUTS, 4), dtype);
            let stream = backend.buffer(&random(ROWS * OUTPUTS, 5), dtype);
            let linear = Linear {
                x: x.codes.view(),
                weight: weight.codes.view(),
                bias: None,
                gelu: None,
                residual: None,
                out: out.view(),
                rows,
                inputs,
                outputs,
                float8: Some(factors(&x, &weight)),
            };
            backend.cpu.linear(linear);
            let expected = product(&x.rounded, &weight.rounded, INPUTS);
            assert_near(&backend.values(out.view()), &expected, tolerance);
            let with = |view: View| backend.values(view);
            let (residual, biases) = (with(stream.view()), with(bias.view()));
            let (bias, residual_view) = (Some(bias.view()), Some(stream.view()));
            backend.cpu.linear(Linear { bias, residual: residual_view, out: end.view(), ..linear });
            let sum = |(i, sum): (usize, &f64)| sum + biases[i % OUTPUTS] + residual[i];
            let expected: Vec<f64> = expected.iter().enumerate().map(sum).collect();
            assert_near(&backend.values(end.view()), &expected, tolerance);

            backend.cpu.linear_backward_input(LinearBackwardInput {
                dy: dy.codes.view(),
                weight: weight.transposed.view(),
                gelu: None,
                dx: dx.view(),
                dbias: None,
                rows,
                inputs,
                outputs,
                float8: Some(factors(&dy, &weight)),
            });
            let expected = product(&dy.rounded, &transposed(&weight.rounded, INPUTS), OUTPUTS);
            assert_near(&backend.values(dx.view()), &expected, tolerance);

            let expected = product(&transposed(&dy.rounded, OUTPUTS), &transposed(&x.rounded, INPUTS), ROWS);
            let dweight = backend.blank(INPUTS * OUTPUTS, DType::F32);
            for (times, gradient) in [(1.0, fresh(&dweight)), (2.0, added(&dweight))] {
                backend.cpu.linear_backward_weight(LinearBackwardWeight {
                    dy: dy.transposed.view(),
                    x: x.transposed.view(),
                    dweight: gradient,
                    dbias: None,
                    rows,
                    inputs,
                    outputs,
                    float8: Some(factors(&dy, &x)),
                });
                let expected: Vec<f64> = expected.iter().map(|sum| times * sum).collect();
                assert_near(&backend.values(dweight.view()), &expected, 1e-6);
            }
        }
    }

    #[test]
    fn every_number_of_threads_gives_the_same_codes() {
        let x = random(ROWS * INPUTS, 1);
        TestBackend::same_for_all_threads(|backend| {
            let matrix = Matrix::new(backend, &x, ROWS, DType::BF16, Float8::E4M3);
            matrix.rounded
        });
    }

    /// A row with an outlier loses what is too small beside it, and nothing overflows.
    #[test]
    fn zeros_outliers_and_overflows_make_no_scale_that_is_not_finite() {
        let backend = TestBackend::new(1);
        let matrix = |x: &[f64], format| Matrix::new(&backend, x, 16, DType::BF16, format);
        for format in [Float8::E4M3, Float8::E5M2] {
            assert_eq!(matrix(&[0.0; 256], format).rounded, [0.0; 256]);
            let mut x = vec![1.0; 256];
            x[7] = 1e14;
            let rounded = matrix(&x, format).rounded;
            assert!(
                (rounded[7] / 1e14 - 1.0).abs() < 0.13 && rounded[8].abs() < 1e-3,
                "{:?}",
                &rounded[7..9]
            );
            x[7] = f64::INFINITY;
            x[9] = f64::NAN;
            let rounded = matrix(&x, format).rounded;
            assert!(rounded[7].is_nan() && rounded[9].is_nan());
            assert_eq!(
                rounded.iter().filter(|&&x| (x - 1.0).abs() < 1e-9).count(),
                254,
                "the others are as without"
            );
        }
    }

    #[test]
    fn an_activation_is_rounded_once() {
        let backend = TestBackend::new(1);
        let x: Vec<f64> = random(256, 7).iter().map(|x| 3.0 * x).collect();
        let pre = backend.buffer(&x, DType::F32);
        let (codes, inverse) =
            (backend.cpu.allocate(256, DType::U8, Category::Activations), backend.blank(1, DType::F32));
        let scale = Float8Scale { format: Float8::E4M3, inverse: inverse.view() };
        let (x, codes_view) = (Float8Source::Gelu(pre.view()), Some(codes.view()));
        let op = CastToFloat8 { x, codes: codes_view, transposed: None, scale, rows: 16, columns: 16 };
        backend.cpu.cast_to_float8(op);
        let numbers: Vec<f32> =
            backend.values(pre.view()).iter().map(|&x| crate::cpu::activation::gelu(x as f32)).collect();
        let largest = numbers.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let (factor, expected_inverse) = Float8::E4M3.scale(largest);
        assert_eq!(backend.values(inverse.view()), [f64::from(expected_inverse)]);
        let expected: Vec<u8> = numbers.iter().map(|x| Float8::E4M3.encode(x * factor)).collect();
        assert_eq!(Access::new().bytes(codes.view()), expected);
    }
}

//! Matrices in 8 bits, and their products.

use std::rc::Rc;

use kintsugi_conformance::{COMPUTE, TestBackend, distance, gradient, random};
use kintsugi_gpu::{CUDA, GpuBackend};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{
    CastToFloat8, Float8Factors, Float8Scale, Float8Source, Linear, LinearBackwardInput, LinearBackwardWeight,
};
use kintsugi_tensor::{Backend, Buffer, Category, DType, Float8};

use crate::test_backend::{any_gpu, gpu, tuning_gpu};

const FORMATS: [Float8; 2] = [Float8::E4M3, Float8::E5M2];

/// A matrix in both orientations.
struct Matrix {
    codes: Buffer,
    transposed: Buffer,
    inverse: Buffer,
    format: Float8,
}

impl Matrix {
    fn new(backend: &TestBackend, x: &Buffer, rows: usize, format: Float8) -> Self {
        let bytes = || backend.device.allocate(x.len(), DType::U8, Category::Activations);
        let (codes, transposed, inverse) = (bytes(), bytes(), backend.sums(1));
        let matrix = Matrix { codes, transposed, inverse, format };
        matrix.cast(backend, x, rows);
        matrix
    }

    fn cast(&self, backend: &TestBackend, x: &Buffer, rows: usize) {
        self.cast_of(backend, Float8Source::Numbers(x.view()), rows);
    }

    fn cast_of(&self, backend: &TestBackend, x: Float8Source, rows: usize) {
        backend.device.cast_to_float8(CastToFloat8 {
            x,
            codes: Some(self.codes.view()),
            transposed: Some(self.transposed.view()),
            scale: self.scale(),
            rows,
            columns: x.view().len() / rows,
        });
    }

    fn scale(&self) -> Float8Scale<'_> {
        Float8Scale { format: self.format, inverse: self.inverse.view() }
    }

    /// All bytes. Every NaN counts as the same.
    fn bytes(&self, backend: &TestBackend) -> Vec<u8> {
        let read = |buffer: &Buffer| {
            let mut bytes = vec![0; buffer.view().bytes()];
            backend.device.download(buffer.view(), &mut bytes);
            bytes
        };
        let code = |code: u8| if self.format.decode(code).is_nan() { 0x7f } else { code };
        let codes = [read(&self.codes), read(&self.transposed)].concat().into_iter().map(code);
        codes.chain(read(&self.inverse)).collect()
    }
}

/// Casts the same numbers on both backends.
fn same_bytes(gpu: &GpuBackend, x: &[f32], rows: usize, dtype: DType, what: &str) {
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    for format in FORMATS {
        let [expected, found] = [&cpu as &dyn Backend, gpu].map(|device| {
            let backend = TestBackend { device, dtype };
            Matrix::new(&backend, &backend.numbers(x, dtype), rows, format).bytes(&backend)
        });
        let first = expected.iter().zip(&found).position(|(a, b)| a != b);
        assert_eq!(first, None, "{what} in {dtype:?} as {format:?}: the first byte that differs");
    }
}

#[test]
fn matrices_in_8_bits_have_the_same_bits_as_on_the_cpu() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for (rows, columns) in [(16, 16), (16, 400), (144, 16), (128, 128), (272, 304), (512, 768)] {
            let mut x = random(rows * columns, 3);
            x[rows * columns / 2..].iter_mut().for_each(|x| *x *= 1e-3);
            same_bytes(&gpu, &x, rows, dtype, &format!("{rows} × {columns}"));
        }
        same_bytes(&gpu, &[0.0; 256], 16, dtype, "zeros");
        let mut x = random(4096, 5);
        (x[7], x[90], x[1000]) = (f32::INFINITY, f32::NAN, f32::NEG_INFINITY);
        same_bytes(&gpu, &x, 64, dtype, "numbers that are not finite");
    }
}

/// All bf16 numbers up to 16 largest magnitudes, and fp32 numbers halfway between two codes and beside.
#[test]
fn every_bf16_number_and_every_tie_rounds_as_on_the_cpu() {
    let Some(gpu) = any_gpu() else { return };
    let numbers: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16)).collect();
    for power in (-120..=120).step_by(16) {
        let largest = 2_f32.powi(power);
        let below = |&x: &f32| if x.abs() <= largest { x } else { 0.0 };
        let x: Vec<f32> = numbers.iter().map(below).collect();
        same_bytes(&gpu, &x, 256, DType::BF16, &format!("up to 2^{power}"));
    }
    for format in FORMATS {
        let codes = (0..=u8::MAX).map(|code| format.decode(code)).filter(|x| x.is_finite());
        let mut x: Vec<f32> = Vec::new();
        for a in codes {
            let b = format.decode(format.encode(a) + 1);
            let tie = if b.is_finite() { 0.5 * (a + b) } else { a };
            x.extend([a, tie, f32::from_bits(tie.to_bits() + 1), f32::from_bits(tie.to_bits().max(1) - 1)]);
        }
        // The largest number of the format makes the scale 1.
        x.push(format.largest());
        x.resize(x.len().next_multiple_of(256), 0.0);
        same_bytes(&gpu, &x, 16, DType::F32, "ties");
    }
}

/// GELU differs by some units in the last place of fp32, so some numbers round to the next code.
#[test]
fn an_activation_becomes_codes_as_on_the_cpu() {
    let Some(gpu) = any_gpu() else { return };
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let (rows, columns) = (144, 272);
    let pre: Vec<f32> = random(rows * columns, 8).iter().map(|x| 3.0 * x).collect();
    for dtype in COMPUTE {
        let [expected, found] = [&cpu as &dyn Backend, &gpu].map(|device| {
            let backend = TestBackend { device, dtype };
            let x = backend.numbers(&pre, dtype);
            let matrix = Matrix::new(&backend, &x, rows, Float8::E4M3);
            matrix.cast_of(&backend, Float8Source::Gelu(x.view()), rows);
            matrix.bytes(&backend)
        });
        let others = expected.iter().zip(&found).filter(|(a, b)| a != b);
        let far = others.clone().filter(|(a, b)| a.abs_diff(**b) > 1).count();
        assert_eq!(far, 0, "{dtype:?}: codes that are not neighbours");
        assert!(
            others.count() * 1000 < expected.len(),
            "{dtype:?}: more than one code in a thousand differs"
        );
    }
}

/// The results of the three products of a layer in 8 bits: the output, with a bias and GELU and with a residual, the
/// gradient of the input, through GELU or not, and the gradient of the weight, overwritten and accumulated.
fn products(backend: &TestBackend, [rows, inputs, outputs]: [usize; 3], gradients: DType) -> Vec<Buffer> {
    let dy = random(rows * outputs, 3).iter().map(|x| x * 1e-3).collect::<Vec<_>>();
    let dy = backend.numbers(&dy, backend.dtype);
    let x = Matrix::new(backend, &backend.input(rows * inputs, 1), rows, Float8::E4M3);
    let weight = Matrix::new(backend, &backend.input(outputs * inputs, 2), outputs, Float8::E4M3);
    let dy = Matrix::new(backend, &dy, rows, Float8::E5M2);
    let bias = backend.input(outputs, 4);
    let (stream, before) = (backend.input(rows * outputs, 5), backend.input(rows * inputs, 6));
    let [plain, active, kept, end] = [(); 4].map(|()| backend.output(rows * outputs));
    let linear = Linear {
        x: x.codes.view(),
        weight: weight.codes.view(),
        bias: None,
        gelu: None,
        residual: None,
        out: plain.view(),
        rows,
        inputs,
        outputs,
        float8: Some(Float8Factors { left: x.scale(), right: weight.scale() }),
    };
    backend.device.linear(linear);
    let bias = Some(bias.view());
    backend.device.linear(Linear { bias, gelu: Some(kept.view()), out: active.view(), ..linear });
    backend.device.linear(Linear { bias, residual: Some(stream.view()), out: end.view(), ..linear });
    let [dx, dpast] = [(); 2].map(|()| backend.output(rows * inputs));
    let dbias = backend.blank(inputs, gradients);
    let input = LinearBackwardInput {
        dy: dy.codes.view(),
        weight: weight.transposed.view(),
        gelu: None,
        dx: dx.view(),
        dbias: None,
        rows,
        inputs,
        outputs,
        float8: Some(Float8Factors { left: dy.scale(), right: weight.scale() }),
    };
    backend.device.linear_backward_input(input);
    backend.device.linear_backward_input(LinearBackwardInput {
        gelu: Some(before.view()),
        dx: dpast.view(),
        dbias: Some(gradient(&dbias, false)),
        ..input
    });
    let [fresh, added] = [(); 2].map(|()| backend.numbers(&vec![0.125; outputs * inputs], gradients));
    for (dweight, accumulate) in [(&fresh, false), (&added, true)] {
        backend.device.linear_backward_weight(LinearBackwardWeight {
            dy: dy.transposed.view(),
            x: x.transposed.view(),
            dweight: gradient(dweight, accumulate),
            dbias: None,
            rows,
            inputs,
            outputs,
            float8: Some(Float8Factors { left: dy.scale(), right: x.scale() }),
        });
    }
    vec![plain, active, kept, end, dx, dpast, dbias, fresh, added]
}

/// The relative error, over a whole matrix, of sums of `terms` products that are moved to fp32 after every 128.
///
/// Hopper's tensor cores add 32 products at a time to the sum so far. They cut all of these to 13 bits behind the leading
/// bit of the largest, so each of at most four steps loses up to 2^-13 of the sum that it makes. With random signs, the
/// sum after j steps is √j times as large as that after one, and losses add as their squares. So of n steps, with a sum
/// √n times as large, 2^-13 · √((1 + … + n) / n) is lost. More groups of 128 add as many losses as they add to the sum.
///
/// Sums that stay in the tensor cores have n = terms / 32 and lose more with every step: at 4096 terms 1.1e-3, by this
/// arithmetic computed for these numbers, where moved sums lose 1.0e-4.
fn bound_of_moved_sums(terms: usize) -> f64 {
    let steps = terms.div_ceil(32).min(4) as f64;
    2_f64.powi(-13) * f64::midpoint(1.0, steps).sqrt()
}

/// Outputs and gradients of inputs are rounded to bf16, and so are bf16 gradients of weights. fp32 gradients of weights
/// are sums over the rows as they are.
#[test]
fn products_in_8_bits_agree_with_the_cpu() {
    for gpu in [gpu(), tuning_gpu()] {
        let Some(gpu) = gpu else { return };
        let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
        for shape in [[16, 16, 16], [48, 80, 112], [304, 256, 144], [512, 1024, 768], [4096, 64, 48]] {
            for gradients in [DType::F32, DType::BF16] {
                let run = |device: &dyn Backend| -> Vec<Vec<f32>> {
                    let results = products(&TestBackend { device, dtype: DType::BF16 }, shape, gradients);
                    results.iter().map(|buffer| device.read(buffer.view())).collect()
                };
                let (expected, found) = (run(&cpu), run(&gpu));
                for (i, (expected, found)) in expected.iter().zip(&found).enumerate() {
                    let error = distance(found, expected);
                    let sums = i >= 7 && gradients == DType::F32;
                    let tolerance = if sums { bound_of_moved_sums(shape[0]) } else { 1e-2 };
                    println!("{shape:?}, gradients {gradients:?}, result {i}: relative error {error:.1e}");
                    assert!(error <= tolerance, "{shape:?}, gradients {gradients:?}, result {i}: {error}");
                }
            }
        }
    }
}

/// Seconds of a call, from many of them.
fn seconds(gpu: &GpuBackend, body: impl Fn()) -> f64 {
    const TURNS: usize = 200;
    (0..5).for_each(|_| body());
    gpu.synchronize();
    let begin = std::time::Instant::now();
    (0..TURNS).for_each(|_| body());
    gpu.synchronize();
    begin.elapsed().as_secs_f64() / TURNS as f64
}

#[test]
#[ignore = "prints rates, on a GPU that does nothing else"]
fn rates_of_products_in_8_bits() {
    if !CUDA.is_here() {
        return;
    }
    let gpu = CUDA.backend(0, 16 << 30, false).expect("a backend on the GPU").without_tuning_cache();
    let backend = TestBackend { device: &gpu, dtype: DType::BF16 };
    let filled = |len: usize| {
        let (buffer, block) = (gpu.allocate(len, DType::BF16, Category::Activations), 1 << 20);
        gpu.upload(&random(block, 1), buffer.slice(0..block));
        (block..len).step_by(block).for_each(|at| {
            let count = block.min(len - at);
            gpu.copy(buffer.slice(0..count), buffer.slice(at..at + count));
        });
        buffer
    };
    for [rows, inputs, outputs] in
        [[24576, 2048, 6144], [24576, 2048, 2048], [24576, 2048, 8192], [24576, 8192, 2048]]
    {
        let [x, weight, dy] = [rows * inputs, outputs * inputs, rows * outputs].map(filled);
        let x8 = Matrix::new(&backend, &x, rows, Float8::E4M3);
        let weight8 = Matrix::new(&backend, &weight, outputs, Float8::E4M3);
        let dy8 = Matrix::new(&backend, &dy, rows, Float8::E5M2);
        let cast = seconds(&gpu, || x8.cast(&backend, &x, rows));
        let [out, dx] = [rows * outputs, rows * inputs]
            .map(|len| backend.device.allocate(len, DType::BF16, Category::Activations));
        let dweight = backend.device.allocate(outputs * inputs, DType::F32, Category::Activations);
        for eight in [false, true] {
            let pick = |numbers, codes| if eight { codes } else { numbers };
            let float8 = |left, right| if eight { Some(Float8Factors { left, right }) } else { None };
            let forward = seconds(&gpu, || {
                gpu.linear(Linear {
                    x: pick(x.view(), x8.codes.view()),
                    weight: pick(weight.view(), weight8.codes.view()),
                    bias: None,
                    gelu: None,
                    residual: None,
                    out: out.view(),
                    rows,
                    inputs,
                    outputs,
                    float8: float8(x8.scale(), weight8.scale()),
                });
            });
            let input = seconds(&gpu, || {
                gpu.linear_backward_input(LinearBackwardInput {
                    dy: pick(dy.view(), dy8.codes.view()),
                    weight: pick(weight.view(), weight8.transposed.view()),
                    gelu: None,
                    dx: dx.view(),
                    dbias: None,
                    rows,
                    inputs,
                    outputs,
                    float8: float8(dy8.scale(), weight8.scale()),
                });
            });
            let gradient_of_weight = |accumulate| {
                gpu.linear_backward_weight(LinearBackwardWeight {
                    dy: pick(dy.view(), dy8.transposed.view()),
                    x: pick(x.view(), x8.transposed.view()),
                    dweight: gradient(&dweight, accumulate),
                    dbias: None,
                    rows,
                    inputs,
                    outputs,
                    float8: float8(dy8.scale(), x8.scale()),
                });
            };
            let weight = seconds(&gpu, || gradient_of_weight(false));
            let added = seconds(&gpu, || gradient_of_weight(true));
            let rate = |seconds: f64| (2 * rows * inputs * outputs) as f64 / seconds / 1e12;
            println!(
                "{rows} × {inputs} × {outputs}, {}: forward {:.0}, input {:.0}, weight {:.0}, added {:.0} TFLOP/s",
                if eight { "fp8" } else { "bf16" },
                rate(forward),
                rate(input),
                rate(weight),
                rate(added),
            );
        }
        let bytes = (6 * rows * inputs) as f64;
        println!(
            "cast of {rows} × {inputs} in both orientations: {:.2} ms, {:.0} GB/s",
            1e3 * cast,
            bytes / cast / 1e9
        );
    }
}

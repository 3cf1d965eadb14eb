//! All tuning candidates of a product give the same result. Without a GPU the test says so and passes.

use super::Key;
use super::product::{EpilogueAddresses, Product};
use crate::{CUDA, GpuBackend};
use kintsugi_tensor::ops::{Gradient, Linear, LinearBackwardInput};
use kintsugi_tensor::{Backend, Buffer, Category, DType};
use kintsugi_testing::{Need, skip};

const MEMORY: u64 = 256 << 20;
/// Rows, inputs, outputs.
const SMALL: [usize; 3] = [300, 88, 136];
/// With a long sum over outputs, our kernel for GELU's derivative finishes its tiles differently.
const LONG: [usize; 3] = [300, 136, 1416];
/// Each block of our kernels gets several tiles, on GPUs with up to 140 multiprocessors; four for the derivative.
const LARGE: [usize; 3] = [3072, 2312, 1416];

/// Random numbers with mean 1/8. With mean 0, sums over many rows would consist of rounding errors.
fn numbers(backend: &GpuBackend, len: usize, dtype: DType) -> Buffer {
    let values: Vec<f32> = (0..len).map(|i| ((i * 7919 % 257) as f32 - 112.0) / 128.0).collect();
    let buffer = backend.allocate(len, dtype, Category::Activations);
    backend.upload(&values, buffer.view());
    buffer
}

/// Products with all variants: with a bias and GELU, with a bias and a residual, and with GELU's derivative.
fn products(backend: &GpuBackend, dtype: DType, [rows, inputs, outputs]: [usize; 3]) -> [Vec<f32>; 5] {
    let buffer = |len| numbers(backend, len, dtype);
    let (x, weight, bias) = (buffer(rows * inputs), buffer(outputs * inputs), buffer(outputs));
    let (dy, stream) = (buffer(rows * outputs), buffer(rows * outputs));
    let [pre_activation, active, end] = [(); 3].map(|()| buffer(rows * outputs));
    let (dx, dbias) = (buffer(rows * inputs), numbers(backend, inputs, DType::F32));
    let linear = Linear {
        x: x.view(),
        weight: weight.view(),
        bias: Some(bias.view()),
        gelu: Some(pre_activation.view()),
        residual: None,
        out: active.view(),
        rows,
        inputs,
        outputs,
        float8: None,
    };
    backend.linear(linear);
    backend.linear(Linear { gelu: None, residual: Some(stream.view()), out: end.view(), ..linear });
    backend.linear_backward_input(LinearBackwardInput {
        dy: dy.view(),
        weight: weight.view(),
        gelu: Some(x.view()),
        dx: dx.view(),
        dbias: Some(Gradient { view: dbias.view(), accumulate: false }),
        rows,
        inputs,
        outputs,
        float8: None,
    });
    [&pre_activation, &active, &end, &dx, &dbias].map(|buffer| backend.read(buffer.view()))
}

#[test]
fn all_candidates_of_a_product_give_its_result() {
    if !CUDA.is_here() {
        skip(Need::Gpu, "the driver shows no device");
        return;
    }
    for shape in [SMALL, LONG] {
        all_candidates(DType::F32, shape, 1e-5);
    }
    for shape in [SMALL, LONG, LARGE] {
        all_candidates(DType::BF16, shape, 1e-2);
    }
}

fn all_candidates(dtype: DType, shape: [usize; 3], tolerance: f32) {
    let backend = CUDA.backend(0, MEMORY, false).expect("a backend on the GPU").without_tuning_cache();
    let expected = products(&backend, dtype, shape);
    let prepared = &backend.products.prepared;
    let known: Vec<Vec<Key>> = prepared.borrow().products.keys().cloned().collect();
    assert_eq!(known.len(), 3, "a kind for each product");
    for keys in known {
        for choice in candidates(&backend, &keys) {
            prepared.borrow_mut().products.get_mut(&keys).expect("it is known").candidates = vec![choice];
            for (i, (found, expected)) in products(&backend, dtype, shape).iter().zip(&expected).enumerate() {
                let error = distance(found, expected);
                assert!(error <= tolerance, "{}, {choice:?}, result {i}: {error}", keys[0]);
            }
        }
    }
}

/// The candidates that tuning chose from.
fn candidates(backend: &GpuBackend, keys: &[Key]) -> Vec<super::Choice> {
    let products = &backend.products;
    // The address only needs to be aligned: it is used to query the candidates.
    let address = products.workspace.address;
    let variants: Vec<(Key, EpilogueAddresses)> = keys
        .iter()
        .map(|&key| (key, EpilogueAddresses { bias: address, pre_activation: address, scales: [0; 2] }))
        .collect();
    let product = Product::new(&*products.library, &variants, products.workspace.bytes, None, true);
    let candidates = product.expect("it can be description").expect("it was run").candidates;
    assert!(candidates.len() > 1, "{} has no choice", keys[0]);
    candidates
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

//! What tuning chooses among, on a card: whatever wins, the result is the same. Where there is no card the test says so and
//! passes.

use super::Key;
use super::product::{Extras, Product};
use crate::cuda::{CudaBackend, libraries};
use crate::ops::{Gradient, Linear, LinearBackwardInput};
use crate::{Backend, Buffer, Category, DType};
use kintsugi_testing::{Need, skip};

const MEMORY: u64 = 256 << 20;
/// Rows, inputs, outputs.
const SMALL: [usize; 3] = [300, 88, 136];
/// Our kernel for GELU's derivative ends its tiles in another way where sums over outputs are long.
const LONG: [usize; 3] = [300, 136, 1416];
/// Blocks of our kernels have several tiles each, on cards of up to 140 multiprocessors: four of the derivative's.
const LARGE: [usize; 3] = [3072, 2312, 1416];

/// Their mean is 1/8: sums over many rows would otherwise be of what rounding leaves.
fn numbers(backend: &CudaBackend, len: usize, dtype: DType) -> Buffer {
    let values: Vec<f32> = (0..len).map(|i| ((i * 7919 % 257) as f32 - 112.0) / 128.0).collect();
    let buffer = backend.allocate(len, dtype, Category::Activations);
    backend.upload(&values, buffer.view());
    buffer
}

/// Products of all ways: with a bias and GELU, with a bias and the stream, and with GELU's derivative.
fn products(backend: &CudaBackend, dtype: DType, [rows, inputs, outputs]: [usize; 3]) -> [Vec<f32>; 5] {
    let buffer = |len| numbers(backend, len, dtype);
    let (x, weight, bias) = (buffer(rows * inputs), buffer(outputs * inputs), buffer(outputs));
    let (dy, stream) = (buffer(rows * outputs), buffer(rows * outputs));
    let [kept, active, end] = [(); 3].map(|()| buffer(rows * outputs));
    let (dx, dbias) = (buffer(rows * inputs), numbers(backend, inputs, DType::F32));
    let linear = Linear {
        x: x.view(),
        weight: weight.view(),
        bias: Some(bias.view()),
        gelu: Some(kept.view()),
        residual: None,
        out: active.view(),
        rows,
        inputs,
        outputs,
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
    });
    [&kept, &active, &end, &dx, &dbias].map(|buffer| backend.read(buffer.view()))
}

#[test]
fn all_candidates_of_a_product_give_its_result() {
    if !matches!(libraries::devices(), Ok(1..)) {
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
    let backend = CudaBackend::new(0, MEMORY, false).expect("a backend on the card").without_kept_products();
    let expected = products(&backend, dtype, shape);
    let state = &backend.products.state;
    let known: Vec<Vec<Key>> = state.borrow().products.keys().cloned().collect();
    assert_eq!(known.len(), 3, "a kind for each product");
    for keys in known {
        for chosen in candidates(&backend, &keys) {
            state.borrow_mut().products.get_mut(&keys).expect("it is known").candidates = vec![chosen];
            for (i, (found, expected)) in products(&backend, dtype, shape).iter().zip(&expected).enumerate() {
                let error = distance(found, expected);
                assert!(error <= tolerance, "{}, {chosen:?}, result {i}: {error}", keys[0]);
            }
        }
    }
}

/// What there was to choose from.
fn candidates(backend: &CudaBackend, keys: &[Key]) -> Vec<super::Chosen> {
    let products = &backend.products;
    // Any memory that is aligned: it is only asked what there is.
    let address = products.workspace.address;
    let ways: Vec<(Key, Extras)> =
        keys.iter().map(|&key| (key, Extras { bias: address, kept: address })).collect();
    let product = Product::new(&products.handle, &ways, products.workspace.bytes, None, true);
    let candidates = product.expect("it can be described").expect("it was run").candidates;
    assert!(candidates.len() > 1, "{} has no choice", keys[0]);
    candidates
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

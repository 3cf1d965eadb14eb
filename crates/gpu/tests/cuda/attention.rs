//! Attention: our kernels for Hopper, cuDNN's, and our portable ones.

use kintsugi_conformance::attention::{attention, attention_of_slices, shape};
use kintsugi_conformance::{COMPUTE, TestBackend, distance, random, tolerance};
use kintsugi_gpu::GpuBackend;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, Slices};
use kintsugi_tensor::{Backend, DType};

use crate::test_backend::{agree, any_gpu, close, gpu, tuning_gpu};

/// Batch, sequence, heads, key and value heads, head size.
const SHAPES: [[usize; 5]; 8] = [
    [2, 128, 4, 4, 64],
    [1, 256, 4, 2, 64],
    [2, 256, 3, 3, 88],
    [1, 256, 8, 2, 128],
    [1, 1024, 2, 2, 64],
    [1, 1024, 2, 1, 128],
    [2, 70, 4, 2, 16],
    [1, 1, 1, 1, 8],
];

/// Lengths with partial tiles, grouped heads, head sizes of every kind of tile, and one that the tensor cores do not
/// support.
const ODD_SHAPES: [[usize; 5]; 6] = [
    [2, 129, 4, 2, 64],
    [1, 333, 3, 3, 88],
    [1, 600, 4, 1, 128],
    [2, 77, 4, 1, 80],
    [3, 33, 2, 1, 24],
    [1, 65, 2, 1, 136],
];

#[test]
fn attention_saves_log_sums() {
    let Some(gpu) = gpu() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES.map(shape) {
            agree(&gpu, dtype, &format!("{shape:?}"), |backend| attention(backend, shape, false, &[]));
        }
    }
}

#[test]
fn attention_saves_probabilities() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::F32, DType::BF16] {
        for shape in SHAPES.map(shape) {
            agree(&gpu, dtype, &format!("plain {shape:?}"), |backend| attention(backend, shape, true, &[]));
        }
    }
}

#[test]
fn attention_within_documents() {
    let Some(gpu) = gpu() else { return };
    for dtype in COMPUTE {
        for (shapes, plain) in [(&SHAPES[..], false), (&ODD_SHAPES, false), (&SHAPES, true)] {
            for shape in shapes.iter().map(|&sizes| shape(sizes)) {
                for documents in [&[3, 1][..], &[40, 1, 100], &[64, 200]] {
                    let what = format!("documents of {documents:?} in {shape:?}, plain {plain}");
                    agree(&gpu, dtype, &what, |backend| attention(backend, shape, plain, documents));
                }
            }
        }
    }
}

#[test]
fn attention_of_a_parts_slices() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in [DType::F32, DType::BF16] {
        for (sizes, parts) in [([2, 12, 2, 1, 8], 2), ([1, 68, 2, 2, 16], 3)] {
            let slices = Slices { parts, part: 1 };
            let what = format!("{sizes:?} of {slices:?}");
            agree(&gpu, dtype, &what, |backend| attention_of_slices(backend, shape(sizes), slices));
        }
    }
}

#[test]
fn attention_of_long_slices() {
    let Some(gpu) = gpu() else { return };
    for dtype in COMPUTE {
        for (sizes, parts, part) in [([2, 512, 8, 2, 64], 2, 0), ([1, 300, 4, 4, 128], 4, 3)] {
            let slices = Slices { parts, part };
            let what = format!("{sizes:?} of {slices:?}");
            agree(&gpu, dtype, &what, |backend| attention_of_slices(backend, shape(sizes), slices));
        }
    }
}

/// The backward for heads of 128 in f32 has smaller tiles where a block has 64 KiB of shared memory.
#[test]
fn attention_of_small_shapes() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for shape in [[2, 70, 4, 2, 16], [1, 1, 1, 1, 8], [1, 40, 2, 1, 128]].map(shape) {
            for (plain, documents) in [(false, &[][..]), (true, &[]), (false, &[3, 20])] {
                agree(&gpu, dtype, &format!("{shape:?}, plain {plain}, {documents:?}"), |backend| {
                    attention(backend, shape, plain, documents)
                });
            }
        }
    }
}

/// On the tensor cores for 16-bit types, without them for f32.
#[test]
fn portable_attention() {
    let Some(gpu) = gpu() else { return };
    let gpu = gpu.without_cudnn();
    for dtype in COMPUTE {
        for shape in SHAPES.into_iter().chain(ODD_SHAPES).map(shape) {
            agree(&gpu, dtype, &format!("our own {shape:?}"), |backend| {
                attention(backend, shape, false, &[])
            });
        }
    }
}

/// On Hopper our kernels run; elsewhere cuDNN's or our portable ones, which must agree as well. Sums are taken in any
/// order.
#[test]
fn attention_in_any_order() {
    let Some(gpu) = tuning_gpu() else { return };
    // Head sizes of every tile width, exact or padded, aligned to 32 bytes or not. The last two have more blocks of
    // queries than a GPU has multiprocessors.
    let more = [
        [3, 384, 4, 2, 64],
        [1, 512, 2, 2, 80],
        [2, 256, 4, 1, 96],
        [1, 256, 3, 3, 40],
        [2, 128, 2, 1, 8],
        [2, 256, 5, 1, 72],
        [1, 384, 3, 1, 120],
        [1, 128, 1, 1, 56],
        [12, 384, 12, 12, 128],
        [7, 640, 6, 2, 88],
    ];
    let shapes = SHAPES.into_iter().chain(more).map(shape);
    for shape in shapes.filter(|shape| shape.sequence.is_multiple_of(128)) {
        let what = format!("in any order {shape:?}");
        close(&gpu, DType::BF16, &what, 3, |backend| attention(backend, shape, false, &[]));
    }
}

/// So many heads that the memory for their sums is reused several times; the last band of heads is whole or partial.
/// One shape has heads with more blocks than a GPU has multiprocessors.
const LARGE_SHAPES: [[usize; 5]; 5] = [
    [24, 1024, 8, 4, 64],
    [80, 1024, 3, 3, 40],
    [1, 17_024, 7, 7, 8],
    [5, 2048, 11, 11, 88],
    [10, 2048, 8, 4, 128],
];

/// Our kernels for Hopper against our portable ones.
#[test]
fn hopper_attention_equals_portable_attention_at_large_sizes() {
    let (Some(gpu), Some(portable)) = (tuning_gpu(), tuning_gpu()) else { return };
    let portable = portable.without_cudnn().without_hopper_attention();
    for shape in LARGE_SHAPES.map(shape) {
        let results = |backend: &GpuBackend| -> Vec<Vec<f32>> {
            let results = attention(&TestBackend { device: backend, dtype: DType::BF16 }, shape, false, &[]);
            results.iter().map(|result| backend.read(result.view())).collect()
        };
        let expected = results(&portable);
        for time in 0..3 {
            for (i, (ours, expected)) in results(&gpu).iter().zip(&expected).enumerate() {
                let error = distance(ours, expected);
                assert!(error <= tolerance(DType::BF16), "{shape:?}, time {time}, result {i}: error {error}");
            }
        }
    }
}

/// Only the gradients of queries are summed in any order. If other bits change, there is a race.
#[test]
fn all_but_the_gradients_of_queries_have_the_same_bits() {
    let Some(gpu) = tuning_gpu() else { return };
    for shape in LARGE_SHAPES.map(shape) {
        let backend = TestBackend { device: &gpu, dtype: DType::BF16 };
        let bits = || -> Vec<u32> {
            let results = attention(&backend, shape, false, &[]);
            let [out, log_sums, dqkv] = [0, 1, 2].map(|i| backend.device.read(results[i].view()));
            let rows = dqkv.chunks(shape.qkv_width());
            let keys_and_values = rows.flat_map(|row| &row[shape.heads * shape.head_dim..]);
            out.iter().chain(&log_sums).chain(keys_and_values).map(|x| x.to_bits()).collect()
        };
        let first = bits();
        for time in 1..10 {
            assert!(bits() == first, "other bits the {time}. time in {shape:?}");
        }
    }
}

#[test]
fn heads_that_begin_anywhere() {
    let Some(gpu) = gpu() else { return };
    let (gpu, shape) = (gpu.without_cudnn(), shape([1, 70, 2, 1, 64]));
    let (width, out_width) = (shape.rows() * shape.qkv_width(), shape.rows() * shape.heads * shape.head_dim);
    for dtype in COMPUTE {
        agree(&gpu, dtype, "attention from the second element on", |backend| {
            let (qkv, dout) = (backend.numbers(&random(width + 1, 1), dtype), backend.input(out_width, 2));
            let [out, dqkv] = [out_width, width].map(|len| backend.output(len));
            let (sums, qkv) = (backend.sums(shape.rows() * shape.heads), qkv.slice(1..width + 1));
            let saved = AttentionSaved::LogSumExp(sums.view());
            backend.device.attention(Attention { qkv, starts: None, out: out.view(), saved, shape });
            backend.device.attention_backward(AttentionBackward {
                qkv,
                starts: None,
                out: out.view(),
                dout: dout.view(),
                saved,
                dqkv: dqkv.view(),
                dbias: None,
                shape,
            });
            vec![out, sums, dqkv]
        });
    }
}

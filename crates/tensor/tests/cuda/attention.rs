//! Attention: by kernels of ours for Hopper, by cuDNN, and by our own kernels for everything.

use kintsugi_tensor::cuda::CudaBackend;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape, Gradient};
use kintsugi_tensor::{Backend, Buffer, DType};

use crate::lab::{COMPUTE, Lab, agree, card, close, distance, random, tolerance, tuning_card};

/// Documents of these lengths, again and again, if any, do not see each other. Of batches of two the bias's gradient is added
/// to what is there.
fn attention(lab: &Lab, shape: AttentionShape, plain: bool, documents: &[usize]) -> Vec<Buffer> {
    let out_len = shape.rows() * shape.heads * shape.head_dim;
    let (qkv, dout) = (lab.input(shape.rows() * shape.qkv_width(), 1), lab.input(out_len, 2));
    let (out, dqkv, dbias) = (lab.output(out_len), lab.output(qkv.len()), lab.sums(shape.qkv_width()));
    let kept = if plain { lab.output(shape.scores()) } else { lab.sums(shape.rows() * shape.heads) };
    let saved = if plain {
        AttentionSaved::Probabilities(kept.view())
    } else {
        AttentionSaved::LogSumExp(kept.view())
    };
    let starts = (!documents.is_empty()).then(|| lab.tokens(&starts(shape, documents)));
    let starts = starts.as_ref().map(Buffer::view);
    lab.backend.attention(Attention { qkv: qkv.view(), starts, out: out.view(), saved, shape });
    lab.backend.attention_backward(AttentionBackward {
        qkv: qkv.view(),
        starts,
        out: out.view(),
        dout: dout.view(),
        saved,
        dqkv: dqkv.view(),
        dbias: Some(Gradient { view: dbias.view(), accumulate: shape.batch == 2 }),
        shape,
    });
    vec![out, kept, dqkv, dbias]
}

/// Where each token's document begins in its sample: end to end through all samples.
fn starts(shape: AttentionShape, lengths: &[usize]) -> Vec<u32> {
    let lengths: Vec<usize> = lengths.iter().copied().cycle().take(shape.rows()).collect();
    let firsts = lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length)));
    let documents: Vec<usize> =
        firsts.zip(&lengths).flat_map(|(first, &length)| vec![first; length]).collect();
    let start = |row: usize| documents[row].saturating_sub(row - row % shape.sequence) as u32;
    (0..shape.rows()).map(start).collect()
}

pub fn shape([batch, sequence, heads, kv_heads, head_dim]: [usize; 5]) -> AttentionShape {
    AttentionShape { batch, sequence, heads, kv_heads, head_dim }
}

/// Batch, sequence, heads, key and value heads, width of a head.
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

/// Lengths that fill no tile, groups, heads of every kind of tile, and one that the tensor cores are not used for.
const ODD_SHAPES: [[usize; 5]; 6] = [
    [2, 129, 4, 2, 64],
    [1, 333, 3, 3, 88],
    [1, 600, 4, 1, 128],
    [2, 77, 4, 1, 80],
    [3, 33, 2, 1, 24],
    [1, 65, 2, 1, 136],
];

#[test]
fn attention_keeps_log_sums() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES.map(shape) {
            agree(&card, dtype, &format!("{shape:?}"), |lab| attention(lab, shape, false, &[]));
        }
    }
}

#[test]
fn attention_keeps_probabilities() {
    let Some(card) = card() else { return };
    for dtype in [DType::F32, DType::BF16] {
        for shape in SHAPES.map(shape) {
            agree(&card, dtype, &format!("plain {shape:?}"), |lab| attention(lab, shape, true, &[]));
        }
    }
}

#[test]
fn attention_within_documents() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for (shapes, plain) in [(&SHAPES[..], false), (&ODD_SHAPES, false), (&SHAPES, true)] {
            for shape in shapes.iter().map(|&sizes| shape(sizes)) {
                for documents in [&[3, 1][..], &[40, 1, 100], &[64, 200]] {
                    let what = format!("documents of {documents:?} in {shape:?}, plain {plain}");
                    agree(&card, dtype, &what, |lab| attention(lab, shape, plain, documents));
                }
            }
        }
    }
}

/// In sixteen bits on the tensor cores, in f32 without them.
#[test]
fn our_own_attention() {
    let Some(card) = card() else { return };
    let card = card.without_cudnn();
    for dtype in COMPUTE {
        for shape in SHAPES.into_iter().chain(ODD_SHAPES).map(shape) {
            agree(&card, dtype, &format!("our own {shape:?}"), |lab| attention(lab, shape, false, &[]));
        }
    }
}

/// On Hopper kernels of ours; elsewhere cuDNN's or ours, which must agree as well. Sums are taken in any order.
#[test]
fn attention_in_any_order() {
    let Some(card) = tuning_card() else { return };
    // Heads of every width of tile, filled or not, that begin at multiples of 32 bytes or between them; the last two have
    // more blocks of queries than a card has multiprocessors.
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
        close(&card, DType::BF16, &what, 3, |lab| attention(lab, shape, false, &[]));
    }
}

/// With so many heads that the room for their sums is used again and again; the last group of heads is whole or not.
/// One has heads with more blocks than a card has multiprocessors.
const LARGE_SHAPES: [[usize; 5]; 5] = [
    [24, 1024, 8, 4, 64],
    [80, 1024, 3, 3, 40],
    [1, 17_024, 7, 7, 8],
    [5, 2048, 11, 11, 88],
    [10, 2048, 8, 4, 128],
];

/// Kernels of ours for Hopper beside those for every card.
#[test]
fn large_attention_as_on_every_card() {
    let (Some(card), Some(portable)) = (tuning_card(), tuning_card()) else { return };
    let portable = portable.without_cudnn().without_hopper_attention();
    for shape in LARGE_SHAPES.map(shape) {
        let results = |backend: &CudaBackend| -> Vec<Vec<f32>> {
            let results = attention(&Lab { backend, dtype: DType::BF16 }, shape, false, &[]);
            results.iter().map(|result| backend.read(result.view())).collect()
        };
        let expected = results(&portable);
        for time in 0..3 {
            for (i, (ours, expected)) in results(&card).iter().zip(&expected).enumerate() {
                let error = distance(ours, expected);
                assert!(error <= tolerance(DType::BF16), "{shape:?}, time {time}, result {i}: error {error}");
            }
        }
    }
}

/// Only the queries' gradients are summed in any order: bits of all else that change tell of a race.
#[test]
fn all_but_the_gradients_of_queries_have_the_same_bits() {
    let Some(card) = tuning_card() else { return };
    for shape in LARGE_SHAPES.map(shape) {
        let lab = Lab { backend: &card, dtype: DType::BF16 };
        let bits = || -> Vec<u32> {
            let results = attention(&lab, shape, false, &[]);
            let [out, log_sums, dqkv] = [0, 1, 2].map(|i| lab.backend.read(results[i].view()));
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
    let Some(card) = card() else { return };
    let (card, shape) = (card.without_cudnn(), shape([1, 70, 2, 1, 64]));
    let (width, out_width) = (shape.rows() * shape.qkv_width(), shape.rows() * shape.heads * shape.head_dim);
    for dtype in COMPUTE {
        agree(&card, dtype, "attention from the second element on", |lab| {
            let (qkv, dout) = (lab.numbers(&random(width + 1, 1), dtype), lab.input(out_width, 2));
            let [out, dqkv] = [out_width, width].map(|len| lab.output(len));
            let (sums, qkv) = (lab.sums(shape.rows() * shape.heads), qkv.slice(1..width + 1));
            let saved = AttentionSaved::LogSumExp(sums.view());
            lab.backend.attention(Attention { qkv, starts: None, out: out.view(), saved, shape });
            lab.backend.attention_backward(AttentionBackward {
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

//! Attention of slices against attention of whole samples, in f64: all keys at once, and part by part joined by the log-sum-exp.

use crate::cpu::access::bytes_of;
use crate::cpu::attention;
use crate::cpu::parallel::Threads;
use crate::cpu::testing::{TestBackend, assert_close, first_keys, random};
use crate::ops::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, Columns, Scores, SlicedAttention,
    SlicedAttentionBackward, Slices,
};
use crate::{Backend, Buffer, DType, View};

/// Slices of several tiles with a partial one, and slices of some tokens; grouped heads, and widths that need padding.
const SHAPES: [(AttentionShape, usize); 6] = [
    (
        AttentionShape { batch: 2, sequence: 300, heads: 4, kv_heads: 2, head_dim: 5, scores: Scores::PLAIN },
        2,
    ),
    (
        AttentionShape {
            batch: 1,
            sequence: 408,
            heads: 3,
            kv_heads: 1,
            head_dim: 18,
            scores: Scores::PLAIN,
        },
        3,
    ),
    (AttentionShape { batch: 2, sequence: 16, heads: 2, kv_heads: 2, head_dim: 4, scores: Scores::PLAIN }, 4),
    (AttentionShape { batch: 1, sequence: 33, heads: 2, kv_heads: 2, head_dim: 4, scores: Scores::PLAIN }, 1),
    (AttentionShape { batch: 1, sequence: 204, heads: 3, kv_heads: 1, head_dim: 18, scores: LIMITED }, 3),
    (AttentionShape { batch: 1, sequence: 33, heads: 2, kv_heads: 2, head_dim: 4, scores: LIMITED }, 1),
];
const LIMITED: Scores = Scores { width: Some(7), soft_cap: Some(0.9), window: Some(20) };
const DOCUMENTS: [Option<&[usize]>; 4] = [None, Some(&[3, 1]), Some(&[70, 1, 90]), Some(&[128, 4])];

/// A whole sample's attention: inputs, results and gradients, by rows.
struct Whole {
    shape: AttentionShape,
    parts: usize,
    qkv: Vec<f64>,
    dout: Vec<f64>,
    starts: Option<Vec<u32>>,
    out: Vec<f64>,
    log_sums: Vec<f64>,
    dqkv: Vec<f64>,
}

impl Whole {
    fn new(
        backend: &TestBackend,
        (shape, parts): (AttentionShape, usize),
        documents: Option<&[usize]>,
    ) -> Self {
        let width = shape.heads * shape.head_dim;
        let (qkv, dout) = (random(shape.rows() * shape.qkv_width(), 1), random(shape.rows() * width, 2));
        let starts = first_keys(shape, documents);
        let [qkv_buffer, dout_buffer] = [&qkv, &dout].map(|values| backend.buffer(values, DType::F64));
        let starts_buffer = starts.as_ref().map(|starts| backend.tokens(starts));
        let [out, log_sums, dqkv] =
            [dout.len(), shape.rows() * shape.heads, qkv.len()].map(|len| backend.blank(len, DType::F64));
        let saved = AttentionSaved::LogSumExp(log_sums.view());
        let (qkv_view, starts_view) = (qkv_buffer.view(), starts_buffer.as_ref().map(Buffer::view));
        backend.cpu.attention(Attention {
            qkv: qkv_view,
            starts: starts_view,
            out: out.view(),
            saved,
            shape,
        });
        backend.cpu.attention_backward(AttentionBackward {
            qkv: qkv_view,
            starts: starts_view,
            out: out.view(),
            dout: dout_buffer.view(),
            saved,
            dqkv: dqkv.view(),
            dbias: None,
            shape,
        });
        let [out, log_sums, dqkv] = [out, log_sums, dqkv].map(|buffer| backend.values(buffer.view()));
        Whole { shape, parts, qkv, dout, starts, out, log_sums, dqkv }
    }

    fn own(&self) -> AttentionShape {
        AttentionShape { sequence: self.shape.sequence / self.parts, ..self.shape }
    }

    /// The rows of a part, `[batch, own]`, as rows of the whole.
    fn rows(&self, part: usize) -> Vec<usize> {
        let (own, slices) = (self.own().sequence, Slices { parts: self.parts, part });
        let of_sample = |sample: usize| {
            (0..own).map(move |index| sample * self.shape.sequence + slices.position(own, index))
        };
        (0..self.shape.batch).flat_map(of_sample).collect()
    }

    /// Columns of a part's rows of a matrix.
    fn part(&self, matrix: &[f64], part: usize, columns: std::ops::Range<usize>) -> Vec<f64> {
        let width = matrix.len() / self.shape.rows();
        let row = |row: usize| matrix[row * width..][columns.clone()].iter().copied();
        self.rows(part).into_iter().flat_map(row).collect()
    }

    fn widths(&self) -> [usize; 2] {
        [self.shape.heads, self.shape.qkv_width() / self.shape.head_dim]
            .map(|heads| heads * self.shape.head_dim)
    }

    fn log_sums_of(&self, part: usize) -> Vec<f64> {
        let (heads, sequence, own) = (self.shape.heads, self.shape.sequence, self.own().sequence);
        let slices = Slices { parts: self.parts, part };
        let value = |i: usize| self.log_sums[i / own * sequence + slices.position(own, i % own)];
        (0..self.shape.batch * heads * own).map(value).collect()
    }

    fn keys(&self, part: usize) -> Vec<f64> {
        let [queries, all] = self.widths();
        self.part(&self.qkv, part, queries..all)
    }

    fn starts_of(&self, backend: &TestBackend, part: usize) -> Option<Buffer> {
        let starts = self.starts.as_ref()?;
        Some(backend.tokens(&self.rows(part).into_iter().map(|row| starts[row]).collect::<Vec<_>>()))
    }
}

/// Runs `op` on the keys of parts `first..first + owners`.
fn keys_of(backend: &TestBackend, whole: &Whole, owners: std::ops::Range<usize>) -> Buffer {
    backend.buffer(&owners.flat_map(|part| whole.keys(part)).collect::<Vec<_>>(), DType::F64)
}

fn cases() -> impl Iterator<Item = ((AttentionShape, usize), Option<&'static [usize]>)> {
    SHAPES.into_iter().flat_map(|shape| DOCUMENTS.map(|documents| (shape, documents)))
}

#[test]
fn forward_is_that_of_the_whole_sample() {
    let backend = TestBackend::new(1);
    for (case, documents) in cases() {
        let whole = Whole::new(&backend, case, documents);
        let (shape, [width, all]) = (whole.own(), whole.widths());
        for part in 0..whole.parts {
            let qkv = backend.buffer(&whole.part(&whole.qkv, part, 0..all), DType::F64);
            let (starts, slices) = (whole.starts_of(&backend, part), Slices { parts: whole.parts, part });
            let [out, log_sums] =
                [shape.rows() * width, shape.rows() * shape.heads].map(|len| backend.blank(len, DType::F64));
            let run = |first_owner: usize, owners: usize, before: Option<View>| {
                let keys = keys_of(&backend, &whole, first_owner..first_owner + owners);
                backend.cpu.sliced_attention(SlicedAttention {
                    qkv: qkv.view(),
                    keys: keys.view(),
                    first_owner,
                    owners,
                    starts: starts.as_ref().map(Buffer::view),
                    before,
                    out: out.view(),
                    log_sums: log_sums.view(),
                    shape,
                    slices,
                });
            };
            let check = || {
                assert_close(&backend.values(out.view()), &whole.part(&whole.out, part, 0..width), 1e-12);
                assert_close(&backend.values(log_sums.view()), &whole.log_sums_of(part), 1e-12);
            };
            run(0, whole.parts, None);
            check();
            // One part after the other, beginning with any: also with one whose keys some queries do not see.
            for first in 0..whole.parts {
                for step in 0..whole.parts {
                    run((first + step) % whole.parts, 1, (step > 0).then_some(out.view()));
                }
                check();
            }
        }
    }
}

#[test]
fn backward_is_that_of_the_whole_sample() {
    let backend = TestBackend::new(1);
    for (case, documents) in cases() {
        let whole = Whole::new(&backend, case, documents);
        let (shape, [width, all]) = (whole.own(), whole.widths());
        for (ring, scratch) in
            [(false, attention::SCRATCH_BYTES), (true, attention::SCRATCH_BYTES), (false, 400_000)]
        {
            let key_len = shape.rows() * (all - width);
            let dkeys: Vec<Buffer> =
                (0..whole.parts).map(|_| backend.buffer(&vec![0.0; key_len], DType::F64)).collect();
            let mut sums = vec![vec![0.0; key_len]; whole.parts];
            for part in 0..whole.parts {
                let [qkv, out, dout] = [
                    whole.part(&whole.qkv, part, 0..all),
                    whole.part(&whole.out, part, 0..width),
                    whole.part(&whole.dout, part, 0..width),
                ]
                .map(|values| backend.buffer(&values, DType::F64));
                let log_sums = backend.buffer(&whole.log_sums_of(part), DType::F64);
                let starts = whole.starts_of(&backend, part);
                let dqkv = backend.blank(qkv.len(), DType::F64);
                let run =
                    |first_owner: usize, owners: usize, dkeys: View, add_queries: bool, add_keys: bool| {
                        let keys = keys_of(&backend, &whole, first_owner..first_owner + owners);
                        let op = SlicedAttentionBackward {
                            qkv: qkv.view(),
                            keys: keys.view(),
                            first_owner,
                            owners,
                            starts: starts.as_ref().map(Buffer::view),
                            out: out.view(),
                            dout: dout.view(),
                            log_sums: log_sums.view(),
                            dqueries: Columns { view: dqkv.view(), width: all, first: 0 },
                            add_queries,
                            dkeys,
                            add_keys,
                            shape,
                            slices: Slices { parts: whole.parts, part },
                        };
                        let mut bytes = vec![0.0_f64; scratch / 8];
                        attention::sliced_backward::<f64, f64, f64>(Threads(1), bytes_of(&mut bytes), &op);
                    };
                if ring {
                    for (owner, dkeys) in dkeys.iter().enumerate() {
                        run(owner, 1, dkeys.view(), owner > 0, true);
                    }
                } else {
                    let all_keys = backend.blank(whole.parts * key_len, DType::F64);
                    run(0, whole.parts, all_keys.view(), false, false);
                    let values = backend.values(all_keys.view());
                    for (sum, values) in sums.iter_mut().zip(values.chunks_exact(key_len)) {
                        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                    }
                }
                let values = backend.values(dqkv.view());
                let queries: Vec<f64> =
                    values.chunks_exact(all).flat_map(|row| row[..width].to_vec()).collect();
                assert_close(&queries, &whole.part(&whole.dqkv, part, 0..width), 1e-11);
            }
            for part in 0..whole.parts {
                let sum = if ring { backend.values(dkeys[part].view()) } else { sums[part].clone() };
                assert_close(&sum, &whole.part(&whole.dqkv, part, width..all), 1e-11);
            }
        }
    }
}

/// The output is kept in the accumulator type until the last keys, and rounded once.
#[test]
fn a_sixteen_bit_output_is_rounded_once() {
    let backend = TestBackend::new(1);
    let whole = Whole::new(&backend, SHAPES[0], None);
    let (shape, [width, all], slices) = (whole.own(), whole.widths(), Slices { parts: 2, part: 0 });
    let qkv = backend.buffer(&whole.part(&whole.qkv, 0, 0..all), DType::BF16);
    let run = |keys: &Buffer, first_owner, owners, before: Option<View>, out: View, log_sums: View| {
        let (qkv, keys) = (qkv.view(), keys.view());
        let starts = None;
        backend.cpu.sliced_attention(SlicedAttention {
            qkv,
            keys,
            first_owner,
            owners,
            starts,
            before,
            out,
            log_sums,
            shape,
            slices,
        });
    };
    let keys = |parts: std::ops::Range<usize>| {
        backend.buffer(&parts.flat_map(|part| whole.keys(part)).collect::<Vec<_>>(), DType::BF16)
    };
    let blank = |dtype| backend.blank(shape.rows() * width, dtype);
    let log_sums = backend.blank(shape.rows() * shape.heads, DType::F32);
    let [at_once, partial, joined] = [DType::BF16, DType::F32, DType::BF16].map(blank);
    run(&keys(0..2), 0, 2, None, at_once.view(), log_sums.view());
    run(&keys(1..2), 1, 1, None, partial.view(), log_sums.view());
    run(&keys(0..1), 0, 1, Some(partial.view()), joined.view(), log_sums.view());
    let [at_once, joined] = [at_once, joined].map(|buffer| backend.values(buffer.view()));
    let differing = at_once.iter().zip(&joined).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert!(differing * 50 < at_once.len(), "{differing} of {} are rounded differently", at_once.len());
    assert_close(&joined, &at_once, 1.0 / 128.0);
}

//! Attention against its definition, and its backward against the definition's derivative, in f64. Packed documents
//! against separate documents, in every type.

use crate::cpu::attention;
use crate::cpu::parallel::Threads;
use crate::cpu::testing::{TestBackend, assert_close, assert_gradient, dot, first_keys, random};
use crate::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape, Scores};
use crate::{Backend, Buffer, DType, View};

/// Several tiles with a partial one, grouped heads, and a width that needs padding.
const LONG: AttentionShape =
    AttentionShape { batch: 2, sequence: 150, heads: 4, kv_heads: 2, head_dim: 5, scores: Scores::PLAIN };
const SHORT: AttentionShape =
    AttentionShape { batch: 2, sequence: 7, heads: 3, kv_heads: 1, head_dim: 18, scores: Scores::PLAIN };

/// The same with a window over some tiles and within one, soft caps, and another scale.
const LIMITED_LONG: AttentionShape =
    AttentionShape { scores: Scores { width: None, soft_cap: Some(0.8), window: Some(70) }, ..LONG };
const LIMITED_SHORT: AttentionShape =
    AttentionShape { scores: Scores { width: Some(11), soft_cap: Some(1.5), window: Some(3) }, ..SHORT };

/// Documents within a tile, over several tiles, of one token, and across the end of a sample. `None` is one document.
const DOCUMENTS: [Option<&[usize]>; 4] = [None, Some(&[3, 1]), Some(&[70, 1, 90]), Some(&[128, 4])];

/// Which keys a query attends to: with documents, those of its own document.
type Documents<'a> = Option<&'a [usize]>;

struct Run<'a> {
    backend: &'a TestBackend,
    shape: AttentionShape,
    starts: Option<Buffer>,
    out: Buffer,
    saved: Buffer,
    plain: bool,
}

impl<'a> Run<'a> {
    fn new(
        backend: &'a TestBackend,
        shape: AttentionShape,
        documents: Documents,
        plain: bool,
        qkv: &[f64],
    ) -> Self {
        let starts = first_keys(shape, documents).map(|starts| backend.tokens(&starts));
        let out = backend.blank(shape.rows() * shape.heads * shape.head_dim, DType::F64);
        let saved = backend
            .blank(if plain { shape.score_elements() } else { shape.rows() * shape.heads }, DType::F64);
        let run = Run { backend, shape, starts, out, saved, plain };
        let qkv = backend.buffer(qkv, DType::F64);
        backend.cpu.attention(Attention {
            qkv: qkv.view(),
            starts: run.starts(),
            out: run.out.view(),
            saved: run.saved(),
            shape,
        });
        run
    }

    fn starts(&self) -> Option<View<'_>> {
        self.starts.as_ref().map(Buffer::view)
    }

    fn saved(&self) -> AttentionSaved<'_> {
        let view = self.saved.view();
        if self.plain { AttentionSaved::Probabilities(view) } else { AttentionSaved::LogSumExp(view) }
    }

    fn out(&self) -> Vec<f64> {
        self.backend.values(self.out.view())
    }

    /// The gradient of the input, with this many bytes of scratch per thread.
    fn backward(&self, qkv: &[f64], dout: &[f64], scratch_bytes: usize) -> Vec<f64> {
        let [qkv, dout] = [qkv, dout].map(|values| self.backend.buffer(values, DType::F64));
        let dqkv = self.backend.blank(qkv.len(), DType::F64);
        let mut scratch = vec![0.0_f64; scratch_bytes / 8];
        let op = AttentionBackward {
            qkv: qkv.view(),
            starts: self.starts(),
            out: self.out.view(),
            dout: dout.view(),
            saved: self.saved(),
            dqkv: dqkv.view(),
            dbias: None,
            shape: self.shape,
        };
        attention::backward::<f64>(Threads(1), crate::cpu::access::bytes_of(&mut scratch), &op);
        self.backend.values(dqkv.view())
    }
}

fn input(shape: AttentionShape, seed: u64) -> Vec<f64> {
    random(shape.rows() * shape.qkv_width(), seed)
}

/// Output, log-sum-exp and probabilities by the definition.
fn by_definition(shape: AttentionShape, documents: Documents, qkv: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let starts = first_keys(shape, documents);
    let AttentionShape { batch, sequence, heads, kv_heads, head_dim, .. } = shape;
    let vector = |b: usize, t: usize, head: usize| {
        &qkv[(b * sequence + t) * shape.qkv_width() + head * head_dim..][..head_dim]
    };
    let mut out = vec![0.0; shape.rows() * heads * head_dim];
    let (mut log_sums, mut probabilities) = (Vec::new(), vec![0.0; shape.score_elements()]);
    for (b, h, t) in
        (0..batch * heads * sequence).map(|i| (i / sequence / heads, i / sequence % heads, i % sequence))
    {
        let kv = h * kv_heads / heads;
        let width = shape.scores.width.unwrap_or(head_dim) as f64;
        let score = |s| {
            let score = dot(vector(b, t, h), vector(b, s, heads + kv)) / width.sqrt();
            shape.scores.soft_cap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let seen = starts.as_ref().map_or(0, |starts| starts[b * sequence + t] as usize)..=t;
        let sum: f64 = seen.clone().map(|s| f64::exp(score(s))).sum();
        log_sums.push(sum.ln());
        for s in seen {
            let probability = score(s).exp() / sum;
            probabilities[((b * heads + h) * sequence + t) * sequence + s] = probability;
            for (i, value) in vector(b, s, heads + kv_heads + kv).iter().enumerate() {
                out[((b * sequence + t) * heads + h) * head_dim + i] += probability * value;
            }
        }
    }
    (out, log_sums, probabilities)
}

#[test]
fn forward_is_the_definition() {
    let backend = TestBackend::new(1);
    for (shape, documents) in
        [SHORT, LONG, LIMITED_SHORT, LIMITED_LONG].into_iter().flat_map(|shape| DOCUMENTS.map(|d| (shape, d)))
    {
        let qkv = input(shape, 1);
        let (out, log_sums, probabilities) = by_definition(shape, documents, &qkv);
        for (plain, saved) in [(false, log_sums), (true, probabilities)] {
            let run = Run::new(&backend, shape, documents, plain, &qkv);
            assert_close(&run.out(), &out, 1e-12);
            assert_close(&backend.values(run.saved.view()), &saved, 1e-12);
        }
    }
}

/// A shape with and without limits, plain and flash attention, and documents.
fn cases(shapes: [AttentionShape; 2]) -> impl Iterator<Item = (AttentionShape, bool, Documents<'static>)> {
    let kinds = shapes.into_iter().flat_map(|shape| [false, true].map(|plain| (shape, plain)));
    kinds.flat_map(|(shape, plain)| DOCUMENTS.map(|documents| (shape, plain, documents)))
}

#[test]
fn backward_is_the_derivative() {
    let backend = TestBackend::new(1);
    let (qkv, dout) = (input(SHORT, 1), random(SHORT.rows() * SHORT.heads * SHORT.head_dim, 2));
    for (shape, plain, documents) in cases([SHORT, LIMITED_SHORT]) {
        let run = |qkv: &[f64]| Run::new(&backend, shape, documents, plain, qkv);
        let gradient = run(&qkv).backward(&qkv, &dout, attention::SCRATCH_BYTES);
        assert_gradient(&qkv, &gradient, |qkv| dot(&run(qkv).out(), &dout));
    }
}

#[test]
fn backward_is_the_derivative_across_tiles() {
    let backend = TestBackend::new(1);
    let (qkv, dout) = (input(LONG, 1), random(LONG.rows() * LONG.heads * LONG.head_dim, 2));
    for (shape, plain, documents) in cases([LONG, LIMITED_LONG]) {
        let run = |qkv: &[f64]| Run::new(&backend, shape, documents, plain, qkv);
        let gradient = run(&qkv).backward(&qkv, &dout, attention::SCRATCH_BYTES);
        for direction in (3..9).map(|seed| input(LONG, seed)) {
            let along = |by: &[f64]| {
                let moved: Vec<f64> = qkv.iter().zip(&direction).map(|(x, d)| x + by[0] * d).collect();
                dot(&run(&moved).out(), &dout)
            };
            assert_gradient(&[0.0], &[dot(&gradient, &direction)], along);
        }
    }
}

#[test]
fn strips_change_nothing_but_rounding() {
    let backend = TestBackend::new(1);
    let (qkv, dout) = (input(LONG, 1), random(LONG.rows() * LONG.heads * LONG.head_dim, 2));
    for documents in DOCUMENTS {
        let run = Run::new(&backend, LONG, documents, false, &qkv);
        let whole = run.backward(&qkv, &dout, attention::SCRATCH_BYTES);
        let tile = 8 * 64 * 16;
        let tiles = 7 * tile + 2 * 8 * 64 * 64;
        // Scratch for the gradients of one, two and four tiles of queries: one head at a time, then both in two strips.
        for room in [1, 2, 4] {
            assert_close(&run.backward(&qkv, &dout, tiles + room * tile), &whole, 1e-12);
        }
    }
}

/// Output and gradient of one sample in any type, as rows of the sample.
fn pass(
    dtype: DType,
    shape: AttentionShape,
    documents: Documents,
    plain: bool,
    qkv: &[f64],
    dout: &[f64],
) -> [Vec<f64>; 2] {
    let backend = TestBackend::new(1);
    let starts = first_keys(shape, documents).map(|starts| backend.tokens(&starts));
    let starts = starts.as_ref().map(Buffer::view);
    let [qkv, dout] = [qkv, dout].map(|values| backend.buffer(values, dtype));
    let [out, dqkv] = [dout.len(), qkv.len()].map(|len| backend.blank(len, dtype));
    let (sums, scores) = (
        backend.blank(shape.rows() * shape.heads, dtype.accumulator()),
        backend.blank(shape.score_elements(), dtype),
    );
    let saved = if plain {
        AttentionSaved::Probabilities(scores.view())
    } else {
        AttentionSaved::LogSumExp(sums.view())
    };
    let (qkv, out, dout, dqkv) = (qkv.view(), out.view(), dout.view(), dqkv.view());
    backend.cpu.attention(Attention { qkv, starts, out, saved, shape });
    let dbias = None;
    backend.cpu.attention_backward(AttentionBackward { qkv, starts, out, dout, saved, dqkv, dbias, shape });
    [backend.values(out), backend.values(dqkv)]
}

#[test]
fn packed_documents_equal_separate_documents() {
    let whole = AttentionShape { batch: 1, sequence: 231, ..LONG };
    let lengths = [70, 1, 63, 2, 95];
    let [qkv_width, out_width] = [whole.qkv_width(), whole.heads * whole.head_dim];
    let (qkv, dout) = (input(whole, 1), random(whole.rows() * out_width, 2));
    let types = [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::F16, 1e-2), (DType::BF16, 8e-2)];
    for ((dtype, tolerance), plain) in types.into_iter().flat_map(|t| [false, true].map(|plain| (t, plain))) {
        let packed = pass(dtype, whole, Some(&lengths), plain, &qkv, &dout);
        let mut alone = [Vec::new(), Vec::new()];
        let mut first = 0;
        for length in lengths {
            let rows = first..first + length;
            let of = |values: &[f64], width: usize| values[rows.start * width..rows.end * width].to_vec();
            let shape = AttentionShape { sequence: length, ..whole };
            let document = pass(dtype, shape, None, plain, &of(&qkv, qkv_width), &of(&dout, out_width));
            for (all, document) in alone.iter_mut().zip(document) {
                all.extend(document);
            }
            first += length;
        }
        for (packed, alone) in packed.iter().zip(&alone) {
            assert_close(packed, alone, tolerance);
        }
        assert_ne!(packed, pass(dtype, whole, None, plain, &qkv, &dout), "a mask that hides nothing");
    }
}

//! Attention against its definition, and its backward against the definition's derivative, in f64.

use crate::cpu::attention;
use crate::cpu::parallel::Threads;
use crate::cpu::testing::{Lab, assert_close, assert_gradient, dot, random};
use crate::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape};
use crate::{Backend, Buffer, DType};

/// More than one tile with a rest, grouped heads, and a width that needs padding.
const LONG: AttentionShape = AttentionShape { batch: 2, sequence: 150, heads: 4, kv_heads: 2, head_dim: 5 };
const SHORT: AttentionShape = AttentionShape { batch: 2, sequence: 7, heads: 3, kv_heads: 1, head_dim: 18 };

struct Run<'a> {
    lab: &'a Lab,
    shape: AttentionShape,
    out: Buffer,
    saved: Buffer,
    plain: bool,
}

impl<'a> Run<'a> {
    fn new(lab: &'a Lab, shape: AttentionShape, plain: bool, qkv: &[f64]) -> Self {
        let out = lab.blank(shape.rows() * shape.heads * shape.head_dim, DType::F64);
        let saved = lab.blank(if plain { shape.scores() } else { shape.rows() * shape.heads }, DType::F64);
        let run = Run { lab, shape, out, saved, plain };
        let qkv = lab.buffer(qkv, DType::F64);
        lab.backend.attention(Attention { qkv: qkv.view(), out: run.out.view(), saved: run.saved(), shape });
        run
    }

    fn saved(&self) -> AttentionSaved<'_> {
        let view = self.saved.view();
        if self.plain { AttentionSaved::Probabilities(view) } else { AttentionSaved::LogSumExp(view) }
    }

    fn out(&self) -> Vec<f64> {
        self.lab.values(self.out.view())
    }

    /// The gradient of the input, with a thread's scratch of so many bytes.
    fn backward(&self, qkv: &[f64], dout: &[f64], scratch_bytes: usize) -> Vec<f64> {
        let [qkv, dout] = [qkv, dout].map(|values| self.lab.buffer(values, DType::F64));
        let dqkv = self.lab.blank(qkv.len(), DType::F64);
        let mut scratch = vec![0.0_f64; scratch_bytes / 8];
        let op = AttentionBackward {
            qkv: qkv.view(),
            out: self.out.view(),
            dout: dout.view(),
            saved: self.saved(),
            dqkv: dqkv.view(),
            shape: self.shape,
        };
        attention::backward::<f64>(Threads(1), crate::cpu::access::bytes_of(&mut scratch), &op);
        self.lab.values(dqkv.view())
    }
}

fn input(shape: AttentionShape, seed: u64) -> Vec<f64> {
    random(shape.rows() * shape.qkv_width(), seed)
}

/// Output, log-sum-exp and probabilities by the definition.
fn by_definition(shape: AttentionShape, qkv: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let AttentionShape { batch, sequence, heads, kv_heads, head_dim } = shape;
    let vector = |b: usize, t: usize, head: usize| {
        &qkv[(b * sequence + t) * shape.qkv_width() + head * head_dim..][..head_dim]
    };
    let mut out = vec![0.0; shape.rows() * heads * head_dim];
    let (mut log_sums, mut probabilities) = (Vec::new(), vec![0.0; shape.scores()]);
    for (b, h, t) in
        (0..batch * heads * sequence).map(|i| (i / sequence / heads, i / sequence % heads, i % sequence))
    {
        let kv = h * kv_heads / heads;
        let score = |s| dot(vector(b, t, h), vector(b, s, heads + kv)) / (head_dim as f64).sqrt();
        let sum: f64 = (0..=t).map(|s| f64::exp(score(s))).sum();
        log_sums.push(sum.ln());
        for s in 0..=t {
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
    let lab = Lab::new(1);
    for shape in [SHORT, LONG] {
        let qkv = input(shape, 1);
        let (out, log_sums, probabilities) = by_definition(shape, &qkv);
        for (plain, saved) in [(false, log_sums), (true, probabilities)] {
            let run = Run::new(&lab, shape, plain, &qkv);
            assert_close(&run.out(), &out, 1e-12);
            assert_close(&lab.values(run.saved.view()), &saved, 1e-12);
        }
    }
}

#[test]
fn backward_is_the_derivative() {
    let lab = Lab::new(1);
    let (qkv, dout) = (input(SHORT, 1), random(SHORT.rows() * SHORT.heads * SHORT.head_dim, 2));
    for plain in [false, true] {
        let gradient = Run::new(&lab, SHORT, plain, &qkv).backward(&qkv, &dout, attention::SCRATCH_BYTES);
        assert_gradient(&qkv, &gradient, |qkv| dot(&Run::new(&lab, SHORT, plain, qkv).out(), &dout));
    }
}

#[test]
fn backward_is_the_derivative_across_tiles() {
    let lab = Lab::new(1);
    let (qkv, dout) = (input(LONG, 1), random(LONG.rows() * LONG.heads * LONG.head_dim, 2));
    for plain in [false, true] {
        let gradient = Run::new(&lab, LONG, plain, &qkv).backward(&qkv, &dout, attention::SCRATCH_BYTES);
        for direction in (3..9).map(|seed| input(LONG, seed)) {
            let along = |by: &[f64]| {
                let moved: Vec<f64> = qkv.iter().zip(&direction).map(|(x, d)| x + by[0] * d).collect();
                dot(&Run::new(&lab, LONG, plain, &moved).out(), &dout)
            };
            assert_gradient(&[0.0], &[dot(&gradient, &direction)], along);
        }
    }
}

#[test]
fn strips_change_nothing_but_rounding() {
    let lab = Lab::new(1);
    let (qkv, dout) = (input(LONG, 1), random(LONG.rows() * LONG.heads * LONG.head_dim, 2));
    let run = Run::new(&lab, LONG, false, &qkv);
    let whole = run.backward(&qkv, &dout, attention::SCRATCH_BYTES);
    let tile = 8 * 64 * 16;
    let tiles = 7 * tile + 2 * 8 * 64 * 64;
    // Room for the gradients of one, two and four tiles of queries: one head at a time, then both in two strips.
    for room in [1, 2, 4] {
        assert_close(&run.backward(&qkv, &dout, tiles + room * tile), &whole, 1e-12);
    }
}

//! The operations of one transformer block: every number of threads gives the same bits, and 16-bit types agree with
//! f32 up to rounding.

use kintsugi_spec::FrequencyScaling;

use super::counting;
use super::testing::{TestBackend, fresh, random, starts};
use crate::ops::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, ColumnSum, CrossEntropy, Embedding,
    EmbeddingBackward, GateFunction, Gated, GatedBackward, Linear, LinearBackwardInput, LinearBackwardWeight,
    LossStatistics, Norm, NormBackward, Parameters, Positions, PositionsBackward, Residual, Rotary, Scores,
    Segment, Slices, Update, UpdateRule, control,
};
use crate::{Backend, Buffer, DType, View};

const SHAPE: AttentionShape =
    AttentionShape { batch: 3, sequence: 70, heads: 4, kv_heads: 2, head_dim: 16, scores: Scores::PLAIN };
const ROWS: usize = 210;
const WIDTH: usize = 128;

/// Multiples of 1/32 below one, which every type represents exactly.
fn coarse(len: usize, seed: u64) -> Vec<f64> {
    random(len, seed).iter().map(|x| (x * 16.0).round() / 32.0).collect()
}

/// Runs operations on fresh inputs and collects their outputs.
struct Recorder<'a> {
    backend: &'a TestBackend,
    dtype: DType,
    outputs: Vec<f64>,
}

impl Recorder<'_> {
    fn input(&self, len: usize, seed: u64) -> Buffer {
        self.backend.buffer(&coarse(len, seed), self.dtype)
    }

    fn output(&self, len: usize) -> Buffer {
        self.backend.blank(len, self.dtype)
    }

    fn sums(&self, len: usize) -> Buffer {
        self.backend.blank(len, self.dtype.accumulator())
    }

    fn keep(&mut self, view: View) {
        self.outputs.extend(self.backend.values(view));
    }

    fn linear_and_norm(&mut self) {
        let backend = &self.backend.cpu;
        let [x, dy] = [1, 2].map(|seed| self.input(ROWS * WIDTH, seed));
        let [weight, scale, bias] =
            [(WIDTH * WIDTH, 3), (WIDTH, 4), (WIDTH, 5)].map(|(n, seed)| self.input(n, seed));
        let [out, kept, dx] = [(); 3].map(|()| self.output(ROWS * WIDTH));
        let (rows, inputs, outputs, width) = (ROWS, WIDTH, WIDTH, WIDTH);
        let (x, dy, weight) = (x.view(), dy.view(), weight.view());
        let (bias, gelu, out) = (Some(bias.view()), Some(kept.view()), out.view());
        backend.linear(Linear {
            x,
            weight,
            bias,
            gelu,
            residual: None,
            out,
            rows,
            inputs,
            outputs,
            float8: None,
        });
        backend.linear_backward_input(LinearBackwardInput {
            dy,
            weight,
            gelu,
            dx: dx.view(),
            dbias: None,
            rows,
            inputs,
            outputs,
            float8: None,
        });
        let (dweight, dbias) = (self.output(WIDTH * WIDTH), self.sums(WIDTH));
        let (gradient, dbias_of, column) = (fresh(&dweight), Some(fresh(&dbias)), self.sums(WIDTH));
        backend.linear_backward_weight(LinearBackwardWeight {
            dy,
            x,
            dweight: gradient,
            dbias: None,
            rows,
            inputs,
            outputs,
            float8: None,
        });
        backend.column_sum(ColumnSum { x: dy, out: fresh(&column), rows, width });

        let (normal, statistics, epsilon) = (self.output(ROWS * WIDTH), self.sums(2 * ROWS), 1e-5);
        let (scale, statistics) = (scale.view(), statistics.view());
        backend.norm(Norm { x, weight: scale, bias, out: normal.view(), statistics, epsilon, rows, width });
        let (dnormal, dscale) = (self.output(ROWS * WIDTH), self.sums(WIDTH));
        backend.norm_backward(NormBackward {
            dy,
            x,
            statistics,
            weight: scale,
            residual: Some(out),
            residual_sum: None,
            dx: dnormal.view(),
            centred: true,
            dweight: Some(fresh(&dscale)),
            dbias: dbias_of,
            rows,
            width,
        });
        let end = self.output(ROWS * WIDTH);
        let biases = &[scale];
        backend.residual(Residual { x, addends: &[normal.view(), dy], biases, out: end.view(), rows, width });
        for buffer in [&kept, &dx, &dweight, &dbias, &column, &normal, &dnormal, &dscale, &end] {
            self.keep(buffer.view());
        }
        self.keep(out);
    }

    fn attention(&mut self, plain: bool, masked: bool) {
        let backend = &self.backend.cpu;
        let qkv = self.input(ROWS * SHAPE.qkv_width(), 6);
        let dout = self.input(ROWS * 64, 7);
        let (out, dqkv) = (self.output(ROWS * 64), self.output(qkv.len()));
        let (scores, log_sums) = (self.output(SHAPE.score_elements()), self.sums(ROWS * SHAPE.heads));
        let saved = if plain {
            AttentionSaved::Probabilities(scores.view())
        } else {
            AttentionSaved::LogSumExp(log_sums.view())
        };
        let (qkv, out, shape) = (qkv.view(), out.view(), SHAPE);
        backend.rotary(Rotary {
            qkv,
            shape,
            dims: 8,
            base: 1e4,
            scaling: FrequencyScaling::NONE,
            inverse: false,
            positions: None,
            slices: Slices::WHOLE,
        });
        let starts = self.backend.tokens(&starts(SHAPE, &[30, 1, 90]));
        let starts = masked.then_some(starts.view());
        backend.attention(Attention { qkv, starts, out, saved, shape });
        let (dout, dqkv) = (dout.view(), dqkv.view());
        let dbias = None;
        backend.attention_backward(AttentionBackward { qkv, starts, out, dout, saved, dqkv, dbias, shape });
        for view in [qkv, out, dqkv, if plain { scores.view() } else { log_sums.view() }] {
            self.keep(view);
        }
    }

    fn activation_and_tables(&mut self) {
        let backend = &self.backend.cpu;
        let (x, dout) = (self.input(2 * ROWS * WIDTH, 8), self.input(ROWS * WIDTH, 9));
        let [out, activated] = [(); 2].map(|()| self.output(ROWS * WIDTH));
        let (rows, width, x, dout) = (ROWS, WIDTH, x.view(), dout.view());
        backend.gated(Gated { x, out: out.view(), gate: GateFunction::Silu, rows, width });
        backend.gelu(dout, activated.view());
        backend.gated_backward(GatedBackward { dout, x, dx: x, gate: GateFunction::Silu, rows, width });
        let tokens: Vec<u32> = (0..ROWS as u32).map(|i| i * i % 97).collect();
        let (tokens, table) = (self.backend.tokens(&tokens), self.input(90 * WIDTH, 10));
        let [embedded, dtable, dpositions] = [ROWS, 90, 70].map(|rows| self.output(rows * WIDTH));
        let (tokens, table, first, sequence, first_row) = (tokens.view(), table.view(), 3, 70, 20);
        backend.embedding(Embedding { tokens, table, first, out: embedded.view(), rows, width });
        backend.positions(Positions { x: embedded.view(), table, first_row, sequence, rows, width });
        let gradient = fresh(&dtable);
        backend.embedding_backward(EmbeddingBackward { tokens, dout, first, dtable: gradient, rows, width });
        let (dx, gradient) = (dout, fresh(&dpositions));
        backend.positions_backward(PositionsBackward {
            dx,
            dtable: gradient,
            first_row,
            sequence,
            rows,
            width,
        });
        for buffer in [&out, &activated, &embedded, &dtable, &dpositions] {
            self.keep(buffer.view());
        }
        self.keep(x);
    }

    fn loss_and_update(&mut self) {
        let backend = &self.backend.cpu;
        let (rows, columns, valid, first) = (ROWS, WIDTH, 120, 0);
        let logits = self.input(ROWS * WIDTH, 11);
        let targets = self.backend.tokens(&(0..ROWS as u32).map(|i| i % 120).collect::<Vec<_>>());
        let (statistics, accumulator) = (self.sums(3 * ROWS), self.dtype.accumulator());
        let (loss, scale) =
            (self.backend.buffer(&[0.0], accumulator), self.backend.buffer(&[64.0], accumulator));
        let (logits, targets, statistics) = (logits.view(), targets.view(), statistics.view());
        backend.loss_statistics(LossStatistics {
            logits,
            targets,
            first,
            valid,
            statistics,
            soft_cap: None,
            rows,
            columns,
        });
        let (loss, scale) = (loss.view(), Some(scale.view()));
        let (parts, factor) = (1, 0.125);
        backend.cross_entropy(CrossEntropy {
            logits,
            targets,
            first,
            valid,
            statistics,
            parts,
            loss,
            scale,
            factor,
            z_loss: 1e-4,
            soft_cap: None,
            rows,
            columns,
        });
        let squares = self.backend.buffer(&[0.0], accumulator);
        backend.sum_of_squares(logits, squares.view());
        let mut slots = [0.5; control::LEN];
        slots[control::SKIP] = 0.0;
        let slots = self.backend.buffer(&slots, accumulator);
        let states = [12, 13].map(|seed| self.backend.buffer(&coarse(ROWS * WIDTH, seed), accumulator));
        let second = self.backend.buffer(&vec![0.25; ROWS * WIDTH], accumulator);
        backend.update(Update {
            parameters: &[Parameters {
                gradient: logits,
                master: states[0].view(),
                states: [Some(states[1].view()), Some(second.view())],
                weights: None,
                segments: &[Segment { start: 0, len: ROWS * WIDTH, rate_factor: 1.0, decay: 0.1 }],
            }],
            control: slots.view(),
            rule: UpdateRule::AdamW { betas: (0.9, 0.95), epsilon: 1e-8 },
        });
        for view in [logits, loss, squares.view(), states[0].view(), states[1].view(), second.view()] {
            self.keep(view);
        }
    }
}

fn everything(backend: &TestBackend, dtype: DType) -> Vec<f64> {
    let mut recorder = Recorder { backend, dtype, outputs: Vec::new() };
    recorder.linear_and_norm();
    for (plain, masked) in [(false, false), (true, false), (false, true), (true, true)] {
        recorder.attention(plain, masked);
    }
    recorder.activation_and_tables();
    recorder.loss_and_update();
    recorder.outputs
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for dtype in [DType::F32, DType::BF16] {
        TestBackend::same_for_all_threads(|backend| everything(backend, dtype));
    }
}

/// The linear and attention operations that use scratch, on existing buffers.
fn scratch_users(backend: &TestBackend, buffers: &[Buffer; 4], log_sums: &Buffer) {
    let [x, weight, y, dx] = buffers.each_ref().map(Buffer::view);
    let (rows, inputs, outputs) = (ROWS, WIDTH, WIDTH);
    let (bias, gelu) = (None, None);
    backend.cpu.linear(Linear {
        x,
        weight,
        bias,
        gelu,
        residual: None,
        out: y,
        rows,
        inputs,
        outputs,
        float8: None,
    });
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 32, ..SHAPE };
    let (saved, out) = (AttentionSaved::LogSumExp(log_sums.view()), y.slice(0..ROWS * 64));
    let (qkv, starts) = (x, None);
    backend.cpu.attention(Attention { qkv, starts, out, saved, shape });
    backend.cpu.attention_backward(AttentionBackward {
        qkv,
        starts,
        out,
        dout: out,
        saved,
        dqkv: dx,
        dbias: None,
        shape,
    });
}

#[test]
fn operations_do_not_allocate() {
    const RANK: usize = 59;
    let on_rank = || {
        let backend = TestBackend::new(1);
        let buffers = [ROWS * WIDTH, WIDTH * WIDTH, ROWS * WIDTH, ROWS * WIDTH]
            .map(|len| backend.buffer(&coarse(len, 1), DType::F32));
        let log_sums = backend.blank(ROWS * 2, DType::F32);
        counting::attribute(RANK);
        counting::reset(RANK);
        scratch_users(&backend, &buffers, &log_sums);
        let by_operations = counting::measured(RANK).untracked_peak;
        drop(std::hint::black_box(vec![0_u8; 100]));
        let by_hand = counting::measured(RANK).untracked_peak;
        counting::attribute(usize::MAX);
        (by_operations, by_hand)
    };
    let counted = std::thread::scope(|scope| scope.spawn(on_rank).join().expect("the rank's thread"));
    assert_eq!(counted, (0, 100));
}

#[test]
fn narrow_types_differ_by_their_rounding_only() {
    let backend = TestBackend::new(1);
    let exact = everything(&backend, DType::F64);
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 1e-2), (DType::BF16, 8e-2)] {
        let ours = everything(&backend, dtype);
        for (i, (ours, exact)) in ours.iter().zip(&exact).enumerate() {
            assert!(
                (ours - exact).abs() <= tolerance * exact.abs().max(1.0),
                "{dtype:?} {i}: {ours} against {exact}"
            );
        }
    }
}

//! Rotary positions (arXiv 2104.09864), in place.

use super::access::Access;
use super::element::{Element, Real};
use super::parallel::{Rows, Threads};
use crate::ops::Rotary;

/// Half of the widest head.
const PAIRS: usize = super::attention::HEAD_DIM / 2;

/// Sines and cosines are computed directly at every multiple of this, and by angle addition in between.
const FRESH: usize = 32;

/// See [`Rotary`].
pub fn rotary<T: Element>(threads: Threads, op: &Rotary) {
    let access = Access::new();
    let (qkv, shape) = (access.write::<T>(op.qkv), op.shape);
    let width = shape.qkv_width();
    let rotated = (shape.heads + shape.kv_heads) * shape.head_dim;
    let fresh = Angles::new(op);
    let (dims, slices, positions) =
        (op.dims, op.slices, op.positions.map(|positions| access.tokens(positions)));
    threads.each(shape.rows(), width, Rows(qkv, width), |rows, qkv| {
        let mut angles = fresh.clone();
        for (row, qkv) in rows.zip(qkv.0.chunks_exact_mut(width)) {
            let by_index = || slices.position(shape.sequence, row % shape.sequence);
            angles.move_to(positions.map_or_else(by_index, |positions| positions[row] as usize));
            let (cosines, sines) = angles.rounded::<T::Accumulator>();
            for head in qkv[..rotated].chunks_exact_mut(shape.head_dim) {
                let (low, high) = head[..dims].split_at_mut(dims / 2);
                for (((low, high), &cosine), &sine) in low.iter_mut().zip(high).zip(&cosines).zip(&sines) {
                    let (x, y) = (low.widen(), high.widen());
                    *low = T::narrow(x * cosine - y * sine);
                    *high = T::narrow(x * sine + y * cosine);
                }
            }
        }
    });
}

/// Cosines and sines of every pair at one position.
#[derive(Clone)]
struct Angles {
    pairs: usize,
    position: usize,
    frequency: [f64; PAIRS],
    amplitude: f64,
    /// Cosine and sine at `position`.
    now: [(f64, f64); PAIRS],
    /// Cosine and sine of one position's angle.
    step: [(f64, f64); PAIRS],
}

impl Angles {
    fn new(op: &Rotary) -> Self {
        let pairs = op.dims / 2;
        let (mut frequency, mut step) = ([0.0; PAIRS], [(1.0, 0.0); PAIRS]);
        let sign = if op.inverse { -1.0 } else { 1.0 };
        for i in 0..pairs {
            let plain = op.base.powf(-2.0 * i as f64 / op.dims as f64);
            frequency[i] = sign * op.scaling.scale(i, plain);
            step[i] = (frequency[i].cos(), frequency[i].sin());
        }
        let amplitude = op.scaling.amplitude;
        Angles { pairs, position: usize::MAX, frequency, amplitude, now: [(1.0, 0.0); PAIRS], step }
    }

    /// Moves to `position`. The result has the same bits whatever the previous position was.
    fn move_to(&mut self, position: usize) {
        let fresh = position - position % FRESH;
        if self.position > position || self.position < fresh {
            self.position = fresh;
            for i in 0..self.pairs {
                let angle = fresh as f64 * self.frequency[i];
                self.now[i] = (angle.cos(), angle.sin());
            }
        }
        for _ in self.position..position {
            for (now, step) in self.now[..self.pairs].iter_mut().zip(&self.step) {
                *now = (now.0 * step.0 - now.1 * step.1, now.0 * step.1 + now.1 * step.0);
            }
        }
        self.position = position;
    }

    fn rounded<A: Real>(&self) -> ([A; PAIRS], [A; PAIRS]) {
        let rounded = |number: f64| A::from_f64(self.amplitude * number);
        (self.now.map(|(cosine, _)| rounded(cosine)), self.now.map(|(_, sine)| rounded(sine)))
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_spec::{FrequencyScaling, RotaryScaling, RotaryScalingKind};

    use super::*;
    use crate::cpu::testing::{TestBackend, assert_close, random};
    use crate::ops::{AttentionShape, Scores, Slices};
    use crate::{Backend, DType};

    #[test]
    fn rotates_queries_and_keys_by_position_and_back() {
        there_and_back(FrequencyScaling::NONE, |frequency| frequency);
    }

    #[test]
    fn low_frequencies_are_divided() {
        // In 16 positions the two frequencies turn 2.5 and 0.25 times.
        let scaling = RotaryScaling { low: 0.5, high: Some(2.0), positions: 16, ..RotaryScaling::default() };
        let of = |scaling| FrequencyScaling::new(Some(scaling), 100.0, 4);
        there_and_back(of(scaling), |frequency| if frequency > 0.5 { frequency } else { frequency / 8.0 });
        // A frequency that turns 1.25 times is half way between the two.
        let halved = of(RotaryScaling { positions: 8, ..scaling }).scale(0, 1.0);
        let share = (8.0 / std::f64::consts::TAU - 0.5) / 1.5;
        assert!((halved - (share + (1.0 - share) / 8.0)).abs() < 1e-15, "{halved}");
    }

    #[test]
    fn rotated_queries_and_keys_may_grow() {
        let yarn = RotaryScaling {
            kind: RotaryScalingKind::Yarn,
            factor: 1.0,
            attention_factor: Some(1.5),
            ..RotaryScaling::default()
        };
        there_and_back(FrequencyScaling::new(Some(yarn), 100.0, 4), |frequency| frequency);
    }

    fn there_and_back(scaling: FrequencyScaling, scaled: impl Fn(f64) -> f64) {
        let shape = AttentionShape {
            batch: 2,
            sequence: 75,
            heads: 2,
            kv_heads: 1,
            head_dim: 6,
            scores: Scores::PLAIN,
        };
        let (backend, dims, base) = (TestBackend::new(1), 4, 100.0);
        let x = random(shape.rows() * shape.qkv_width(), 1);
        let qkv = backend.buffer(&x, DType::F64);
        backend.cpu.rotary(Rotary {
            qkv: qkv.view(),
            shape,
            dims,
            base,
            scaling,
            inverse: false,
            positions: None,
            slices: Slices::WHOLE,
        });
        let expected: Vec<f64> = (0..x.len())
            .map(|i| {
                let (row, head, dim) = (i / 24, i % 24 / 6, i % 6);
                if head == 3 || dim >= 4 {
                    return x[i];
                }
                let angle = (row % 75) as f64 * scaled(f64::powf(base, -((dim % 2) as f64) / 2.0));
                let (partner, sign) = if dim < 2 { (x[i + 2], -1.0) } else { (x[i - 2], 1.0) };
                scaling.amplitude * (x[i] * angle.cos() + sign * partner * angle.sin())
            })
            .collect();
        assert_close(&backend.values(qkv.view()), &expected, 1e-13);
        backend.cpu.rotary(Rotary {
            qkv: qkv.view(),
            shape,
            dims,
            base,
            scaling,
            inverse: true,
            positions: None,
            slices: Slices::WHOLE,
        });
        // The backward of a product is the same product.
        let is_rotated = |i: usize| i % 24 / 6 < 3 && i % 6 < 4;
        let grown = |i: usize| if is_rotated(i) { scaling.amplitude.powi(2) * x[i] } else { x[i] };
        assert_close(&backend.values(qkv.view()), &(0..x.len()).map(grown).collect::<Vec<_>>(), 1e-13);
    }

    #[test]
    fn rows_may_have_explicit_positions() {
        let whole = AttentionShape {
            batch: 1,
            sequence: 75,
            heads: 2,
            kv_heads: 1,
            head_dim: 6,
            scores: Scores::PLAIN,
        };
        let (backend, dims, base, inverse) = (TestBackend::new(1), 4, 100.0, false);
        let x = random(whole.rows() * whole.qkv_width(), 1);
        let qkv = backend.buffer(&x, DType::F64);
        backend.cpu.rotary(Rotary {
            qkv: qkv.view(),
            shape: whole,
            dims,
            base,
            scaling: FrequencyScaling::NONE,
            inverse,
            positions: None,
            slices: Slices::WHOLE,
        });
        let at = [70_u32, 3, 33];
        let rows = |of: &[f64]| at.map(|row| of[row as usize * 24..][..24].to_vec()).concat();
        let (some, positions) = (backend.buffer(&rows(&x), DType::F64), backend.tokens(&at));
        let (shape, positions) = (AttentionShape { sequence: 3, ..whole }, Some(positions.view()));
        backend.cpu.rotary(Rotary {
            qkv: some.view(),
            shape,
            dims,
            base,
            scaling: FrequencyScaling::NONE,
            inverse,
            positions,
            slices: Slices::WHOLE,
        });
        assert_eq!(backend.values(some.view()), rows(&backend.values(qkv.view())));
    }
}

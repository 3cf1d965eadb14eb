//! The control values of a step: see [`UpdateControl`].

use super::access::Access;
use super::element::Real;
use crate::ops::{UpdateControl, control};

/// Keeps the clip factor finite if the norm is zero.
const CLIP_EPSILON: f64 = 1e-6;

/// See [`UpdateControl`].
pub fn update_control<A: Real>(op: &UpdateControl) {
    let access = Access::new();
    let slots = access.write::<A>(op.control);
    let sum_of_squares = access.read::<A>(op.sum_of_squares)[0].to_f64();
    let loss = access.read::<A>(op.loss_sum)[0].to_f64() / op.tokens;

    let get = |slots: &[A], slot: usize| slots[slot].to_f64();
    let step = get(slots, control::STEP);
    let scale = get(slots, control::LOSS_SCALE);
    let norm = sum_of_squares.sqrt() / scale;
    let skip = !(norm.is_finite() && loss.is_finite());
    let mut set = |slot: usize, value: f64| slots[slot] = A::from_f64(value);
    set(control::LOSS, loss);
    set(control::NORM, norm);
    set(control::RATE, op.rate.at(step as u64));
    set(control::SKIP, f64::from(u8::from(skip)));
    set(control::STEP, step + 1.0);

    let mut good_steps = get(slots, control::GOOD_STEPS) + 1.0;
    let mut next_scale = scale;
    if skip {
        slots[control::SKIPPED_IN_A_ROW] += A::ONE;
        good_steps = 0.0;
        if op.scaler.is_some() {
            next_scale = (scale / 2.0).max(1.0);
        }
    } else {
        let updates = get(slots, control::UPDATES) + 1.0;
        let clip = if op.clip > 0.0 { (op.clip / (norm + CLIP_EPSILON)).min(1.0) } else { 1.0 };
        let mut set = |slot: usize, value: f64| slots[slot] = A::from_f64(value);
        set(control::UPDATES, updates);
        set(control::CORRECTION_1, 1.0 - op.betas.0.powf(updates));
        set(control::CORRECTION_2, 1.0 - op.betas.1.powf(updates));
        set(control::FACTOR, clip / scale);
        set(control::SKIPPED_IN_A_ROW, 0.0);
        if let Some(scaler) = op.scaler
            && good_steps >= scaler.window as f64
        {
            next_scale = (2.0 * scale).min(scaler.largest);
            good_steps = 0.0;
        }
    }
    slots[control::GOOD_STEPS] = A::from_f64(good_steps);
    slots[control::LOSS_SCALE] = A::from_f64(next_scale);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, assert_close};
    use crate::ops::{LearningRate, LossScaler, RateCurve};
    use crate::{Backend, Buffer, DType};

    const RATE: LearningRate = LearningRate {
        peak: 0.1,
        floor: 0.0,
        warmup: 4,
        curve: RateCurve::Constant,
        decay_start: 3,
        decay_steps: 6,
    };

    fn decide(backend: &TestBackend, slots: &Buffer, sum_of_squares: f64, loss_sum: f64) -> Vec<f64> {
        let [squares, losses] = [sum_of_squares, loss_sum].map(|x| backend.buffer(&[x], DType::F32));
        backend.cpu.update_control(UpdateControl {
            control: slots.view(),
            sum_of_squares: squares.view(),
            loss_sum: losses.view(),
            tokens: 2.0,
            clip: 1.0,
            rate: RATE,
            betas: (0.5, 0.75),
            scaler: Some(LossScaler { window: 2, largest: 16.0 }),
        });
        backend.values(slots.view())
    }

    #[test]
    fn the_control_clips_skips_and_moves_the_loss_scale() {
        let backend = TestBackend::new(1);
        let mut start = [0.0; control::LEN];
        start[control::LOSS_SCALE] = 8.0;
        let slots = backend.buffer(&start, DType::F32);

        let first = decide(&backend, &slots, 64.0 * 16.0, 6.0);
        assert_eq!((first[control::STEP], first[control::UPDATES], first[control::SKIP]), (1.0, 1.0, 0.0));
        assert_eq!((first[control::NORM], first[control::LOSS]), (4.0, 3.0));
        assert_close(&[first[control::FACTOR], first[control::RATE]], &[1.0 / 32.0, 0.025], 1e-6);
        assert_eq!((first[control::CORRECTION_1], first[control::CORRECTION_2]), (0.5, 0.25));
        assert_eq!((first[control::GOOD_STEPS], first[control::LOSS_SCALE]), (1.0, 8.0));

        let second = decide(&backend, &slots, 64.0 * 0.25, 6.0);
        // A small norm is not clipped, and the old loss scale is used.
        assert_eq!((second[control::NORM], second[control::FACTOR]), (0.5, 1.0 / 8.0));
        assert_eq!((second[control::GOOD_STEPS], second[control::LOSS_SCALE]), (0.0, 16.0));

        for (bad_squares, bad_loss, in_a_row) in [(f64::INFINITY, 6.0, 1.0), (1.0, f64::NAN, 2.0)] {
            let skipped = decide(&backend, &slots, bad_squares, bad_loss);
            assert_eq!((skipped[control::SKIP], skipped[control::UPDATES]), (1.0, 2.0));
            let expected = (in_a_row, 16.0 / f64::exp2(in_a_row));
            assert_eq!((skipped[control::SKIPPED_IN_A_ROW], skipped[control::LOSS_SCALE]), expected);
        }
        let good = decide(&backend, &slots, 16.0, 6.0);
        assert_eq!((good[control::STEP], good[control::UPDATES]), (5.0, 3.0));
        assert_eq!(
            (good[control::SKIP], good[control::SKIPPED_IN_A_ROW], good[control::RATE]),
            (0.0, 0.0, 0.1_f32.into())
        );
    }
}

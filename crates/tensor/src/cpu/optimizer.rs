//! The end of a step: its control values, and `AdamW` (arXiv 1711.05101).

use half::{bf16, f16};

use super::access::Access;
use super::element::{Element, Real};
use super::parallel::Threads;
use crate::DType;
use crate::ops::{AdamW, Parameters, UpdateControl, control};

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

/// The constants of one update, in the type of the master weights.
#[derive(Clone, Copy)]
struct Update<A> {
    factor: A,
    betas: (A, A),
    /// `1/c₁`, `1/c₂`.
    corrections: (A, A),
    rate: A,
    epsilon: A,
}

/// See [`AdamW`], for all types with f32 accumulators.
pub fn adamw_in_f32<G: Element<Accumulator = f32>>(threads: Threads, op: &AdamW, of: &Parameters) {
    match (of.first_moment.dtype(), of.weights.map(|weights| weights.dtype())) {
        (DType::BF16, Some(DType::F16)) => adamw::<G, bf16, f16>(threads, op, of),
        (DType::BF16, _) => adamw::<G, bf16, bf16>(threads, op, of),
        (_, Some(DType::F16)) => adamw::<G, f32, f16>(threads, op, of),
        (_, _) => adamw::<G, f32, bf16>(threads, op, of),
    }
}

/// See [`AdamW`], with gradients `G`, moments `M` and, if present, copies `W` of the weights.
pub fn adamw<G, M, W>(threads: Threads, op: &AdamW, of: &Parameters)
where
    G: Element,
    M: Element<Accumulator = G::Accumulator>,
    W: Element<Accumulator = G::Accumulator>,
{
    let access = Access::new();
    let slots = access.read::<G::Accumulator>(op.control);
    if slots[control::SKIP] > G::Accumulator::ZERO {
        return;
    }
    let one = G::Accumulator::ONE;
    let real = G::Accumulator::from_f64;
    let update = Update {
        factor: slots[control::FACTOR],
        betas: (real(op.betas.0), real(op.betas.1)),
        corrections: (one / slots[control::CORRECTION_1], one / slots[control::CORRECTION_2]),
        rate: slots[control::RATE],
        epsilon: real(op.epsilon),
    };
    let gradient = access.read::<G>(of.gradient);
    let master = access.write::<G::Accumulator>(of.master);
    let (first, second) = (access.write::<M>(of.first_moment), access.write::<M>(of.second_moment));
    let mut weights = of.weights.map(|weights| access.write::<W>(weights));
    for segment in of.segments {
        let range = segment.start..segment.start + segment.len;
        let keep = if segment.decay { one - update.rate * real(op.weight_decay) } else { one };
        let moments = (&mut first[range.clone()], &mut second[range.clone()]);
        let weights = weights.as_mut().map(|weights| &mut weights[range.clone()]);
        let parts = (&gradient[range.clone()], &mut master[range], moments, weights);
        threads.each(segment.len, 2, parts, |_, (gradient, master, (first, second), weights)| {
            run(update, keep, gradient, master, first, second);
            if let Some(weights) = weights {
                for (weight, &master) in weights.iter_mut().zip(&*master) {
                    *weight = W::narrow(master);
                }
            }
        });
    }
}

/// One contiguous range. `keep` is the fraction of a weight that decay leaves.
fn run<G, M>(
    update: Update<G::Accumulator>,
    keep: G::Accumulator,
    gradient: &[G],
    master: &mut [G::Accumulator],
    first: &mut [M],
    second: &mut [M],
) where
    G: Element,
    M: Element<Accumulator = G::Accumulator>,
{
    let one = G::Accumulator::ONE;
    let (beta1, beta2) = update.betas;
    for (((&gradient, master), first), second) in gradient.iter().zip(master).zip(first).zip(second) {
        let g = gradient.widen() * update.factor;
        let m = beta1.mul_add(first.widen(), (one - beta1) * g);
        let v = beta2.mul_add(second.widen(), (one - beta2) * g * g);
        *first = M::narrow(m);
        *second = M::narrow(v);
        let step = m * update.corrections.0 / ((v * update.corrections.1).sqrt() + update.epsilon);
        *master = *master * keep - update.rate * step;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, assert_close, random};
    use crate::ops::{LearningRate, LossScaler, RateCurve, Segment};
    use crate::{Backend, Buffer};

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

    /// Two updates of 10 parameters in two segments, the first 6 with decay. Returns master weights, moments and the
    /// copy.
    fn two_updates(types: [DType; 4], skip: f64) -> [Vec<f64>; 4] {
        let [gradients, masters, moments, copies] = types;
        let backend = TestBackend::new(1);
        let gradient = backend.buffer(&random(10, 1), gradients);
        let master = backend.buffer(&random(10, 2), masters);
        let [first, second] = [(); 2].map(|()| backend.buffer(&[0.0; 10], moments));
        let weights = backend.blank(10, copies);
        for update in 1..=2 {
            let mut slots = [0.0; control::LEN];
            for (slot, value) in [
                (control::SKIP, skip),
                (control::FACTOR, 0.5),
                (control::RATE, 0.125),
                (control::CORRECTION_1, 1.0 - f64::powi(0.875, update)),
                (control::CORRECTION_2, 1.0 - f64::powi(0.75, update)),
            ] {
                slots[slot] = value;
            }
            let parameters = [0..5, 5..10].map(|part| Parameters {
                gradient: gradient.slice(part.clone()),
                master: master.slice(part.clone()),
                first_moment: first.slice(part.clone()),
                second_moment: second.slice(part.clone()),
                weights: (copies != masters).then_some(weights.slice(part.clone())),
                segments: if part.start == 0 {
                    &[Segment { start: 0, len: 5, decay: true }]
                } else {
                    &[Segment { start: 0, len: 1, decay: true }, Segment { start: 1, len: 4, decay: false }]
                },
            });
            backend.cpu.adamw(AdamW {
                parameters: &parameters,
                control: backend.buffer(&slots, masters).view(),
                betas: (0.875, 0.75),
                epsilon: 1e-3,
                weight_decay: 0.5,
            });
        }
        [&master, &first, &second, &weights].map(|buffer| backend.values(buffer.view()))
    }

    fn by_definition() -> [Vec<f64>; 3] {
        let (gradient, mut master) = (random(10, 1), random(10, 2));
        let (mut first, mut second) = (vec![0.0; 10], vec![0.0; 10]);
        for update in 1..=2 {
            for i in 0..10 {
                let g = 0.5 * gradient[i];
                first[i] = 0.875 * first[i] + 0.125 * g;
                second[i] = 0.75 * second[i] + 0.25 * g * g;
                let m: f64 = first[i] / (1.0 - f64::powi(0.875, update));
                let v: f64 = second[i] / (1.0 - f64::powi(0.75, update));
                let decay = if i < 6 { 0.5 } else { 0.0 };
                master[i] = master[i] * (1.0 - 0.125 * decay) - 0.125 * m / (v.sqrt() + 1e-3);
            }
        }
        [master, first, second]
    }

    #[test]
    fn adamw_is_the_definition_in_every_mix_of_types() {
        use DType::{BF16, F16, F32, F64};
        let expected = by_definition();
        for (types, tolerance) in [
            ([F64, F64, F64, F64], 1e-14),
            ([F32, F32, F32, F32], 1e-6),
            ([F32, F32, F32, BF16], 1e-6),
            ([BF16, F32, F32, F16], 2e-2),
            ([F16, F32, BF16, F16], 2e-2),
            ([BF16, F32, BF16, BF16], 2e-2),
        ] {
            let [master, first, second, weights] = two_updates(types, 0.0);
            assert_close(&master, &expected[0], tolerance);
            assert_close(&first, &expected[1], tolerance);
            assert_close(&second, &expected[2], tolerance);
            if types[3] != types[1] {
                assert_close(&weights, &master, 4e-3);
            }
        }
    }

    #[test]
    fn a_skipped_step_changes_nothing() {
        let [master, first, ..] = two_updates([DType::F64; 4], 1.0);
        assert_eq!((master, first), (random(10, 2), vec![0.0; 10]));
    }
}

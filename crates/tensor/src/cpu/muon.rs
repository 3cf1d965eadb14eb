//! The operations of Muon: see [`Momentum`], [`Normalize`] and [`ScaledSum`].

use half::bf16;

use super::access::Access;
use super::element::{Element, Real};
use super::parallel::Threads;
use crate::DType;
use crate::ops::{Momentum, Normalize, ScaledSum, control};

/// See [`Momentum`], for all types with f32 accumulators.
pub fn momentum_in_f32<G: Element<Accumulator = f32>>(threads: Threads, op: &Momentum) {
    match (op.momentum.dtype(), op.out.dtype()) {
        (DType::BF16, DType::BF16) => momentum::<G, bf16, bf16>(threads, op),
        (DType::BF16, _) => momentum::<G, bf16, f32>(threads, op),
        (_, DType::BF16) => momentum::<G, f32, bf16>(threads, op),
        (_, _) => momentum::<G, f32, f32>(threads, op),
    }
}

/// See [`Momentum`], with gradients `G`, momenta `S` and directions `O`.
pub fn momentum<G, S, O>(threads: Threads, op: &Momentum)
where
    G: Element,
    S: Element<Accumulator = G::Accumulator>,
    O: Element<Accumulator = G::Accumulator>,
{
    let access = Access::new();
    let slots = access.read::<G::Accumulator>(op.control);
    if slots[control::SKIP] > G::Accumulator::ZERO {
        return;
    }
    let (factor, mu) = (slots[control::FACTOR], G::Accumulator::from_f64(op.beta));
    let (rest, nesterov) = (G::Accumulator::ONE - mu, op.nesterov);
    let gradient = access.read::<G>(op.gradient);
    let parts = (gradient, access.write::<S>(op.momentum), access.write::<O>(op.out));
    threads.each(gradient.len(), 2, parts, |_, (gradient, momentum, out)| {
        for ((&gradient, momentum), out) in gradient.iter().zip(momentum).zip(out) {
            let g = rest * (gradient.widen() * factor);
            let m = mu.mul_add(momentum.widen(), g);
            *momentum = S::narrow(m);
            *out = O::narrow(if nesterov { mu.mul_add(m, g) } else { m });
        }
    });
}

/// See [`Normalize`].
pub fn normalize<T: Element>(threads: Threads, op: &Normalize) {
    let access = Access::new();
    let norm = access.read::<T::Accumulator>(op.sum_of_squares)[0].sqrt();
    let norm = norm.max(T::Accumulator::from_f64(op.epsilon));
    let x = access.write::<T>(op.x);
    threads.each(x.len(), 1, x, |_, x| x.iter_mut().for_each(|x| *x = T::narrow(x.widen() / norm)));
}

/// See [`ScaledSum`].
pub fn scaled_sum<T: Element>(threads: Threads, op: &ScaledSum) {
    let access = Access::new();
    let (a, b) = (T::Accumulator::from_f64(op.factors.0), T::Accumulator::from_f64(op.factors.1));
    let (x, y) = (access.write::<T>(op.x), access.read::<T>(op.y));
    threads.each(x.len(), 1, (x, y), |_, (x, y)| {
        for (x, &y) in x.iter_mut().zip(y) {
            *x = T::narrow(a.mul_add(x.widen(), b * y.widen()));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;
    use crate::cpu::testing::{TestBackend, assert_close, random};

    const LEN: usize = 100;

    /// The momentum and the direction after two steps of half of the gradients.
    fn two_steps(types: [DType; 4], nesterov: bool, skip: f64) -> [Vec<f64>; 2] {
        let backend = TestBackend::new(2);
        let [gradients, accumulator, momenta, directions] = types;
        let (momentum, out) = (backend.buffer(&[0.0; LEN], momenta), backend.buffer(&[0.0; LEN], directions));
        let mut slots = [0.0; control::LEN];
        (slots[control::FACTOR], slots[control::SKIP]) = (0.5, skip);
        let control = backend.buffer(&slots, accumulator);
        for seed in [1, 2] {
            let gradient = backend.buffer(&random(LEN, seed), gradients);
            backend.cpu.momentum(Momentum {
                gradient: gradient.view(),
                momentum: momentum.view(),
                out: out.view(),
                control: control.view(),
                beta: 0.75,
                nesterov,
            });
        }
        [&momentum, &out].map(|buffer| backend.values(buffer.view()))
    }

    #[test]
    fn momentum_is_its_definition_in_every_mix_of_types() {
        use DType::{BF16, F16, F32, F64};
        let (first, second) = (random(LEN, 1), random(LEN, 2));
        let both = || first.iter().zip(&second);
        let momentum: Vec<f64> = both().map(|(g, h)| 0.125 * (0.75 * g + h)).collect();
        let ahead: Vec<f64> = both().zip(&momentum).map(|((_, h), m)| 0.125 * h + 0.75 * m).collect();
        for (types, tolerance) in [
            ([F64, F64, F64, F64], 1e-14),
            ([F32, F32, F32, F32], 1e-6),
            ([BF16, F32, F32, BF16], 1e-2),
            ([F16, F32, BF16, BF16], 1e-2),
        ] {
            for (nesterov, direction) in [(false, &momentum), (true, &ahead)] {
                let [m, out] = two_steps(types, nesterov, 0.0);
                assert_close(&m, &momentum, tolerance);
                assert_close(&out, direction, tolerance);
            }
        }
        assert_eq!(two_steps([F32; 4], true, 1.0), [vec![0.0; LEN], vec![0.0; LEN]], "a skipped step");
    }

    #[test]
    fn numbers_are_normalised_and_added() {
        let backend = TestBackend::new(2);
        for (dtype, tolerance) in [(DType::F64, 1e-15), (DType::F32, 1e-6), (DType::BF16, 1e-2)] {
            let (x, y) = (backend.buffer(&random(LEN, 1), dtype), backend.buffer(&random(LEN, 2), dtype));
            let (before, other) = (backend.values(x.view()), backend.values(y.view()));
            for (squares, norm) in [(4.0, 2.0), (1e-8, 0.5)] {
                let x = backend.buffer(&before, dtype);
                let sum = backend.buffer(&[squares], dtype.accumulator());
                let op = Normalize { x: x.view(), sum_of_squares: sum.view(), epsilon: 0.5 };
                backend.cpu.normalize(op);
                let expected: Vec<f64> = before.iter().map(|x| x / norm).collect();
                assert_close(&backend.values(x.view()), &expected, tolerance);
            }
            backend.cpu.scaled_sum(ScaledSum { x: x.view(), y: y.view(), factors: (2.0, -0.5) });
            let expected: Vec<f64> = before.iter().zip(&other).map(|(x, y)| 2.0 * x - 0.5 * y).collect();
            assert_close(&backend.values(x.view()), &expected, tolerance);
        }
    }
}

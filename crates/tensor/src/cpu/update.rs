//! Updates of parameters by their gradients: see [`UpdateRule`].

use half::{bf16, f16};

use super::access::Access;
use super::element::{Element, Real};
use super::parallel::Threads;
use crate::DType;
use crate::ops::{Parameters, Update, UpdateRule, control};

/// The constants of an update of one segment, in the type of the master weights.
#[derive(Clone, Copy)]
struct Constants<A> {
    /// The factor of the gradients.
    factor: A,
    rate: A,
    /// λ.
    decay: A,
    /// `1/c₁`, `1/c₂`.
    corrections: (A, A),
}

impl<A: Real> Constants<A> {
    /// The fraction of a weight that decoupled decay leaves.
    fn keep(&self) -> A {
        A::ONE - self.rate * self.decay
    }
}

/// See [`Update`], for all types with f32 accumulators.
pub fn update_in_f32<G: Element<Accumulator = f32>>(threads: Threads, op: &Update, of: &Parameters) {
    match (of.states[0].map(|state| state.dtype()), of.weights.map(|weights| weights.dtype())) {
        (Some(DType::BF16), Some(DType::F16)) => update::<G, bf16, f16>(threads, op, of),
        (Some(DType::BF16), _) => update::<G, bf16, bf16>(threads, op, of),
        (_, Some(DType::F16)) => update::<G, f32, f16>(threads, op, of),
        (_, _) => update::<G, f32, bf16>(threads, op, of),
    }
}

/// See [`Update`], with gradients `G`, states `S` and, if present, copies `W` of the weights.
pub fn update<G, S, W>(threads: Threads, op: &Update, of: &Parameters)
where
    G: Element,
    S: Element<Accumulator = G::Accumulator>,
    W: Element<Accumulator = G::Accumulator>,
{
    let access = Access::new();
    let slots = access.read::<G::Accumulator>(op.control);
    if slots[control::SKIP] > G::Accumulator::ZERO {
        return;
    }
    let (one, rule) = (G::Accumulator::ONE, op.rule);
    let real = G::Accumulator::from_f64;
    let gradient = access.read::<G>(of.gradient);
    let master = access.write::<G::Accumulator>(of.master);
    let [mut first, mut second] = of.states.map(|state| state.map(|state| access.write::<S>(state)));
    let mut weights = of.weights.map(|weights| access.write::<W>(weights));
    for segment in of.segments {
        let range = segment.start..segment.start + segment.len;
        let constants = Constants {
            factor: slots[control::FACTOR],
            rate: slots[control::RATE] * real(segment.rate_factor),
            decay: real(segment.decay),
            corrections: (one / slots[control::CORRECTION_1], one / slots[control::CORRECTION_2]),
        };
        let first = first.as_mut().map(|first| &mut first[range.clone()]);
        let second = second.as_mut().map(|second| &mut second[range.clone()]);
        let weights = weights.as_mut().map(|weights| &mut weights[range.clone()]);
        let parts = (&gradient[range.clone()], &mut master[range], (first, second), weights);
        threads.each(segment.len, 2, parts, |_, (gradient, master, states, weights)| {
            match (rule, states) {
                (UpdateRule::AdamW { betas, epsilon }, (Some(first), Some(second))) => {
                    let betas = (real(betas.0), real(betas.1));
                    adamw(constants, betas, real(epsilon), gradient, master, first, second);
                }
                (UpdateRule::Lion { betas }, (Some(momentum), None)) => {
                    lion(constants, (real(betas.0), real(betas.1)), gradient, master, momentum);
                }
                (UpdateRule::Sgd { momentum, nesterov }, (Some(buffer), None)) => {
                    sgd_with_momentum(constants, real(momentum), nesterov, gradient, master, buffer);
                }
                (UpdateRule::Sgd { .. }, (None, None)) => sgd(constants, gradient, master),
                (UpdateRule::Direction, (None, None)) => {
                    sgd(Constants { factor: one, ..constants }, gradient, master);
                }
                (
                    UpdateRule::AdamW { .. }
                    | UpdateRule::Lion { .. }
                    | UpdateRule::Sgd { .. }
                    | UpdateRule::Direction,
                    _,
                ) => {
                    unreachable!("the check of the operation counts the states")
                }
            }
            if let Some(weights) = weights {
                for (weight, &master) in weights.iter_mut().zip(&*master) {
                    *weight = W::narrow(master);
                }
            }
        });
    }
}

fn adamw<G, S>(
    constants: Constants<G::Accumulator>,
    (beta1, beta2): (G::Accumulator, G::Accumulator),
    epsilon: G::Accumulator,
    gradient: &[G],
    master: &mut [G::Accumulator],
    first: &mut [S],
    second: &mut [S],
) where
    G: Element,
    S: Element<Accumulator = G::Accumulator>,
{
    let (one, keep) = (G::Accumulator::ONE, constants.keep());
    for (((&gradient, master), first), second) in gradient.iter().zip(master).zip(first).zip(second) {
        let g = gradient.widen() * constants.factor;
        let m = beta1.mul_add(first.widen(), (one - beta1) * g);
        let v = beta2.mul_add(second.widen(), (one - beta2) * g * g);
        *first = S::narrow(m);
        *second = S::narrow(v);
        let step = m * constants.corrections.0 / ((v * constants.corrections.1).sqrt() + epsilon);
        *master = *master * keep - constants.rate * step;
    }
}

fn lion<G, S>(
    constants: Constants<G::Accumulator>,
    (beta1, beta2): (G::Accumulator, G::Accumulator),
    gradient: &[G],
    master: &mut [G::Accumulator],
    momentum: &mut [S],
) where
    G: Element,
    S: Element<Accumulator = G::Accumulator>,
{
    let (zero, one, keep) = (G::Accumulator::ZERO, G::Accumulator::ONE, constants.keep());
    for ((&gradient, master), momentum) in gradient.iter().zip(master).zip(momentum) {
        let g = gradient.widen() * constants.factor;
        let m = momentum.widen();
        let direction = beta1.mul_add(m, (one - beta1) * g);
        *momentum = S::narrow(beta2.mul_add(m, (one - beta2) * g));
        // An element whose gradients were all zero does not move.
        let step = match (direction > zero, direction < zero) {
            (true, _) => constants.rate,
            (_, true) => -constants.rate,
            (false, false) => zero,
        };
        *master = *master * keep - step;
    }
}

fn sgd_with_momentum<G, S>(
    constants: Constants<G::Accumulator>,
    momentum: G::Accumulator,
    nesterov: bool,
    gradient: &[G],
    master: &mut [G::Accumulator],
    buffer: &mut [S],
) where
    G: Element,
    S: Element<Accumulator = G::Accumulator>,
{
    for ((&gradient, master), buffer) in gradient.iter().zip(master).zip(buffer) {
        let g = constants.decay.mul_add(*master, gradient.widen() * constants.factor);
        let b = momentum.mul_add(buffer.widen(), g);
        *buffer = S::narrow(b);
        let step = if nesterov { momentum.mul_add(b, g) } else { b };
        *master = *master - constants.rate * step;
    }
}

fn sgd<G: Element>(constants: Constants<G::Accumulator>, gradient: &[G], master: &mut [G::Accumulator]) {
    for (&gradient, master) in gradient.iter().zip(master) {
        let g = constants.decay.mul_add(*master, gradient.widen() * constants.factor);
        *master = *master - constants.rate * g;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;
    use crate::cpu::testing::{TestBackend, assert_close, random};
    use crate::ops::Segment;

    const RULES: [UpdateRule; 6] = [
        UpdateRule::AdamW { betas: (0.875, 0.75), epsilon: 1e-3 },
        UpdateRule::Lion { betas: (0.875, 0.75) },
        UpdateRule::Sgd { momentum: 0.75, nesterov: false },
        UpdateRule::Sgd { momentum: 0.75, nesterov: true },
        UpdateRule::Sgd { momentum: 0.0, nesterov: false },
        UpdateRule::Direction,
    ];

    /// Two updates of 10 parameters in two ranges, the first 6 with decay, the last 2 at twice the rate. Returns master
    /// weights, two states and the copy. A state that the rule does not have is zero.
    fn two_updates(rule: UpdateRule, types: [DType; 4], skip: f64) -> [Vec<f64>; 4] {
        let [gradients, masters, states, copies] = types;
        let backend = TestBackend::new(1);
        let gradient = backend.buffer(&random(10, 1), gradients);
        let master = backend.buffer(&random(10, 2), masters);
        let [first, second] = [(); 2].map(|()| backend.buffer(&[0.0; 10], states));
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
            let segment = |start, len, rate_factor, decay| Segment { start, len, rate_factor, decay };
            let (whole, cut) = (
                [segment(0, 5, 1.0, 0.5)],
                [segment(0, 1, 1.0, 0.5), segment(1, 2, 1.0, 0.0), segment(3, 2, 2.0, 0.0)],
            );
            let parameters = [0..5, 5..10].map(|part| Parameters {
                gradient: gradient.slice(part.clone()),
                master: master.slice(part.clone()),
                states: [(0, &first), (1, &second)]
                    .map(|(i, state)| (i < rule.states()).then_some(state.slice(part.clone()))),
                weights: (copies != masters).then_some(weights.slice(part.clone())),
                segments: if part.start == 0 { &whole } else { &cut },
            });
            let control = backend.buffer(&slots, masters);
            backend.cpu.update(Update { parameters: &parameters, control: control.view(), rule });
        }
        [&master, &first, &second, &weights].map(|buffer| backend.values(buffer.view()))
    }

    /// The same, as the formulas of [`UpdateRule`] say.
    fn by_definition(rule: UpdateRule) -> [Vec<f64>; 3] {
        let (gradient, mut master) = (random(10, 1), random(10, 2));
        let (mut first, mut second) = (vec![0.0; 10], vec![0.0; 10]);
        for update in 1..=2 {
            for i in 0..10 {
                let (g, w) = (0.5 * gradient[i], master[i]);
                let decay = if i < 6 { 0.5 } else { 0.0 };
                let rate = if i < 8 { 0.125 } else { 0.25 };
                master[i] = match rule {
                    UpdateRule::AdamW { betas: (beta1, beta2), epsilon } => {
                        first[i] = beta1 * first[i] + (1.0 - beta1) * g;
                        second[i] = beta2 * second[i] + (1.0 - beta2) * g * g;
                        let m: f64 = first[i] / (1.0 - beta1.powi(update));
                        let v: f64 = second[i] / (1.0 - beta2.powi(update));
                        w - rate * (decay * w + m / (v.sqrt() + epsilon))
                    }
                    UpdateRule::Lion { betas: (beta1, beta2) } => {
                        let direction: f64 = beta1 * first[i] + (1.0 - beta1) * g;
                        first[i] = beta2 * first[i] + (1.0 - beta2) * g;
                        w - rate * (decay * w + direction.signum())
                    }
                    UpdateRule::Sgd { momentum, nesterov } => {
                        let g = g + decay * w;
                        let buffer = momentum * first[i] + g;
                        if momentum > 0.0 {
                            first[i] = buffer;
                        }
                        w - rate * if nesterov { g + momentum * buffer } else { buffer }
                    }
                    UpdateRule::Direction => w - rate * (decay * w + gradient[i]),
                };
            }
        }
        [master, first, second]
    }

    #[test]
    fn every_rule_is_its_definition_in_every_mix_of_types() {
        use DType::{BF16, F16, F32, F64};
        for rule in RULES {
            let expected = by_definition(rule);
            for (types, tolerance) in [
                ([F64, F64, F64, F64], 1e-14),
                ([F32, F32, F32, F32], 1e-6),
                ([F32, F32, F32, BF16], 1e-6),
                ([BF16, F32, F32, F16], 2e-2),
                ([F16, F32, BF16, F16], 2e-2),
                ([BF16, F32, BF16, BF16], 2e-2),
            ] {
                let [master, first, second, weights] = two_updates(rule, types, 0.0);
                assert_close(&master, &expected[0], tolerance);
                assert_close(&first, &expected[1], tolerance);
                assert_close(&second, &expected[2], tolerance);
                if types[3] != types[1] {
                    assert_close(&weights, &master, 4e-3);
                }
            }
        }
    }

    #[test]
    fn an_element_without_gradients_stays_under_lion() {
        let backend = TestBackend::new(1);
        let [gradient, momentum] = [(); 2].map(|()| backend.buffer(&[0.0; 4], DType::F32));
        let master = backend.buffer(&[0.5; 4], DType::F32);
        let mut slots = [1.0; control::LEN];
        slots[control::SKIP] = 0.0;
        backend.cpu.update(Update {
            parameters: &[Parameters {
                gradient: gradient.view(),
                master: master.view(),
                states: [Some(momentum.view()), None],
                weights: None,
                segments: &[Segment { start: 0, len: 4, rate_factor: 1.0, decay: 0.0 }],
            }],
            control: backend.buffer(&slots, DType::F32).view(),
            rule: UpdateRule::Lion { betas: (0.9, 0.99) },
        });
        assert_eq!(backend.values(master.view()), [0.5; 4]);
    }

    #[test]
    fn a_skipped_step_changes_nothing() {
        for rule in RULES {
            let [master, first, ..] = two_updates(rule, [DType::F64; 4], 1.0);
            assert_eq!((master, first), (random(10, 2), vec![0.0; 10]));
        }
    }
}

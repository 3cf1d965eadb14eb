//! The end of a step: its control values, and the update.

use kintsugi_conformance::COMPUTE;
use kintsugi_conformance::step::{RULES, UpdateTypes, momentum, sums_of_squares, update, update_control};
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{LearningRate, LossScaler, RateCurve};

use crate::test_backend::{agree, any_gpu};

const CONSTANT: LearningRate = LearningRate {
    peak: 0.1,
    floor: 0.01,
    warmup: 2,
    curve: RateCurve::Constant,
    decay_start: 1,
    decay_steps: 3,
};

#[test]
fn the_control_goes_through_good_and_bad_steps() {
    let Some(gpu) = any_gpu() else { return };
    let [cosine, linear, inverse_sqrt, sqrt] =
        [RateCurve::Cosine, RateCurve::Linear, RateCurve::InverseSqrt, RateCurve::Sqrt]
            .map(|curve| LearningRate { curve, ..CONSTANT });
    let late = LearningRate { decay_start: 3, ..linear };
    let dynamic = Some(LossScaler { window: 2, largest: 16.0 });
    let cases = [
        (CONSTANT, dynamic, 1.0),
        (cosine, None, 0.0),
        (linear, None, 0.0),
        (late, None, 0.0),
        (inverse_sqrt, None, 0.0),
        (sqrt, None, 0.0),
    ];
    for (rate, scaler, clip) in cases {
        agree(&gpu, DType::F32, &format!("control with {rate:?} and {scaler:?}"), |backend| {
            update_control(backend, rate, scaler, clip)
        });
    }
}

#[test]
fn every_rule_updates_or_skips() {
    let Some(gpu) = any_gpu() else { return };
    for (rule, gradients) in RULES.into_iter().flat_map(|rule| COMPUTE.map(|gradients| (rule, gradients))) {
        for states in [DType::F32, DType::BF16] {
            for weights in [None, Some(DType::BF16), Some(DType::F16)] {
                for skip in [0.0, 1.0] {
                    let types = UpdateTypes { gradients, states, weights };
                    agree(&gpu, types.coarsest(), &format!("{rule:?}, {types:?}, skip {skip}"), |backend| {
                        update(backend, rule, types, skip)
                    });
                }
            }
        }
    }
}

#[test]
fn squares_of_many_gradients_are_summed_at_once() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        agree(&gpu, dtype, "sums of squares", sums_of_squares);
    }
}

#[test]
fn momenta_give_directions_that_are_normalised_and_added() {
    let Some(gpu) = any_gpu() else { return };
    for (gradients, states, directions) in [
        (DType::F32, DType::F32, DType::F32),
        (DType::BF16, DType::F32, DType::BF16),
        (DType::F16, DType::BF16, DType::BF16),
    ] {
        let coarsest = if directions == DType::F32 { DType::F32 } else { DType::BF16 };
        for (nesterov, skip) in [(true, 0.0), (false, 0.0), (true, 1.0)] {
            agree(&gpu, coarsest, &format!("momentum, Nesterov {nesterov}, skip {skip}"), |backend| {
                momentum(backend, [gradients, states, directions], nesterov, skip)
            });
        }
    }
}

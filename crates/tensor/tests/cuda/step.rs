//! The end of a step: what it does, and the update.

use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{AdamW, LearningRate, LossScaler, Segment, UpdateControl, control};

use crate::lab::{COMPUTE, agree, card, random};

const CONSTANT: LearningRate = LearningRate { peak: 0.1, floor: 0.01, warmup: 2, steps: 10, cosine: false };

#[test]
fn the_control_goes_through_good_and_bad_steps() {
    let Some(card) = card() else { return };
    let steps = [(1024.0, 6.0), (16.0, 5.0), (f32::INFINITY, 5.0), (1.0, f32::NAN), (0.0, 4.0), (9.0, 3.0)];
    let cosine = LearningRate { cosine: true, ..CONSTANT };
    let dynamic = Some(LossScaler { window: 2, largest: 16.0 });
    for (rate, scaler, clip) in [(CONSTANT, dynamic, 1.0), (cosine, None, 0.0)] {
        agree(&card, DType::F32, &format!("control with {scaler:?}"), |lab| {
            let mut slots = [0.0; control::LEN];
            slots[control::LOSS_SCALE] = 8.0;
            let (slots, mut seen) = (lab.numbers(&slots, DType::F32), Vec::new());
            for (squares, losses) in steps {
                let [squares, losses] = [squares, losses].map(|x| lab.numbers(&[x], DType::F32));
                lab.backend.update_control(UpdateControl {
                    control: slots.view(),
                    sum_of_squares: squares.view(),
                    loss_sum: losses.view(),
                    tokens: 2.0,
                    clip,
                    rate,
                    betas: (0.9, 0.95),
                    scaler,
                });
                let now = lab.sums(control::LEN);
                lab.backend.copy(slots.view(), now.view());
                seen.push(now);
            }
            seen
        });
    }
}

#[test]
fn adamw_updates_or_skips() {
    const LEN: usize = 5003;
    let Some(card) = card() else { return };
    let segments =
        [Segment { start: 0, len: 1000, decay: true }, Segment { start: 1003, len: 4000, decay: false }];
    for gradients in COMPUTE {
        for moments in [DType::F32, DType::BF16] {
            for weights in [None, Some(DType::BF16), Some(DType::F16)] {
                for skip in [0.0, 1.0] {
                    let what = format!("AdamW, moments {moments:?}, weights {weights:?}, skip {skip}");
                    // What is rounded last decides how close results can be.
                    let coarsest =
                        if moments == DType::BF16 || weights.is_some() { DType::BF16 } else { gradients };
                    agree(&card, coarsest, &what, |lab| {
                        let mut slots = [0.5; control::LEN];
                        slots[control::SKIP] = skip;
                        slots[control::RATE] = 0.01;
                        let slots = lab.numbers(&slots, DType::F32);
                        let gradient = lab.numbers(&random(LEN, 1), gradients);
                        let master = lab.numbers(&random(LEN, 2), DType::F32);
                        let first = lab.numbers(&random(LEN, 3), moments);
                        let second: Vec<f32> = random(LEN, 4).iter().map(|x| x * x).collect();
                        let second = lab.numbers(&second, moments);
                        let copy = weights.map(|dtype| lab.blank(LEN, dtype));
                        lab.backend.adamw(AdamW {
                            gradient: gradient.view(),
                            master: master.view(),
                            first_moment: first.view(),
                            second_moment: second.view(),
                            weights: copy.as_ref().map(Into::into),
                            segments: &segments,
                            control: slots.view(),
                            betas: (0.9, 0.95),
                            epsilon: 1e-8,
                            weight_decay: 0.1,
                        });
                        [master, first, second].into_iter().chain(copy).collect()
                    });
                }
            }
        }
    }
}

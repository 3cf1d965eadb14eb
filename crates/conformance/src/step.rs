//! The end of a step: its control values, and the update.

use kintsugi_tensor::ops::{
    LearningRate, LossScaler, Momentum, Normalize, Parameters, ScaledSum, Segment, Squares, SumsOfSquares,
    Update, UpdateControl, UpdateRule, control,
};
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::{TestBackend, random};

/// Every rule, with and without states.
pub const RULES: [UpdateRule; 6] = [
    UpdateRule::AdamW { betas: (0.9, 0.95), epsilon: 1e-8 },
    UpdateRule::Lion { betas: (0.9, 0.99) },
    UpdateRule::Sgd { momentum: 0.9, nesterov: false },
    UpdateRule::Sgd { momentum: 0.9, nesterov: true },
    UpdateRule::Sgd { momentum: 0.0, nesterov: false },
    UpdateRule::Direction,
];

/// The control values after good and bad steps.
pub fn update_control(
    backend: &TestBackend,
    rate: LearningRate,
    scaler: Option<LossScaler>,
    clip: f64,
) -> Vec<Buffer> {
    let steps = [(1024.0, 6.0), (16.0, 5.0), (f32::INFINITY, 5.0), (1.0, f32::NAN), (0.0, 4.0), (9.0, 3.0)];
    let mut slots = [0.0; control::LEN];
    slots[control::LOSS_SCALE] = 8.0;
    let (slots, mut seen) = (backend.numbers(&slots, DType::F32), Vec::new());
    for (squares, losses) in steps {
        let [squares, losses] = [squares, losses].map(|x| backend.numbers(&[x], DType::F32));
        backend.device.update_control(UpdateControl {
            control: slots.view(),
            sum_of_squares: squares.view(),
            loss_sum: losses.view(),
            tokens: 2.0,
            clip,
            rate,
            betas: (0.9, 0.95),
            scaler,
        });
        let now = backend.sums(control::LEN);
        backend.device.copy(slots.view(), now.view());
        seen.push(now);
    }
    seen
}

/// The types of an update: of gradients, of states, and of the copy of the weights.
#[derive(Clone, Copy, Debug)]
pub struct UpdateTypes {
    /// Of gradients.
    pub gradients: DType,
    /// Of states.
    pub states: DType,
    /// Of the weights that layers read.
    pub weights: Option<DType>,
}

impl UpdateTypes {
    /// The coarsest rounding decides how close results can be.
    pub fn coarsest(self) -> DType {
        if self.states == DType::BF16 || self.weights.is_some() { DType::BF16 } else { self.gradients }
    }
}

/// An update of many parameters, large and small, which is skipped if `skip` is 1.
pub fn update(backend: &TestBackend, rule: UpdateRule, types: UpdateTypes, skip: f32) -> Vec<Buffer> {
    const LEN: usize = 5003 + 150 * 7;
    let UpdateTypes { gradients, states: moments, weights } = types;
    let segment = |start, len, rate_factor, decay| Segment { start, len, rate_factor, decay };
    let segments = [segment(0, 1000, 1.0, 0.1), segment(1003, 4000, 0.5, 0.0)];
    let small: Vec<Segment> =
        (0..150).map(|i| segment(7 * i, 7, 1.0, if i % 2 == 0 { 0.1 } else { 0.0 })).collect();
    let mut slots = [0.5; control::LEN];
    slots[control::SKIP] = skip;
    slots[control::RATE] = 0.01;
    let slots = backend.numbers(&slots, DType::F32);
    let gradient = backend.numbers(&random(LEN, 1), gradients);
    let master = backend.numbers(&random(LEN, 2), DType::F32);
    let first = backend.numbers(&random(LEN, 3), moments);
    let second: Vec<f32> = random(LEN, 4).iter().map(|x| x * x).collect();
    let second = backend.numbers(&second, moments);
    let copy = weights.map(|dtype| backend.blank(LEN, dtype));
    // Two ranges: all but the end, and the end in many small unaligned segments.
    let parameters = [(0..5003, &segments[..]), (5003..LEN, &small[..])].map(|(part, segments)| Parameters {
        gradient: gradient.slice(part.clone()),
        master: master.slice(part.clone()),
        states: [(0, &first), (1, &second)]
            .map(|(i, state)| (i < rule.states()).then_some(state.slice(part.clone()))),
        weights: copy.as_ref().map(|copy| copy.slice(part.clone())),
        segments,
    });
    backend.device.update(Update { parameters: &parameters, control: slots.view(), rule });
    [master, first, second].into_iter().chain(copy).collect()
}

/// Sums of squares of more parts than one launch takes, of all lengths, some unaligned; some share a sum, some have none.
pub fn sums_of_squares(backend: &TestBackend) -> Vec<Buffer> {
    let (many, total) = (backend.input(120_000, 1), backend.numbers(&[0.5], DType::F32));
    let own = backend.numbers(&[0.25; 200], DType::F32);
    // More parts than one launch takes, of all lengths, some unaligned; some share a sum, some have none.
    let parts: Vec<Squares> = (0..200)
        .map(|i| {
            let (start, len) = (300 * i, if i == 7 { 50_000 } else { i % 23 * 11 });
            let own = (i % 3 > 0).then(|| own.slice(i / 3..i / 3 + 1));
            Squares { from: many.slice(start..start + len), own, counts: i % 2 == 0 }
        })
        .collect();
    backend.device.sums_of_squares(SumsOfSquares { parts: &parts, total: Some(total.view()) });
    vec![own, total]
}

/// A momentum, and the direction that follows from it, which is normalised and added to another one. The types are those of the
/// gradient, of the momentum and of directions.
pub fn momentum(
    backend: &TestBackend,
    [gradients, states, directions]: [DType; 3],
    nesterov: bool,
    skip: f32,
) -> Vec<Buffer> {
    const LEN: usize = 5003;
    let mut slots = [0.5; control::LEN];
    slots[control::SKIP] = skip;
    let slots = backend.numbers(&slots, DType::F32);
    let gradient = backend.numbers(&random(LEN, 1), gradients);
    let momentum = backend.numbers(&random(LEN, 2), states);
    let out = backend.numbers(&random(LEN, 3), directions);
    let other = backend.numbers(&random(LEN, 4), directions);
    let sum = backend.numbers(&[9.0], DType::F32);
    backend.device.momentum(Momentum {
        gradient: gradient.view(),
        momentum: momentum.view(),
        out: out.view(),
        control: slots.view(),
        beta: 0.95,
        nesterov,
    });
    let (x, y, sum_of_squares) = (out.view(), other.view(), sum.view());
    backend.device.normalize(Normalize { x, sum_of_squares, epsilon: 1e-7 });
    backend.device.scaled_sum(ScaledSum { x, y, factors: (2.0, -0.5) });
    vec![momentum, out]
}

//! The end of a step: sums of squares, the step's control values, and the updates.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::{
    LearningRate, LossScaler, Momentum, Normalize, Parameters, RateCurve, ScaledSum, Segment, Squares,
    SumsOfSquares, Update, UpdateControl, UpdateRule, control,
};
use kintsugi_tensor::{Backend, DType};

use crate::support::{Both, COMPUTE, NULL, Pair, kernels, pointer, random, size, suffix};

/// As in `optimizer.cu`: elements of a chunk, and entries of a table with their words.
const SQUARES_CHUNK: usize = 16384;
const SQUARES_TABLE: usize = 96 * 4;
const UPDATE_CHUNK: usize = 4096;
const UPDATE_TABLE: usize = 56 * 8;

/// Threads of a block. The block that ends a sum has more.
const THREADS: usize = 256;
const END_THREADS: usize = 1024;

/// A table by value, filled up with zeros.
fn table(words: &[u64], len: usize) -> Argument {
    let words = words.iter().chain(std::iter::repeat(&0)).take(len);
    words.flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn block_and_flag(block: usize, flag: bool) -> u64 {
    block as u64 | u64::from(flag) << 32
}

#[test]
fn squares_of_many_gradients() {
    let Some(code) = kernels("optimizer") else { return };
    let mut pair = Pair::new(code, 1);
    for dtype in COMPUTE {
        let many = pair.random("gradients", 30_000, dtype, 1);
        let own = pair.numbers("own", &[0.25; 3], DType::F32);
        let total = pair.numbers("total", &[0.5], DType::F32);
        // Start, length, own sum, whether it counts. The second and third share a sum.
        let parts = [
            (0, 20_000, None, true),
            (20_000, 777, Some(1), true),
            (20_777, 5, Some(1), false),
            (21_000, 900, Some(2), true),
        ];
        let squares: Vec<Squares> = parts
            .iter()
            .map(|&(start, len, sum, counts)| Squares {
                from: many.cpu.slice(start..start + len),
                own: sum.map(|sum| own.cpu.slice(sum..sum + 1)),
                counts,
            })
            .collect();
        pair.cpu.sums_of_squares(SumsOfSquares { parts: &squares, total: Some(total.cpu.view()) });
        let (mut words, mut blocks) = (Vec::new(), 0);
        for &(start, len, sum, counts) in &parts {
            let from = many.address + (start * dtype.bytes()) as u64;
            let sum = sum.map_or(NULL, |sum| own.address + 4 * sum as u64);
            words.extend([from, sum, len as u64, block_and_flag(blocks, counts)]);
            blocks += len.div_ceil(SQUARES_CHUNK);
        }
        let (count, table) = (Argument::from(parts.len() as u32), table(&words, SQUARES_TABLE));
        let partial = pair.scratch(8 * blocks);
        let arguments = [table.clone(), count.clone(), partial.into()];
        pair.launch(&format!("squares_{}", suffix(dtype)), Grid::new(blocks, THREADS), &arguments);
        let arguments = [table, count, (blocks as u32).into(), partial.into(), pointer(&total)];
        pair.launch("squares_end", Grid::new(1, END_THREADS), &arguments);
        pair.agree(&own, &format!("own sums in {dtype:?}"));
        pair.agree(&total, &format!("total in {dtype:?}"));
    }
}

#[test]
fn control_goes_through_good_and_bad_steps() {
    let Some(code) = kernels("optimizer") else { return };
    let mut pair = Pair::new(code, 2);
    let constant = LearningRate {
        peak: 0.1,
        floor: 0.01,
        warmup: 2,
        curve: RateCurve::Constant,
        decay_start: 1,
        decay_steps: 3,
    };
    let dynamic = Some(LossScaler { window: 2, largest: 16.0 });
    let cases = [
        (RateCurve::Constant, dynamic, 1.0),
        (RateCurve::Cosine, None, 0.0),
        (RateCurve::InverseSqrt, None, 0.0),
        (RateCurve::Sqrt, None, 0.0),
    ];
    let steps = [(1024.0, 6.0), (16.0, 5.0), (f32::INFINITY, 5.0), (1.0, f32::NAN), (0.0, 4.0), (9.0, 3.0)];
    for (curve, scaler, clip) in cases {
        let rate = LearningRate { curve, ..constant };
        let mut slots = [0.0; control::LEN];
        slots[control::LOSS_SCALE] = 8.0;
        let slots = pair.numbers("slots", &slots, DType::F32);
        for (squares, losses) in steps {
            let [squares, losses] = [squares, losses].map(|x| pair.numbers("a sum", &[x], DType::F32));
            pair.cpu.update_control(UpdateControl {
                control: slots.cpu.view(),
                sum_of_squares: squares.cpu.view(),
                loss_sum: losses.cpu.view(),
                tokens: 2.0,
                clip,
                rate,
                betas: (0.9, 0.95),
                scaler,
            });
            let LossScaler { window, largest } = scaler.unwrap_or(LossScaler { window: 0, largest: 0.0 });
            let doubles =
                |values: &[f64]| values.iter().map(|&value| value.into()).collect::<Vec<Argument>>();
            let arguments = [
                vec![pointer(&slots), pointer(&squares), pointer(&losses)],
                doubles(&[2.0, clip, rate.peak, rate.floor]),
                doubles(&[rate.warmup as f64, rate.decay_start as f64, rate.decay_steps as f64]),
                vec![(rate.curve as u32).into()],
                doubles(&[0.9, 0.95, window as f64, largest]),
            ];
            pair.launch("update_control", Grid::new(1, 1), &arguments.concat());
            pair.agree(&slots, &format!("control with {curve:?} and {scaler:?}"));
        }
    }
}

/// Tensors of one parameter.
struct Tensors {
    gradient: Both,
    master: Both,
    states: [Both; 2],
    weights: Option<Both>,
}

/// Every rule, with and without states.
const RULES: [UpdateRule; 6] = [
    UpdateRule::AdamW { betas: (0.9, 0.95), epsilon: 1e-8 },
    UpdateRule::Lion { betas: (0.9, 0.99) },
    UpdateRule::Sgd { momentum: 0.9, nesterov: false },
    UpdateRule::Sgd { momentum: 0.9, nesterov: true },
    UpdateRule::Sgd { momentum: 0.0, nesterov: false },
    UpdateRule::Direction,
];

#[test]
fn every_rule_updates_or_skips() {
    const LEN: usize = 5003;
    let Some(code) = kernels("optimizer") else { return };
    let mut pair = Pair::new(code, 3);
    let segments = [
        Segment { start: 0, len: 1000, rate_factor: 1.0, decay: 0.1 },
        Segment { start: 1003, len: 4000, rate_factor: 0.5, decay: 0.0 },
    ];
    for (rule, gradients) in RULES.into_iter().flat_map(|rule| COMPUTE.map(|gradients| (rule, gradients))) {
        for (states, weights, skip) in [
            (DType::F32, None, 0.0),
            (DType::F32, Some(DType::BF16), 0.0),
            (DType::BF16, Some(DType::F16), 0.0),
            (DType::F32, Some(DType::F16), 1.0),
        ] {
            let what =
                format!("{rule:?}, {gradients:?}, states {states:?}, weights {weights:?}, skip {skip}");
            let mut slots = [0.5; control::LEN];
            slots[control::SKIP] = skip;
            slots[control::RATE] = 0.01;
            let slots = pair.numbers("slots", &slots, DType::F32);
            let squares: Vec<f32> = random(LEN, 4).iter().map(|x| x * x).collect();
            let tensors = Tensors {
                gradient: pair.random("gradient", LEN, gradients, 1),
                master: pair.random("master", LEN, DType::F32, 2),
                states: [pair.random("states", LEN, states, 3), pair.numbers("states", &squares, states)],
                weights: weights.map(|dtype| pair.blank("weights", LEN, dtype)),
            };
            pair.cpu.update(Update {
                parameters: &[Parameters {
                    gradient: tensors.gradient.cpu.view(),
                    master: tensors.master.cpu.view(),
                    states: [0, 1].map(|i| (i < rule.states()).then_some(tensors.states[i].cpu.view())),
                    weights: tensors.weights.as_ref().map(|weights| weights.cpu.view()),
                    segments: &segments,
                }],
                control: slots.cpu.view(),
                rule,
            });
            launch(&mut pair, rule, &tensors, &segments, &slots);
            let [first, second] = &tensors.states;
            for result in [&tensors.master, first, second].into_iter().chain(&tensors.weights) {
                pair.agree(result, &what);
            }
        }
    }
}

fn launch(pair: &mut Pair, rule: UpdateRule, tensors: &Tensors, segments: &[Segment], slots: &Both) {
    let (mut words, mut blocks) = (Vec::new(), 0);
    for segment in segments {
        let at = |both: &Both| both.address + (segment.start * both.cpu.dtype().bytes()) as u64;
        words.extend([&tensors.gradient, &tensors.master].map(at));
        words.extend([0, 1].map(|i| if i < rule.states() { at(&tensors.states[i]) } else { NULL }));
        words.push(tensors.weights.as_ref().map_or(NULL, at));
        let [rate_factor, decay] =
            [segment.rate_factor, segment.decay].map(|x| u64::from((x as f32).to_bits()));
        words.extend([segment.len as u64, blocks as u64, rate_factor | decay << 32]);
        blocks += segment.len.div_ceil(UPDATE_CHUNK);
    }
    let weights = tensors.weights.as_ref().map_or(DType::BF16, |weights| weights.cpu.dtype());
    let types = [tensors.gradient.cpu.dtype(), tensors.states[0].cpu.dtype(), weights].map(suffix);
    let mut arguments = vec![table(&words, UPDATE_TABLE), (segments.len() as u32).into(), pointer(slots)];
    let number = |number: f64| Argument::from(number as f32);
    match rule {
        UpdateRule::AdamW { betas, epsilon } => arguments.extend([betas.0, betas.1, epsilon].map(number)),
        UpdateRule::Lion { betas } => arguments.extend([betas.0, betas.1].map(number)),
        UpdateRule::Sgd { momentum, nesterov } => {
            arguments.extend([number(momentum), u32::from(nesterov).into()]);
        }
        UpdateRule::Direction => {}
    }
    let name = format!("{}_{}", rule.name(), types.join("_"));
    pair.launch(&name, Grid::new(blocks, THREADS), &arguments);
}

#[test]
fn momenta_are_updated_or_kept() {
    const LEN: usize = 5003;
    let Some(code) = kernels("optimizer") else { return };
    let mut pair = Pair::new(code, 4);
    for (gradients, states, directions, nesterov, skip) in [
        (DType::F32, DType::F32, DType::F32, false, 0.0),
        (DType::F32, DType::F32, DType::BF16, true, 0.0),
        (DType::BF16, DType::BF16, DType::BF16, true, 0.0),
        (DType::F16, DType::F32, DType::BF16, false, 1.0),
    ] {
        let mut slots = [0.5; control::LEN];
        slots[control::SKIP] = skip;
        let slots = pair.numbers("slots", &slots, DType::F32);
        let gradient = pair.random("gradient", LEN, gradients, 1);
        let momentum = pair.random("momentum", LEN, states, 2);
        let out = pair.numbers("direction", &vec![0.25; LEN], directions);
        let views = [&gradient, &momentum, &out].map(|both| both.cpu.view());
        let [of_gradient, of_momentum, of_out] = views;
        let control = slots.cpu.view();
        pair.cpu.momentum(Momentum {
            gradient: of_gradient,
            momentum: of_momentum,
            out: of_out,
            control,
            beta: 0.95,
            nesterov,
        });
        let words = [gradient.address, NULL, momentum.address, NULL, out.address, LEN as u64, 0, 0];
        let arguments = [
            table(&words, UPDATE_TABLE),
            1_u32.into(),
            pointer(&slots),
            0.95_f32.into(),
            u32::from(nesterov).into(),
        ];
        let name = format!("momentum_{}", [gradients, states, directions].map(suffix).join("_"));
        pair.launch(&name, Grid::new(LEN.div_ceil(UPDATE_CHUNK), THREADS), &arguments);
        for result in [&momentum, &out] {
            pair.agree(result, &name);
        }
    }
}

#[test]
fn matrices_are_normalised_and_added() {
    const LEN: usize = 1003;
    let Some(code) = kernels("optimizer") else { return };
    let mut pair = Pair::new(code, 5);
    for dtype in COMPUTE {
        let (x, y) = (pair.random("x", LEN, dtype, 1), pair.random("y", LEN, dtype, 2));
        let sum = pair.numbers("sum", &[16.0], DType::F32);
        let (elements, wide) = (size(LEN), Argument::from(false));
        let grid = Grid::new(LEN.div_ceil(THREADS), THREADS);
        let (of_x, sum_of_squares) = (x.cpu.view(), sum.cpu.view());
        pair.cpu.normalize(Normalize { x: of_x, sum_of_squares, epsilon: 1e-7 });
        let arguments = [pointer(&x), pointer(&sum), elements.clone(), 1e-7_f32.into(), wide.clone()];
        pair.launch(&format!("normalize_{}", suffix(dtype)), grid, &arguments);
        pair.agree(&x, &format!("normalised in {dtype:?}"));
        pair.cpu.scaled_sum(ScaledSum { x: x.cpu.view(), y: y.cpu.view(), factors: (2.0, -0.5) });
        let arguments = [pointer(&x), pointer(&y), elements, 2.0_f32.into(), (-0.5_f32).into(), wide];
        pair.launch(&format!("scaled_sum_{}", suffix(dtype)), grid, &arguments);
        pair.agree(&x, &format!("a sum in {dtype:?}"));
    }
}

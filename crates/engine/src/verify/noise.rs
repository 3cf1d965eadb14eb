//! How far quantised transfers may move a run from one without codes, and products in 8 bits from those of another layout.
//!
//! A code is off by an error that is spread evenly over one step of its block, so its root mean square is `scale / √12`, with
//! `scale = max / q`. Relative to the root mean square of the numbers that is `ρ / (q·√12)`, where ρ is the ratio of a block's
//! largest number to that. Gradients have heavy tails; ρ is that of Student's t distribution with 3 degrees of freedom, which
//! docs/quantisation.md measures. Errors of several quantisations, and of several factors of a product, are independent, so their
//! squares add.
//!
//! A layout gives products in 8 bits slightly other numbers, and some of these round to the next code. So two layouts differ by no more
//! than two independent roundings. A rounding is off by an error that is spread evenly over the distance of two codes, `2^-m` of a
//! number's power of two, so its root mean square is `2^-m / √12` of that, and `0.74` of it relative to numbers whose logarithms are
//! spread evenly.

use kintsugi_plan::{Codes, Integer, OptimizerKind, PhaseKind, Plan, Products, Quantized};
use kintsugi_tensor::Float8;

/// What codes may add to each difference.
pub(super) struct Noise {
    pub loss: f64,
    pub norm: f64,
    pub gradient: f64,
    pub weight: f64,
}

impl Noise {
    /// The noise of a plan; `None` if nothing is quantised.
    pub(super) fn of(plan: &Plan) -> Option<Self> {
        let Quantized { weights, refresh, gradients } = plan.sharding.quantized;
        let in_8_bits = plan.precision.products == Products::Fp8;
        if plan.sharding.quantized == Quantized::NONE && !in_8_bits {
            return None;
        }
        let once = |codes: Option<Codes>| codes.map_or(0.0, error);
        let weights = once(weights).hypot(once(refresh));
        let reductions = [plan.sharding.inner_reductions(), plan.sharding.outer_reductions()].concat();
        let quantisations = reductions
            .iter()
            .filter(|phase| phase.kind == PhaseKind::Scatter && phase.codes.is_some())
            .count();
        let gradients = once(gradients) * (quantisations as f64).sqrt();
        // A gradient comes through the matrices of all layers and back.
        let matrices = (2 * MATRICES * plan.model.layers) as f64;
        let gradient = gradients.hypot(weights * matrices.sqrt());
        // Each matrix of a layer rounds an activation and a gradient.
        let rounded = if in_8_bits { [Float8::E4M3, Float8::E5M2].map(rounding) } else { [0.0; 2] };
        let rounded = 2.0_f64.sqrt() * rounded[0].hypot(rounded[1]) * (0.5 * matrices).sqrt();
        let gradient = gradient.hypot(rounded);
        let moved = moved_apart(plan, gradient);
        // Random errors of all weights change the loss by their size times the gradient's norm.
        let loss = SENSITIVITY * (weights * plan.model.init_std + moved);
        Some(Noise { loss, norm: gradient, gradient, weight: weights + moved / plan.model.init_std })
    }
}

/// Matrices of a layer that activations pass through.
const MATRICES: usize = 4;
/// The largest norm of a gradient in a run over its smallest loss.
const SENSITIVITY: f64 = 5.0;

/// By how much the Newton–Schulz iteration multiplies the smallest singular values: 3.4445⁵.
pub(super) const AMPLIFICATION: f64 = 484.9;

/// The root mean square error of rounding to a format, relative to the numbers.
fn rounding(format: Float8) -> f64 {
    // The mean of 1/f² over f from 1 to 2 whose logarithm is spread evenly.
    let share = (0.75 / (2.0 * std::f64::consts::LN_2)).sqrt();
    f64::exp2(-f64::from(format.mantissa())) / 12.0_f64.sqrt() * share
}

/// By how much the optimizer moves the weights of two runs apart whose gradients differ by `gradient`, relatively: a root mean
/// square.
pub(super) fn moved_apart(plan: &Plan, gradient: f64) -> f64 {
    let rates = plan.optimizer.lr * plan.run.steps as f64;
    match plan.optimizer.kind {
        // A step moves every weight by about the learning rate; a relative error of its gradient turns the step by as much.
        OptimizerKind::AdamW { .. } => gradient * rates,
        // Of normally distributed numbers with such errors a share of `arctan(gradient) / π` has another sign. Each of them
        // moves by twice the rate, at worst in every step.
        OptimizerKind::Lion { .. } => 2.0 * rates * (gradient / std::f64::consts::PI).sqrt(),
        // Such errors of a matrix with many singular values of about the same size turn its orthogonal matrix by as much. Those of
        // smaller ones turn it more, up to the amplification of the iteration; the geometric mean of the two is taken. An element
        // moves by 0.2 of the rate.
        OptimizerKind::Muon { .. } => {
            0.2 * rates * (gradient * AMPLIFICATION.sqrt()).min(std::f64::consts::SQRT_2)
        }
        // A step moves all weights together by the rate times the norm, as often as the momentum repeats it.
        OptimizerKind::Sgd { momentum, .. } => {
            let clip = plan.optimizer.clip;
            let norm = if clip > 0.0 { clip } else { SENSITIVITY * (plan.model.vocab as f64).ln() };
            gradient * rates * norm / (1.0 - momentum) / (plan.parameter_count() as f64).sqrt()
        }
    }
}

/// The root mean square error of one quantisation, relative to that of the numbers.
fn error(codes: Codes) -> f64 {
    let largest = match codes.integer {
        Integer::Int8 => 127.0,
        Integer::Int4 => 7.0,
    };
    let ratio = 8.0 * (codes.block as f64 / 256.0).cbrt();
    ratio / (largest * 12.0_f64.sqrt())
}

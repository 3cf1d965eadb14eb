//! Learning-rate schedules. The CPU backend calls [`LearningRate::at`]; `optimizer.cu` has the same formulas.

/// A learning-rate schedule: linear warm-up from zero to `peak`, reached at the last warm-up step, then a curve.
/// Without a warm-up the first step has `peak`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// Highest rate.
    pub peak: f64,
    /// Lowest rate after the warm-up.
    pub floor: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// The curve after the warm-up.
    pub curve: RateCurve,
    /// The last 0-based step before the rate falls; not before the last step of the warm-up.
    pub decay_start: u64,
    /// Steps from `decay_start` to the first step with rate `floor`.
    pub decay_steps: u64,
}

/// The learning rate after the warm-up, as a function of the progress of the decay from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum RateCurve {
    /// `peak` throughout.
    Constant = 0,
    /// Half a cosine from `peak` to `floor`.
    Cosine = 1,
    /// A straight line from `peak` to `floor`.
    Linear = 2,
    /// `peak` · √(`warmup` / steps done), at least `floor`. It does not depend on the progress.
    InverseSqrt = 3,
    /// From `peak` to `floor` by the square root of the progress: fast at first (arXiv 2405.18392).
    Sqrt = 4,
}

impl LearningRate {
    /// The rate of 0-based step `step`.
    pub fn at(&self, step: u64) -> f64 {
        let LearningRate { peak, floor, warmup, .. } = *self;
        if step < warmup {
            return peak * (step + 1) as f64 / warmup as f64;
        }
        let progress = (step.saturating_sub(self.decay_start) as f64 / self.decay_steps as f64).min(1.0);
        match self.curve {
            RateCurve::Constant => peak,
            RateCurve::Cosine => {
                floor + (peak - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
            RateCurve::Linear | RateCurve::Sqrt if progress >= 1.0 => floor,
            RateCurve::Linear => peak - (peak - floor) * progress,
            RateCurve::Sqrt => peak - (peak - floor) * progress.sqrt(),
            RateCurve::InverseSqrt => (peak * (warmup.max(1) as f64 / (step + 1) as f64).sqrt()).max(floor),
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "a curve is exact at its ends")]
mod tests {
    use super::*;

    const RATE: LearningRate = LearningRate {
        peak: 3e-3,
        floor: 3e-4,
        warmup: 30,
        curve: RateCurve::Constant,
        decay_start: 29,
        decay_steps: 470,
    };

    /// The rates of 600 steps. The first 30 are the warm-up.
    fn rates(curve: RateCurve, decay_start: u64, decay_steps: u64) -> Vec<f64> {
        let rate = LearningRate { curve, decay_start, decay_steps, ..RATE };
        let rates: Vec<f64> = (0..600).map(|step| rate.at(step)).collect();
        assert!((0..30).all(|step| rates[step] == 3e-3 * (step + 1) as f64 / 30.0), "the warm-up");
        rates
    }

    #[test]
    fn a_cosine_has_the_bits_of_its_formula() {
        let rates = rates(RateCurve::Cosine, 29, 470);
        for (step, &rate) in rates.iter().enumerate().skip(30) {
            let progress = ((step - 29) as f64 / 470.0).min(1.0);
            let cosine = 3e-4 + (3e-3 - 3e-4) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
            assert_eq!(rate.to_bits(), cosine.to_bits(), "step {step}");
        }
        assert_eq!(rates[499], 3e-4);
    }

    #[test]
    fn a_line_goes_from_the_peak_to_the_floor_and_stays() {
        for (start, steps) in [(29, 470), (449, 50), (29, 100)] {
            let rates = rates(RateCurve::Linear, start, steps);
            for (step, &rate) in rates.iter().enumerate().skip(30) {
                let done = step.saturating_sub(start as usize).min(steps as usize) as f64;
                assert!((rate - (3e-3 - done * (2.7e-3 / steps as f64))).abs() < 1e-15, "step {step}");
            }
            assert_eq!(rates[start as usize], 3e-3);
            assert!(rates[(start + steps) as usize..].iter().all(|&rate| rate == 3e-4));
        }
    }

    #[test]
    fn a_square_root_falls_fast_at_first() {
        let rates = rates(RateCurve::Sqrt, 449, 50);
        assert_eq!((rates[449], rates[499], rates[599]), (3e-3, 3e-4, 3e-4));
        for (done, &rate) in rates[449..500].iter().enumerate() {
            assert!(
                (rate - (3e-3 - 2.7e-3 * (done as f64 / 50.0).sqrt())).abs() < 1e-15,
                "after {done} steps"
            );
        }
    }

    #[test]
    fn an_inverse_square_root_starts_at_the_peak_and_stays_above_the_floor() {
        let rates = rates(RateCurve::InverseSqrt, 29, 470);
        assert_eq!((rates[29], rates[119]), (3e-3, 1.5e-3));
        for (step, &rate) in rates.iter().enumerate().skip(30) {
            assert!((rate - 3e-3 * 30f64.sqrt() / ((step + 1) as f64).sqrt()).abs() < 1e-15, "step {step}");
        }
        let cold = LearningRate { warmup: 0, curve: RateCurve::InverseSqrt, ..RATE };
        assert_eq!([0, 3, 9999].map(|step| cold.at(step)), [3e-3, 1.5e-3, 3e-4]);
    }

    #[test]
    fn a_constant_rate_stays() {
        assert!(rates(RateCurve::Constant, 29, 470)[30..].iter().all(|&rate| rate == 3e-3));
    }
}

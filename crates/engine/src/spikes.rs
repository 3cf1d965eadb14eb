//! Finds loss spikes: steps whose loss or gradient norm is far above that of the steps before (`run.on_spike`).
//!
//! The rule is a robust one, so that it needs no knowledge of the model: the median of the last `run.spike_window` good steps, plus
//! `run.spike_limit` times their deviation. The deviation is 1.4826 times the median distance from the median, which for normal noise
//! is its standard deviation, and at least a share of the median, so that a curve without noise has no spikes.

use kintsugi_checkpoint::SpikeRecord;
use kintsugi_plan::{OnSpike, Run};
use kintsugi_run::{Spike, SpikeFigures};

/// The standard deviation of normal noise in median distances from its median.
const SIGMA: f64 = 1.4826;
/// The least deviation of a loss, as a share of the median.
const LEAST_LOSS: f64 = 0.01;
/// The least deviation of a gradient norm. It changes more from step to step.
const LEAST_NORM: f64 = 0.1;

/// Finds the spikes of a run.
pub(crate) struct SpikeDetector {
    /// The number of good steps, and the number of deviations. `None` if spikes change nothing.
    rule: Option<(usize, f64)>,
    /// What a checkpoint remembers.
    pub record: SpikeRecord,
}

impl SpikeDetector {
    /// The detector of a run that continues with `record`.
    pub fn new(run: &Run, record: SpikeRecord) -> Self {
        let rule = (run.on_spike == OnSpike::Rollback).then_some((run.spike_window, run.spike_limit));
        let mut detector = SpikeDetector { rule, record };
        detector.forget_old_steps();
        detector
    }

    /// The spike of a step, if it is one; otherwise it becomes one of the steps that later ones are compared with. Steps whose update
    /// was skipped are not for this. All ranks have the same loss and norm, and come to the same answer.
    pub fn check(&mut self, loss: f64, norm: f64) -> Option<Spike> {
        let (window, limit) = self.rule?;
        let SpikeRecord { losses, norms, .. } = &mut self.record;
        if losses.len() >= window {
            let of_loss = figures(loss, losses, limit, LEAST_LOSS).map(Spike::Loss);
            if let Some(spike) =
                of_loss.or_else(|| figures(norm, norms, limit, LEAST_NORM).map(Spike::GradNorm))
            {
                return Some(spike);
            }
        }
        // The device has both as `f32`, so nothing is lost.
        losses.push(loss as f32);
        norms.push(norm as f32);
        self.forget_old_steps();
        None
    }

    fn forget_old_steps(&mut self) {
        let window = self.rule.map_or(0, |(window, _)| window);
        for values in [&mut self.record.losses, &mut self.record.norms] {
            values.drain(..values.len().saturating_sub(window));
        }
    }
}

/// The figures of a value that is too far above others.
fn figures(value: f64, others: &[f32], deviations: f64, least: f64) -> Option<SpikeFigures> {
    let middle = median(others.iter().map(|&other| f64::from(other)).collect());
    let distance = median(others.iter().map(|&other| (f64::from(other) - middle).abs()).collect());
    let limit = middle + deviations * (SIGMA * distance).max(least * middle.abs());
    (value > limit).then_some(SpikeFigures { value, median: middle, limit })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    fn detector(settings: &[&str]) -> SpikeDetector {
        let usual = ["run.on_spike=rollback", "run.checkpoint_every=5", "run.spike_window=8"];
        let plan = ConfigSource::demo().sets(usual).sets(settings).plan().expect("a legal config");
        SpikeDetector::new(&plan.run, SpikeRecord::default())
    }

    /// Losses that fall, with noise of some hundredths.
    fn loss(step: usize) -> f64 {
        4.0 - 0.01 * step as f64 + [0.0, 0.03, -0.02, 0.01, -0.03][step % 5]
    }

    #[test]
    fn a_spike_is_found_after_a_whole_window_and_is_not_remembered() {
        let mut early = detector(&[]);
        assert!((0..7).all(|step| early.check(loss(step), 1.0).is_none()));
        assert_eq!(early.check(9.0, 1.0), None, "eight steps come before the first spike");
        let mut detector = detector(&[]);
        assert!((0..40).all(|step| detector.check(loss(step), 1.0 + 0.3 * (step % 3) as f64).is_none()));
        let remembered = detector.record.clone();
        assert_eq!((remembered.losses.len(), remembered.norms.len()), (8, 8));
        let Some(Spike::Loss(figures)) = detector.check(9.0, 90.0) else { panic!("a spike of the loss") };
        assert!(figures.median < figures.limit && figures.limit < 4.3, "{figures:?}");
        assert!(matches!(detector.check(loss(40), 90.0), Some(Spike::GradNorm(_))));
        assert_eq!(detector.record, remembered);
    }

    #[test]
    fn the_limit_is_a_number_of_deviations_of_noise_or_a_share_of_the_median() {
        let rise = |limit: &str, share: f64| {
            let mut detector = detector(&[&format!("run.spike_limit={limit}")]);
            for _ in 0..8 {
                assert_eq!(detector.check(2.0, 1.0), None);
            }
            detector.check(2.0 * (1.0 + share), 1.0).is_some()
        };
        assert!(!rise("10", 0.099) && rise("10", 0.101), "without noise ten times a hundredth");
        assert!(!rise("3", 0.029) && rise("3", 0.031));
        let mut noisy = detector(&[]);
        for step in 0..8 {
            assert_eq!(noisy.check(2.0 + 0.1 * f64::from(step % 2), 1.0), None);
        }
        // The median is 2.1 and the median distance 0.1, so the limit is 2.1 + 10 · 0.148.
        assert_eq!((noisy.check(3.58, 1.0), noisy.check(3.59, 1.0).is_some()), (None, true));
    }

    #[test]
    fn a_run_that_continues_after_spikes_remembers_no_steps() {
        let mut detector = detector(&["run.on_spike=continue"]);
        assert!((0..40).all(|step| detector.check(if step == 30 { 99.0 } else { 1.0 }, 1.0).is_none()));
        assert_eq!(detector.record, SpikeRecord::default());
    }
}

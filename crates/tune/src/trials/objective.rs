//! What a tuning minimises, and what a trial must keep.

use super::record::{Record, StepFigures};

/// What a tuning optimises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// Tokens per second of all ranks.
    Speed,
    /// Tokens per second of each rank.
    SpeedPerRank,
    /// Joules per token.
    Energy,
    /// Money per token, at this price of a rank for an hour.
    Cost {
        /// The price.
        price: f64,
    },
}

/// Limits on what is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Constraints {
    /// Bytes that the fullest rank may take from its device.
    pub memory: Option<u64>,
    /// Seconds that a step may take.
    pub step_s: Option<f64>,
}

impl Objective {
    /// The value that is minimised: seconds, rank-seconds, joules or money for each token. `None` if it is not known.
    pub fn value(self, figures: &StepFigures, ranks: usize, tokens: u64) -> Option<f64> {
        let rank_seconds = || figures.step_s.map(|seconds| seconds * ranks as f64);
        let of_step = match self {
            Objective::Speed => figures.step_s,
            Objective::SpeedPerRank => rank_seconds(),
            Objective::Energy => figures.energy_j,
            Objective::Cost { price } => rank_seconds().map(|seconds| price * seconds / 3600.0),
        };
        Some(of_step? / tokens as f64).filter(|value| value.is_finite() && *value > 0.0)
    }

    /// What a trial is worth; `None` if it failed or keeps a constraint not.
    pub fn of_trial(self, record: &Record, constraints: &Constraints) -> Option<f64> {
        let kept = record.outcome.is_measured() && constraints.allow(&record.measured);
        self.value(&record.measured, record.ranks, record.tokens).filter(|_| kept)
    }

    /// Seconds of a step that is worth a value. `None` if the value does not depend on time alone.
    pub fn step_s(self, value: f64, ranks: usize, tokens: u64) -> Option<f64> {
        let of_step = value * tokens as f64;
        match self {
            Objective::Speed => Some(of_step),
            Objective::SpeedPerRank => Some(of_step / ranks as f64),
            Objective::Cost { price } => Some(of_step * 3600.0 / price / ranks as f64),
            Objective::Energy => None,
        }
    }

    /// The value in the unit in which people compare it, with that unit.
    pub fn show(self, value: f64) -> String {
        match self {
            Objective::Speed => format!("{:.0} tokens/s", 1.0 / value),
            Objective::SpeedPerRank => format!("{:.0} tokens/s for each rank", 1.0 / value),
            Objective::Energy => format!("{value:.3e} J per token"),
            Objective::Cost { .. } => format!("{:.4} per million tokens", 1e6 * value),
        }
    }
}

impl Constraints {
    /// Whether figures keep the constraints, as far as they are known.
    pub fn allow(&self, figures: &StepFigures) -> bool {
        let memory = self.memory.zip(figures.reserved_bytes).is_none_or(|(most, bytes)| bytes <= most);
        let time = self.step_s.zip(figures.step_s).is_none_or(|(most, seconds)| seconds <= most);
        memory && time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_objective_follows_from_the_time_the_ranks_and_the_tokens() {
        let figures = StepFigures { step_s: Some(2.0), energy_j: Some(300.0), reserved_bytes: Some(10) };
        let value = |objective: Objective| objective.value(&figures, 8, 1000).expect("all is known");
        assert!((value(Objective::Speed) - 0.002).abs() < 1e-15);
        assert!((value(Objective::SpeedPerRank) - 0.016).abs() < 1e-15);
        assert!((value(Objective::Energy) - 0.3).abs() < 1e-15);
        let cost = Objective::Cost { price: 1.8 };
        assert!((value(cost) - 8e-6).abs() < 1e-15);
        for objective in [Objective::Speed, Objective::SpeedPerRank, cost] {
            let seconds = objective.step_s(value(objective), 8, 1000).expect("a matter of time");
            assert!((seconds - 2.0).abs() < 1e-12);
        }
        assert_eq!(Objective::Energy.value(&StepFigures::default(), 8, 1000), None);
        assert_eq!(Objective::Speed.show(0.002), "500 tokens/s");
        let limit = |memory, step_s| Constraints { memory, step_s }.allow(&figures);
        assert!(limit(Some(10), Some(2.0)) && !limit(Some(9), None) && !limit(None, Some(1.9)));
    }
}

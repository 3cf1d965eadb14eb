//! How far measured steps were from predicted ones: `profiles/spread.toml`, which `scripts/spread` writes.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// The spread of measured over predicted time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The runs that were compared.
    pub runs: usize,
    /// Measured over predicted time, below which 2.5 % of the runs are.
    pub low: f64,
    /// The same above which 5 % are.
    pub high: f64,
}

#[derive(Deserialize)]
struct Table {
    calibrated: Spread,
    described: Spread,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    toml::from_str(include_str!("../../../profiles/spread.toml")).expect("the program's own table")
});

/// The shares of runs that a spread leaves out below and above. More are left out above, where the runs are that nothing explains.
const TAILS: [f64; 2] = [0.025, 0.05];

impl Spread {
    /// The spread of runs of this engine in one node, on devices that `calibrate` measured.
    pub fn calibrated() -> Spread {
        TABLE.calibrated
    }

    /// The spread of runs on devices that are described by data sheets. Each run was predicted by constants that were fitted without
    /// its source.
    pub fn described() -> Spread {
        TABLE.described
    }

    /// The spread of runs by the logarithm of measured over predicted time and a weight.
    pub fn of(mut runs: Vec<(f64, f64)>) -> Spread {
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all: f64 = runs.iter().map(|(_, weight)| weight).sum();
        let quantile = |share: f64| {
            let mut sum = 0.0;
            let reached = |(_, weight): &&(f64, f64)| {
                sum += weight;
                sum >= share * all
            };
            runs.iter().find(reached).or(runs.last()).map_or(1.0, |(logarithm, _)| logarithm.exp())
        };
        let (low, high) = (quantile(TAILS[0]).min(1.0), quantile(1.0 - TAILS[1]).max(1.0));
        Spread { runs: runs.len(), low, high }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibrated_device_has_the_narrower_spread() {
        let width = |spread: Spread| spread.high / spread.low;
        let [calibrated, described] = [Spread::calibrated(), Spread::described()].map(width);
        assert!(1.0 < calibrated && calibrated < described, "{calibrated} {described}");
    }

    #[test]
    fn a_spread_leaves_out_a_few_runs_on_each_side() {
        let spread = Spread::of((0..=40).map(|i| (0.01 * f64::from(i - 20), 1.0)).collect());
        assert!(
            (spread.low.ln() + 0.19).abs() < 1e-9 && (spread.high.ln() - 0.18).abs() < 1e-9,
            "{spread:?}"
        );
        let heavy = Spread::of(vec![(-0.1, 1.0), (0.3, 20.0), (0.0, 1.0)]);
        assert!((heavy.low.ln() + 0.1).abs() < 1e-9 && (heavy.high.ln() - 0.3).abs() < 1e-9, "{heavy:?}");
    }
}

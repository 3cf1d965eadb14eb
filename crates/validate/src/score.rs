//! The errors of predictions, in the figures by which each set is judged.

use serde::Serialize;

use super::validated::ValidatedRun;

/// One figure beside its aim.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Its name.
    pub name: String,
    /// The value for our predictions.
    pub value: f64,
    /// The bound that it should keep.
    pub aim: Option<f64>,
    /// Whether the aim is a lower bound.
    pub at_least: bool,
}

/// The result of comparing one set of runs.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The set.
    pub set: String,
    /// The origin of its measurements.
    pub source: String,
    /// How many runs were predicted.
    pub rows: usize,
    /// Number of runs that the engine does not support.
    pub left_out: usize,
    /// The first of them, and why.
    pub reason: Option<String>,
    /// Number of runs whose slot took over twice as long as that of the same layout elsewhere. Figures leave them out.
    pub outliers: usize,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Each run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<ValidatedRun>,
}

impl Figure {
    /// A figure without an aim.
    pub fn of(name: impl Into<String>, value: f64) -> Self {
        Figure { name: name.into(), value, aim: None, at_least: false }
    }

    /// A figure that should be at most `aim`.
    pub fn at_most(name: impl Into<String>, value: f64, aim: Option<f64>) -> Self {
        Figure { name: name.into(), value, aim, at_least: false }
    }

    /// A figure that should be at least `aim`.
    pub fn at_least(name: impl Into<String>, value: f64, aim: Option<f64>) -> Self {
        Figure { name: name.into(), value, aim, at_least: true }
    }

    /// Whether the aim is met; true without one.
    pub fn met(&self) -> bool {
        self.aim.is_none_or(|aim| if self.at_least { self.value >= aim } else { self.value <= aim })
    }
}

/// Mean and worst distance in percent of predicted from measured.
pub fn errors(pairs: &[(f64, f64)]) -> (f64, f64) {
    let distances = pairs.iter().map(|(predicted, measured)| 100.0 * (predicted / measured - 1.0).abs());
    let (sum, worst) = distances.fold((0.0, 0.0_f64), |(sum, worst), d| (sum + d, worst.max(d)));
    (sum / pairs.len().max(1) as f64, worst)
}

/// Spearman's rank correlation; ties share their mean rank.
pub fn spearman(pairs: &[(f64, f64)]) -> f64 {
    let x = ranks(pairs.iter().map(|pair| pair.0));
    let y = ranks(pairs.iter().map(|pair| pair.1));
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
    let (mx, my) = (mean(&x), mean(&y));
    let product = |a: &[f64], ma: f64, b: &[f64], mb: f64| -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - ma) * (b - mb)).sum()
    };
    product(&x, mx, &y, my) / (product(&x, mx, &x, mx) * product(&y, my, &y, my)).sqrt()
}

fn ranks(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let values: Vec<f64> = values.collect();
    let below = |v: f64| values.iter().filter(|&&w| w < v).count() as f64;
    let equal = |v: f64| values.iter().filter(|&&w| w.total_cmp(&v).is_eq()).count() as f64;
    values.iter().map(|&v| below(v) + (equal(v) - 1.0) / 2.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_all_that_a_rank_correlation_sees() {
        assert!((spearman(&[(1.0, 10.0), (2.0, 100.0), (3.0, 1000.0)]) - 1.0).abs() < 1e-12);
        assert!((spearman(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) + 1.0).abs() < 1e-12);
    }

    #[test]
    fn errors_are_distances() {
        let (mean, worst) = errors(&[(110.0, 100.0), (95.0, 100.0)]);
        assert!((mean - 7.5).abs() < 1e-9 && (worst - 10.0).abs() < 1e-9, "{mean} {worst}");
    }
}

//! The results of the layouts, as table rows and as JSON.

use std::collections::BTreeSet;

use kintsugi_engine::verify::{Bounds, Difference, WeightBound, worse};
use kintsugi_plan::{Compute, Plan};
use serde::Serialize;

/// The result of a layout.
pub enum Verdict {
    /// It ran and was compared with one rank.
    Compared { compute: Compute, ranks: usize, difference: Difference },
    /// It failed before its end.
    Broken(String),
    /// The configuration does not allow it.
    Skipped(String),
}

/// The results so far.
#[derive(Default)]
pub struct Tally {
    rows: Vec<(String, Verdict)>,
}

/// The largest differences of some layouts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Worst {
    #[serde(rename = "worst_loss")]
    loss: f64,
    #[serde(rename = "worst_norm")]
    norm: f64,
    #[serde(rename = "worst_gradient")]
    gradient: f64,
    #[serde(rename = "worst_weight")]
    weight: f64,
}

/// A layout that failed or was skipped.
#[derive(Serialize)]
struct Named<'a> {
    layout: &'a str,
    reason: String,
}

/// What `verify --json` prints: the largest differences of the fp32 layouts, and of each 16-bit type.
#[derive(Serialize)]
pub struct Answer<'a> {
    layouts: usize,
    #[serde(flatten)]
    fp32: Worst,
    bf16: Option<Worst>,
    fp16: Option<Worst>,
    failed: Vec<Named<'a>>,
    skipped: Vec<Named<'a>>,
}

const NAME_WIDTH: usize = 56;

/// The header of the table.
pub fn header() -> String {
    format!(
        "largest relative difference from one rank\n{:<NAME_WIDTH$} {:>5} {:>8} {:>8} {:>8} {:>8}\n",
        "layout", "ranks", "loss", "norm", "gradient", "weight"
    )
}

impl Verdict {
    /// The result of a plan that ran.
    pub fn compared(plan: &Plan, difference: Difference) -> Self {
        Verdict::Compared { compute: plan.precision.compute, ranks: plan.mesh.ranks(), difference }
    }

    /// The reason of the failure, if it failed.
    fn failure(&self) -> Option<String> {
        match self {
            Verdict::Compared { compute, difference, .. } => {
                let bounds = Bounds::of(*compute);
                let broken = bounds.broken_by(difference);
                let named = broken.iter().map(|&name| match (name, bounds.weight) {
                    ("gradient", _) => format!("gradient of {}", difference.gradient_of),
                    ("weight", WeightBound::Each(_)) => format!("weight of {}", difference.weight_of),
                    ("weight", WeightBound::Together(_)) => "all weights together".to_owned(),
                    ("copies", _) => torn(&difference.diverged),
                    _ => name.to_owned(),
                });
                let named: Vec<String> = named.collect();
                (!named.is_empty()).then(|| named.join(", "))
            }
            Verdict::Broken(reason) => Some(reason.clone()),
            Verdict::Skipped(_) => None,
        }
    }

    /// The row's text after the layout's name.
    fn row(&self) -> String {
        let mark = self.failure().map_or_else(|| "✓".to_owned(), |reason| format!("✗ {reason}"));
        match self {
            Verdict::Compared { compute, ranks, difference } => {
                let Worst { loss, norm, gradient, weight } = Worst::of(*compute, difference);
                let figures = [loss, norm, gradient, weight].map(|x| format!("{x:>8.1e}")).join(" ");
                format!("{ranks:>5} {figures}  {mark}")
            }
            Verdict::Broken(_) => mark,
            Verdict::Skipped(reason) => format!("skipped: {reason}"),
        }
    }
}

/// A description of copies that differ, with the first one's name.
fn torn(names: &BTreeSet<String>) -> String {
    let first = names.first().map_or("", String::as_str);
    match names.len() {
        0 | 1 => format!("copies of {first} differ"),
        n => format!("copies of {first} and {} more differ", n - 1),
    }
}

impl Tally {
    /// Adds a layout and returns its row.
    pub fn add(&mut self, layout: String, verdict: Verdict) -> String {
        let row = format!("{layout:<NAME_WIDTH$} {}\n", verdict.row());
        self.rows.push((layout, verdict));
        row
    }

    /// Whether any layout failed.
    pub fn any_failed(&self) -> bool {
        self.rows.iter().any(|(_, verdict)| verdict.failure().is_some())
    }

    /// The result in a few lines.
    pub fn conclusion(&self, injected: bool) -> String {
        let Answer { layouts, failed, skipped, .. } = self.answer();
        let failed = failed.len();
        let result = match (injected, failed) {
            (true, _) => format!("the fault was detected in {failed} of {layouts} layouts"),
            (false, 0) => format!("all {layouts} layouts agree with one rank"),
            (false, _) => format!("{failed} of {layouts} layouts do not agree with one rank"),
        };
        let skipped = match skipped.len() {
            0 => String::new(),
            n => format!("; {n} were skipped, because this configuration does not allow them"),
        };
        format!(
            "\n{result}{skipped}\n\
             A key bias without rotary positions is left out: softmax is invariant to it, so its gradient is only rounding.\n"
        )
    }

    /// The result as JSON.
    pub fn answer(&self) -> Answer<'_> {
        let skipped = self.rows.iter().filter_map(|(layout, verdict)| match verdict {
            Verdict::Skipped(reason) => Some(Named { layout, reason: reason.clone() }),
            _ => None,
        });
        let failed = self
            .rows
            .iter()
            .filter_map(|(layout, verdict)| verdict.failure().map(|reason| Named { layout, reason }));
        let skipped: Vec<_> = skipped.collect();
        Answer {
            layouts: self.rows.len() - skipped.len(),
            fp32: self.worst(Compute::Fp32).unwrap_or_default(),
            bf16: self.worst(Compute::Bf16),
            fp16: self.worst(Compute::Fp16),
            failed: failed.collect(),
            skipped,
        }
    }

    /// The largest differences in a precision, if any layout had it.
    fn worst(&self, precision: Compute) -> Option<Worst> {
        let differences = self.rows.iter().filter_map(|(_, verdict)| match verdict {
            Verdict::Compared { compute, difference, .. } if *compute == precision => {
                Some(Worst::of(precision, difference))
            }
            _ => None,
        });
        differences.reduce(Worst::with)
    }
}

impl Worst {
    /// The differences of one layout that have bounds.
    fn of(compute: Compute, difference: &Difference) -> Self {
        let weight = match Bounds::of(compute).weight {
            WeightBound::Each(_) => difference.weight,
            WeightBound::Together(_) => difference.all_weights,
        };
        let &Difference { loss, norm, gradient, .. } = difference;
        Worst { loss, norm, gradient, weight }
    }

    fn with(self, other: Self) -> Self {
        Worst {
            loss: worse(self.loss, other.loss),
            norm: worse(self.norm, other.norm),
            gradient: worse(self.gradient, other.gradient),
            weight: worse(self.weight, other.weight),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weight_that_is_shown_is_the_one_that_is_bounded() {
        let difference = Difference {
            weight: 0.5,
            weight_of: "layer.0.query_bias".to_owned(),
            all_weights: 0.25,
            ..Difference::default()
        };
        let verdict = |compute| Verdict::Compared { compute, ranks: 2, difference: difference.clone() };
        let each = verdict(Compute::Fp32).row();
        assert!(each.ends_with("5.0e-1  ✗ weight of layer.0.query_bias"), "{each}");
        let together = verdict(Compute::Bf16).row();
        assert!(together.ends_with("2.5e-1  ✗ all weights together"), "{together}");
    }
}

//! The results of the layouts, as table rows and as JSON.

use std::collections::BTreeSet;

use kintsugi_engine::verify::{Bounds, Difference, ParameterBound, WeightBound, worse};
use kintsugi_plan::{Compute, Plan, Products, Quantized};
use serde::Serialize;

/// The result of a layout.
pub enum Verdict {
    /// It ran and was compared with one rank.
    Compared { kind: Kind, ranks: usize, bounds: Bounds, difference: Difference },
    /// It failed before its end.
    Broken(String),
    /// The configuration does not allow it.
    Skipped(String),
}

/// Layouts with bounds of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Numbers of a type.
    Exact(Compute),
    /// Codes, in any type.
    Quantized,
    /// Products in 8 bits.
    Fp8,
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
struct LayoutProblem<'a> {
    layout: &'a str,
    reason: String,
}

/// What `verify --json` prints: the largest differences of the fp32 layouts, of each 16-bit type, of the quantised
/// layouts, and of those with products in 8 bits.
#[derive(Serialize)]
pub struct Answer<'a> {
    layouts: usize,
    #[serde(flatten)]
    fp32: Worst,
    bf16: Option<Worst>,
    fp16: Option<Worst>,
    quantized: Option<Worst>,
    fp8: Option<Worst>,
    failed: Vec<LayoutProblem<'a>>,
    skipped: Vec<LayoutProblem<'a>>,
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
        let quantized = plan.sharding.quantized != Quantized::NONE;
        let kind = match plan.precision.products {
            Products::Fp8 => Kind::Fp8,
            Products::Compute if quantized => Kind::Quantized,
            Products::Compute => Kind::Exact(plan.precision.compute),
        };
        Verdict::Compared { kind, ranks: plan.mesh.ranks(), bounds: Bounds::of(plan), difference }
    }

    /// The reason of the failure, if it failed.
    fn failure(&self) -> Option<String> {
        match self {
            Verdict::Compared { bounds, difference, .. } => {
                let broken = bounds.broken_by(difference);
                let named = broken.iter().map(|&name| match name {
                    "gradient" => match bounds.gradient {
                        ParameterBound::Each(_) => format!("gradient of {}", difference.gradient_of),
                        ParameterBound::Together(_) => "all gradients together".to_owned(),
                    },
                    "weight" => match bounds.weight {
                        WeightBound::Elements => unexplained(difference),
                        WeightBound::Together(_) => "all weights together".to_owned(),
                    },
                    "copies" => torn(&difference.diverged),
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
            Verdict::Compared { ranks, bounds, difference, .. } => {
                let Worst { loss, norm, gradient, weight } = Worst::of(bounds, difference);
                let figures = [loss, norm, gradient, weight].map(|x| format!("{x:>8.1e}")).join(" ");
                format!("{ranks:>5} {figures}  {mark}")
            }
            Verdict::Broken(_) => mark,
            Verdict::Skipped(reason) => format!("skipped: {reason}"),
        }
    }
}

/// A description of a weight that differs by more than differences of gradients explain.
fn unexplained(difference: &Difference) -> String {
    let Difference { unexplained, unexplained_of, .. } = difference;
    format!("weight of {unexplained_of}, {unexplained:.1e} times what its gradients explain")
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
            Verdict::Skipped(reason) => Some(LayoutProblem { layout, reason: reason.clone() }),
            _ => None,
        });
        let failed = self
            .rows
            .iter()
            .filter_map(|(layout, verdict)| verdict.failure().map(|reason| LayoutProblem { layout, reason }));
        let skipped: Vec<_> = skipped.collect();
        Answer {
            layouts: self.rows.len() - skipped.len(),
            fp32: self.worst(Kind::Exact(Compute::Fp32)).unwrap_or_default(),
            bf16: self.worst(Kind::Exact(Compute::Bf16)),
            fp16: self.worst(Kind::Exact(Compute::Fp16)),
            quantized: self.worst(Kind::Quantized),
            fp8: self.worst(Kind::Fp8),
            failed: failed.collect(),
            skipped,
        }
    }

    /// The largest differences of one kind of layouts, if there were any.
    fn worst(&self, wanted: Kind) -> Option<Worst> {
        let differences = self.rows.iter().filter_map(|(_, verdict)| match verdict {
            Verdict::Compared { kind, bounds, difference, .. } if *kind == wanted => {
                Some(Worst::of(bounds, difference))
            }
            _ => None,
        });
        differences.reduce(Worst::with)
    }
}

impl Worst {
    /// The differences of one layout that have bounds.
    fn of(bounds: &Bounds, difference: &Difference) -> Self {
        let gradient = bounds.gradient.of(difference.gradient, difference.all_gradients);
        let weight = match bounds.weight {
            WeightBound::Elements => difference.weight,
            WeightBound::Together(_) => difference.all_weights,
        };
        Worst { loss: difference.loss, norm: difference.norm, gradient, weight }
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
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    #[test]
    fn the_weight_that_is_shown_is_the_one_that_is_bounded() {
        let difference = Difference {
            weight: 0.5,
            unexplained: 3.0,
            unexplained_of: "layer.0.query_bias".to_owned(),
            all_weights: 0.25,
            ..Difference::default()
        };
        let verdict = |compute: &str| {
            let plan = ConfigSource::demo().set(format!("precision.compute={compute}")).plan().unwrap();
            Verdict::compared(&plan, difference.clone())
        };
        let each = verdict("fp32").row();
        let reason = "weight of layer.0.query_bias, 3.0e0 times what its gradients explain";
        assert!(each.ends_with(&format!("5.0e-1  ✗ {reason}")), "{each}");
        let together = verdict("bf16").row();
        assert!(together.ends_with("2.5e-1  ✗ all weights together"), "{together}");
    }
}

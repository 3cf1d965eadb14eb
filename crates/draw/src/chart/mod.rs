//! Charts as data, and as SVG.
//!
//! A [`Chart`] says what is shown: axes with units, series, marks. It has two renderers and no third. [`svg`] here draws
//! pictures for files, without a browser. The page of `kintsugi report` draws the same description on a canvas, because
//! hovering and zooming need a renderer that runs in the browser. So what a chart contains is decided once.

mod scale;
mod svg;
mod unit;

use serde::Serialize;

pub use scale::{Ticks, ticks};
pub use svg::{svg, wrap};
pub use unit::Unit;

/// A chart: series over one horizontal axis.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Chart {
    /// Above the chart.
    pub title: String,
    /// The question that it answers, on pages.
    pub question: String,
    /// Below the chart, as the layout that it is about.
    pub caption: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// What is drawn, the first at the back.
    pub series: Vec<Series>,
    /// What is marked on the horizontal axis.
    pub marks: Vec<Mark>,
}

/// An axis.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Axis {
    /// Its name.
    pub label: String,
    /// The unit of its numbers.
    pub unit: Unit,
    /// How numbers are placed.
    pub scale: Scale,
    /// Names in place of numbers: the places 0, 1, 2, …
    pub categories: Vec<String>,
    /// Whether it begins at zero.
    pub zero: bool,
}

/// How numbers are placed on an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Equal differences are equal distances.
    #[default]
    Linear,
    /// Equal ratios are equal distances.
    Log,
}

/// Numbers that belong together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    /// In the legend.
    pub name: String,
    /// How they are drawn.
    pub style: Style,
    /// Which of the colours they have.
    pub colour: usize,
    /// Where they are.
    pub x: Vec<f64>,
    /// The numbers; none where there is a gap.
    pub y: Vec<Option<f64>>,
    /// What is known of each, for hovering; or nothing.
    pub labels: Vec<String>,
    /// Whether each is of a plan that does not fit, which is drawn hollow; or nothing.
    pub hollow: Vec<bool>,
    /// The run that it is of, on a page of runs.
    pub run: Option<usize>,
    /// Whether the numbers are noisy, so that a page can smooth them.
    pub noisy: bool,
    /// Means over bins, if a noisy series is thinned: a page smooths these instead. Empty if it has all its points.
    pub means: Means,
}

/// Means of a long series over equal parts of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Means {
    /// The middle of each part.
    pub x: Vec<f64>,
    /// The mean of its finite numbers; none if it has none.
    pub y: Vec<Option<f64>>,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Style {
    /// Points that are joined.
    #[default]
    Line,
    /// A dashed reference.
    Guide,
    /// Points.
    Points,
    /// Points with a ring around them and the series' name beside them, on top of all others.
    Ring,
    /// Bars beside those of other series.
    Bars,
    /// Bars on top of those of earlier series.
    Stack,
}

/// A mark on the horizontal axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mark {
    /// Where.
    pub x: f64,
    /// What happened.
    pub kind: MarkKind,
    /// More about it.
    pub text: String,
    /// The run that it is of, on a page of runs.
    pub run: Option<usize>,
}

/// What is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MarkKind {
    /// A checkpoint was saved.
    Checkpoint,
    /// A step was skipped.
    Skipped,
    /// There is no such plan.
    NotPossible,
}

impl MarkKind {
    /// The sign and its meaning.
    fn legend(self) -> (&'static str, &'static str) {
        match self {
            MarkKind::Checkpoint => ("◆", "checkpoint"),
            MarkKind::Skipped => ("×", "skipped step"),
            MarkKind::NotPossible => ("×", "not possible"),
        }
    }
}

impl Axis {
    /// An axis of numbers.
    pub fn of(label: &str, unit: Unit) -> Self {
        Axis { label: label.to_owned(), unit, ..Axis::default() }
    }

    /// An axis of numbers that begins at zero.
    pub fn from_zero(label: &str, unit: Unit) -> Self {
        Axis { zero: true, ..Axis::of(label, unit) }
    }

    /// An axis of names.
    pub fn of_categories(label: &str, categories: Vec<String>) -> Self {
        Axis { label: label.to_owned(), categories, ..Axis::default() }
    }

    /// Its name, and that it is logarithmic if it is.
    pub fn title(&self) -> String {
        match self.scale {
            Scale::Linear => self.label.clone(),
            Scale::Log => format!("{} (logarithmic)", self.label),
        }
    }

    /// An axis for values that people typed: to scale if all are numbers, else names. Gives the place of each value.
    pub fn of_values(label: &str, values: &[String]) -> (Self, Vec<f64>) {
        let numbers: Option<Vec<f64>> = values.iter().map(|value| value.parse::<f64>().ok()).collect();
        match numbers {
            Some(numbers) if values.len() > 1 => {
                let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
                let most = numbers.iter().copied().fold(0.0, f64::max);
                let scale = if least > 0.0 && most / least >= 8.0 { Scale::Log } else { Scale::Linear };
                (Axis { scale, ..Axis::of(label, Unit::Number) }, numbers)
            }
            _ => {
                let places = (0..values.len()).map(|i| i as f64).collect();
                (Axis::of_categories(label, values.to_vec()), places)
            }
        }
    }
}

impl Series {
    /// A series in a style and colour.
    pub fn new(name: impl Into<String>, style: Style, colour: usize) -> Self {
        Series { name: name.into(), style, colour, ..Series::default() }
    }

    /// The series with these points.
    #[must_use]
    pub fn points(mut self, points: impl IntoIterator<Item = (f64, Option<f64>)>) -> Self {
        (self.x, self.y) = points.into_iter().unzip();
        self
    }

    /// A horizontal line from `from` to `to`.
    pub fn guide(name: impl Into<String>, colour: usize, [from, to]: [f64; 2], value: f64) -> Self {
        Series::new(name, Style::Guide, colour).points([(from, Some(value)), (to, Some(value))])
    }
}

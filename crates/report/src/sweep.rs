//! Tables of plans as a chart: one figure over nodes or over values of a setting, a curve for each value of the others.

use kintsugi_draw::chart::{Axis, Chart, Mark, MarkKind, Series, Style, Unit};
use kintsugi_tune::Outcome;

/// Which figure is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Model FLOP/s of a rank.
    Flops,
    /// Seconds of a step.
    Step,
    /// Memory of the fullest rank.
    Memory,
    /// Joules of a step.
    Energy,
    /// Tokens per second and rank, as a share of those of the first row.
    Efficiency,
    /// Tokens per second of a rank.
    Tokens,
}

/// One row of the table.
pub struct Point<'a> {
    /// The nodes, or the value of the first setting.
    pub at: &'a str,
    /// The values of the other settings; empty if there are none.
    pub series: &'a str,
    /// Its figures; none if there is no such plan.
    pub outcome: Option<&'a Outcome>,
    /// Tokens per second and rank against the first row of its series.
    pub efficiency: Option<f64>,
}

impl Figure {
    fn axis(self) -> (&'static str, Unit) {
        match self {
            Figure::Flops => ("model FLOP/s per rank", Unit::Flops),
            Figure::Step => ("time of a step", Unit::Seconds),
            Figure::Memory => ("memory of the fullest rank", Unit::Bytes),
            Figure::Energy => ("energy of a step", Unit::Joules),
            Figure::Efficiency => ("speed of a rank, of the first's", Unit::Share),
            Figure::Tokens => ("tokens/s per rank", Unit::Rate),
        }
    }

    fn of(self, point: &Point) -> Option<f64> {
        let outcome = point.outcome?;
        match self {
            Figure::Flops => Some(1e12 * outcome.model_tflops_per_gpu),
            Figure::Step => Some(outcome.step_s),
            Figure::Memory => Some(outcome.reserved as f64),
            Figure::Energy => outcome.energy_j_per_step,
            Figure::Efficiency => point.efficiency,
            Figure::Tokens => Some(outcome.tokens_per_s_per_gpu),
        }
    }
}

/// The chart of a table. A plan that does not fit is hollow; where there is no plan, the axis has a cross.
pub fn chart(
    title: &str,
    along: &str,
    caption: &str,
    points: &[Point],
    figure: Figure,
    ideal: bool,
) -> Chart {
    let mut values: Vec<String> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !values.iter().any(|value| value == point.at) {
            values.push(point.at.to_owned());
        }
        if !names.contains(&point.series) {
            names.push(point.series);
        }
    }
    let (x, places) = Axis::of_values(along, &values);
    let place = |at: &str| places[values.iter().position(|value| value == at).expect("a value of the table")];
    let (label, unit) = figure.axis();
    let style = if x.categories.is_empty() { Style::Line } else { Style::Bars };
    let mut series: Vec<Series> = Vec::new();
    for (colour, &name) in names.iter().enumerate() {
        let own: Vec<&Point> = points.iter().filter(|point| point.series == name).collect();
        let shown = if name.is_empty() { label } else { name };
        let mut one = Series::new(shown, style, colour)
            .points(own.iter().map(|point| (place(point.at), figure.of(point))));
        one.hollow = own
            .iter()
            .map(|point| point.outcome.is_some_and(|outcome| outcome.fits == Some(false)))
            .collect();
        series.push(one);
    }
    let first = points.iter().find_map(|point| figure.of(point));
    if let (true, Some(first), Figure::Flops | Figure::Efficiency | Figure::Tokens) = (ideal, first, figure) {
        let least = places.iter().copied().fold(f64::INFINITY, f64::min);
        let most = places.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        series.push(Series::guide("ideal", 7, [least, most], first));
    }
    let refused = points.iter().filter(|point| point.outcome.is_none());
    let marks = refused.map(|point| Mark {
        x: place(point.at),
        kind: MarkKind::NotPossible,
        text: format!("{} {}", point.at, point.series).trim().to_owned(),
        run: None,
    });
    Chart {
        title: title.to_owned(),
        caption: caption.to_owned(),
        x,
        y: Axis::from_zero(label, unit),
        series,
        marks: marks.collect(),
        ..Chart::default()
    }
}

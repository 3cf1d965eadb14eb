//! A line chart as SVG, in colours that can be read on light and on dark pages.

use std::fmt::Write as _;

/// A chart: lines over common places on the horizontal axis.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Above the chart.
    pub title: String,
    /// Below the horizontal axis.
    pub x_label: String,
    /// Beside the vertical axis.
    pub y_label: String,
    /// The places, left to right.
    pub ticks: Vec<String>,
    /// The lines.
    pub lines: Vec<Line>,
}

/// A line.
#[derive(Clone, Debug)]
pub struct Line {
    /// In the legend.
    pub name: String,
    /// A value for each place; none where there is none.
    pub values: Vec<Option<f64>>,
    /// Whether the line is a dashed reference without figures at its points.
    pub guide: bool,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 72.0;
const BOTTOM: f64 = 60.0;
/// Middle tones that people with colour blindness can distinguish.
const COLOURS: [&str; 4] = ["#3b82c4", "#d9822b", "#2a9d8f", "#b05fb5"];
const TEXT: &str = "#808890";

/// The chart as an SVG document.
pub fn svg(chart: &Chart) -> String {
    let values = chart.lines.iter().flat_map(|line| line.values.iter().flatten());
    let axis = Axis::new(values.copied().fold(0.0, f64::max));
    let mut out = String::new();
    let place = Place { axis, count: chart.ticks.len() };
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"13\" fill=\"{TEXT}\">"
    )
    .expect("a string");
    text(&mut out, LEFT, 26.0, "start", "font-size=\"16\" font-weight=\"600\"", &chart.title);
    legend(&mut out, &chart.lines);
    grid(&mut out, &place, chart);
    for (line, colour) in chart.lines.iter().zip(COLOURS.iter().cycle()) {
        draw(&mut out, &place, line, colour, &chart.lines);
    }
    out.push_str("</svg>\n");
    out
}

/// The vertical axis: from zero in round steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    step: f64,
    steps: usize,
}

impl Axis {
    fn new(largest: f64) -> Self {
        let rough = if largest > 0.0 { largest / 5.0 } else { 0.2 };
        let power = 10_f64.powf(rough.log10().floor());
        let step =
            power * [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|m| m * power >= rough).unwrap_or(10.0);
        Axis { step, steps: ((largest / step).ceil() as usize).max(1) }
    }

    fn top(self) -> f64 {
        self.step * self.steps as f64
    }
}

/// Coordinates of the plot.
struct Place {
    axis: Axis,
    count: usize,
}

impl Place {
    fn x(&self, i: usize) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (i as f64 + 0.5) / self.count.max(1) as f64
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.axis.top()
    }
}

fn grid(out: &mut String, place: &Place, chart: &Chart) {
    let (left, right) = (LEFT, WIDTH - RIGHT);
    for i in 0..=place.axis.steps {
        let value = place.axis.step * i as f64;
        let (y, opacity) = (place.y(value), if i == 0 { 0.9 } else { 0.25 });
        writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"{TEXT}\" \
             stroke-opacity=\"{opacity}\"/>"
        )
        .expect("a string");
        text(out, left - 8.0, y + 4.5, "end", "", &figure(value));
    }
    for (i, tick) in chart.ticks.iter().enumerate() {
        text(out, place.x(i), HEIGHT - BOTTOM + 20.0, "middle", "", tick);
    }
    text(out, f64::midpoint(left, right), HEIGHT - 14.0, "middle", "", &chart.x_label);
    let turned = format!("transform=\"rotate(-90 18 {0})\"", (TOP + HEIGHT - BOTTOM) / 2.0);
    text(out, 18.0, (TOP + HEIGHT - BOTTOM) / 2.0, "middle", &turned, &chart.y_label);
}

fn legend(out: &mut String, lines: &[Line]) {
    let mut x = LEFT;
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let dash = if line.guide { " stroke-dasharray=\"5 4\"" } else { "" };
        writeln!(
            out,
            "<line x1=\"{x}\" y1=\"46\" x2=\"{}\" y2=\"46\" stroke=\"{colour}\" stroke-width=\"2.5\"{dash}/>",
            x + 24.0
        )
        .expect("a string");
        text(out, x + 30.0, 50.5, "start", "", &line.name);
        x += 30.0 + 8.0 * line.name.chars().count() as f64 + 24.0;
    }
}

/// A line, its points, and a figure at each point: above it, or below it if a guide would cross the figure.
fn draw(out: &mut String, place: &Place, line: &Line, colour: &str, all: &[Line]) {
    let guides = || all.iter().filter(|line| line.guide);
    let struck = |i: usize, y: f64| {
        let above = |guide: &Line| guide.values[i].is_some_and(|v| (y - 26.0..y - 1.0).contains(&place.y(v)));
        guides().any(above)
    };
    let label = |i: usize, y: f64| if struck(i, y) { y + 20.0 } else { y - 10.0 };
    let point = |(i, value): (usize, &Option<f64>)| {
        value.map(|value| (place.x(i), place.y(value), label(i, place.y(value)), value))
    };
    let points: Vec<Option<(f64, f64, f64, f64)>> = line.values.iter().enumerate().map(point).collect();
    let dash = if line.guide { " stroke-dasharray=\"5 4\"" } else { "" };
    for piece in points.split(Option::is_none).filter(|piece| piece.len() > 1) {
        let path: Vec<String> = piece.iter().flatten().map(|(x, y, ..)| format!("{x:.1},{y:.1}")).collect();
        writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\"{dash}/>",
            path.join(" ")
        )
        .expect("a string");
    }
    if line.guide {
        return;
    }
    for &(x, y, label, value) in points.iter().flatten() {
        writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>").expect("a string");
        text(out, x, label, "middle", &format!("font-size=\"12\" fill=\"{colour}\""), &figure(value));
    }
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, more: &str, what: &str) {
    let what = what.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{what}</text>")
        .expect("a string");
}

/// A number with at most three significant digits.
fn figure(value: f64) -> String {
    let digits = if value >= 100.0 || value.fract() == 0.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_has_round_steps() {
        assert_eq!(Axis::new(73.5), Axis { step: 20.0, steps: 4 });
        assert_eq!(Axis::new(1.0), Axis { step: 0.2, steps: 5 });
        assert_eq!(Axis::new(0.0).steps, 1);
    }

    #[test]
    fn a_figure_that_a_guide_would_strike_through_is_below_its_point() {
        let line =
            |name: &str, value, guide| Line { name: name.to_owned(), values: vec![Some(value)], guide };
        let chart = |value| Chart {
            title: String::new(),
            x_label: String::new(),
            y_label: String::new(),
            ticks: vec!["1".to_owned()],
            lines: vec![line("ours", value, false), line("ideal", 100.0, true)],
        };
        let place = Place { axis: Axis::new(100.0), count: 1 };
        for (value, offset) in [(100.0, -10.0), (96.0, 20.0), (50.0, -10.0)] {
            let at = format!("y=\"{:.1}\" text-anchor=\"middle\" font-size", place.y(value) + offset);
            assert!(svg(&chart(value)).contains(&at), "{value}");
        }
    }

    #[test]
    fn a_gap_breaks_the_line_and_words_are_escaped() {
        let line = |values, guide| Line { name: "a < b".to_owned(), values, guide };
        let chart = Chart {
            title: "T".to_owned(),
            x_label: "x".to_owned(),
            y_label: "y".to_owned(),
            ticks: ["1", "2", "3", "4", "5"].map(str::to_owned).to_vec(),
            lines: vec![line(vec![Some(1.0), Some(2.0), None, Some(1.0), Some(3.0)], false)],
        };
        let svg = svg(&chart);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(svg.contains("a &lt; b"));
    }
}

//! A chart as an SVG document, in middle tones that can be read on light and on dark pages.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::{Chart, MarkKind, Series, Style, Ticks, ticks};

const WIDTH: f64 = 760.0;
const LEFT: f64 = 96.0;
const RIGHT: f64 = 28.0;
const PLOT: f64 = 300.0;
/// Room for the axis' labels and its name.
const BELOW: f64 = 52.0;
const LINE: f64 = 19.0;
/// Middle tones that people with colour blindness can distinguish.
const COLOURS: [&str; 8] =
    ["#3b82c4", "#d9822b", "#2a9d8f", "#b05fb5", "#b3922c", "#58a9d9", "#8b8f3a", "#7d868e"];
const TEXT: &str = "#808890";
/// Points beyond which figures beside them would overlap.
const MAX_FIGURES: usize = 14;

/// The chart as an SVG document.
pub fn svg(chart: &Chart) -> String {
    let legend = legend(chart);
    let caption = wrap(&chart.caption, 100);
    let top = 40.0 + LINE * legend.rows as f64 + 18.0;
    let height = top + PLOT + BELOW + LINE * caption.len() as f64 + 6.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"13\" fill=\"{TEXT}\">\n"
    );
    text(&mut out, LEFT, 26.0, "start", "font-size=\"16\" font-weight=\"600\"", &chart.title);
    out.push_str(&legend.svg);
    let area = PlotArea::new(chart, top);
    grid(&mut out, chart, &area);
    bars(&mut out, chart, &area);
    for series in &chart.series {
        match series.style {
            Style::Line | Style::Guide => line(&mut out, chart, series, &area),
            Style::Points => points(&mut out, chart, series, &area),
            Style::Ring => rings(&mut out, series, &area),
            Style::Bars | Style::Stack => {}
        }
    }
    marks(&mut out, chart, &area);
    for (row, words) in caption.iter().enumerate() {
        let y = top + PLOT + BELOW + LINE * (row as f64 + 0.8);
        text(&mut out, LEFT, y, "start", "font-size=\"12\"", words);
    }
    out.push_str("</svg>\n");
    out
}

/// The area of a chart that shows its numbers, and the range of each axis.
struct PlotArea {
    x: Ticks,
    y: Ticks,
    top: f64,
    log: bool,
}

impl PlotArea {
    fn new(chart: &Chart, top: f64) -> Self {
        let log = chart.x.scale == super::Scale::Log;
        let all = || chart.series.iter();
        let placed = all().flat_map(|series| series.x.iter().copied());
        let placed: Vec<f64> = placed.chain(chart.marks.iter().map(|mark| mark.x)).collect();
        let ends = |numbers: &[f64]| {
            let low = numbers.iter().copied().fold(f64::INFINITY, f64::min);
            (low, numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max))
        };
        let x = if chart.x.categories.is_empty() {
            let (low, high) = ends(&placed);
            let (low, high) = if low.is_finite() { (low, high) } else { (0.0, 1.0) };
            let low = if chart.x.zero { low.min(0.0) } else { low };
            ticks(low, high, 8, chart.x.unit, chart.x.scale)
        } else {
            let places: Vec<f64> = (0..chart.x.categories.len()).map(|i| i as f64).collect();
            Ticks { low: -0.5, high: places.len() as f64 - 0.5, places }
        };
        let mut heights: Vec<f64> = all()
            .filter(|series| series.style != Style::Stack)
            .flat_map(|series| series.y.iter().flatten().copied())
            .collect();
        heights.extend(stacks(chart).into_values());
        let (low, high) = ends(&heights);
        let (low, high) = if low.is_finite() { (low, high) } else { (0.0, 1.0) };
        let from_zero =
            chart.y.zero || all().any(|series| matches!(series.style, Style::Bars | Style::Stack));
        let y = ticks(if from_zero { low.min(0.0) } else { low }, high, 5, chart.y.unit, chart.y.scale);
        PlotArea { x, y, top, log }
    }

    fn x(&self, value: f64) -> f64 {
        let along = |value: f64| if self.log { value.max(f64::MIN_POSITIVE).ln() } else { value };
        let (low, high) = (along(self.x.low), along(self.x.high));
        LEFT + (WIDTH - LEFT - RIGHT) * (along(value) - low) / (high - low)
    }

    fn y(&self, value: f64) -> f64 {
        self.top + PLOT * (1.0 - (value - self.y.low) / (self.y.high - self.y.low))
    }
}

/// The height of each stack of bars, by its area.
fn stacks(chart: &Chart) -> HashMap<u64, f64> {
    let mut heights: HashMap<u64, f64> = HashMap::new();
    for series in chart.series.iter().filter(|series| series.style == Style::Stack) {
        for (x, y) in series.x.iter().zip(&series.y) {
            *heights.entry(x.to_bits()).or_default() += y.unwrap_or(0.0);
        }
    }
    heights
}

fn grid(out: &mut String, chart: &Chart, area: &PlotArea) {
    let (left, right, bottom) = (LEFT, WIDTH - RIGHT, area.top + PLOT);
    for (i, &value) in area.y.places.iter().enumerate() {
        let (y, opacity) = (area.y(value), if i == 0 { 0.9 } else { 0.25 });
        rule(out, [left, y, right, y], opacity);
        text(out, left - 8.0, y + 4.5, "end", "", &figure(chart, value));
    }
    if chart.x.categories.is_empty() {
        for &value in &area.x.places {
            let x = area.x(value);
            rule(out, [x, bottom, x, bottom + 5.0], 0.9);
            text(out, x, bottom + 20.0, "middle", "", &chart.x.unit.format(value));
        }
    } else {
        let room = (right - left) / chart.x.categories.len() as f64;
        let every = (26.0 / room).ceil().max(1.0) as usize;
        for (i, name) in chart.x.categories.iter().enumerate().step_by(every) {
            let most = (room * every as f64 / 7.0).max(3.0) as usize;
            let short: String = name.chars().take(most).collect();
            let name = if short.len() < name.len() { format!("{short}…") } else { short };
            text(out, area.x(i as f64), bottom + 20.0, "middle", "", &name);
        }
    }
    text(out, f64::midpoint(left, right), bottom + 42.0, "middle", "", &chart.x.title());
    let middle = area.top + PLOT / 2.0;
    text(out, 16.0, middle, "middle", &format!("transform=\"rotate(-90 16 {middle})\""), &chart.y.title());
}

fn rule(out: &mut String, [x1, y1, x2, y2]: [f64; 4], opacity: f64) {
    writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{TEXT}\" \
         stroke-opacity=\"{opacity}\"/>"
    )
    .expect("a string");
}

/// The rows of the legend, as SVG.
struct Legend {
    svg: String,
    rows: usize,
}

fn legend(chart: &Chart) -> Legend {
    let (mut svg, mut x, mut row) = (String::new(), LEFT, 0_usize);
    let mut kinds: Vec<MarkKind> = Vec::new();
    for mark in &chart.marks {
        if !kinds.contains(&mark.kind) {
            kinds.push(mark.kind);
        }
    }
    let hollow = chart.series.iter().any(|series| series.hollow.contains(&true));
    let signs = kinds.into_iter().map(MarkKind::legend).chain(hollow.then_some(("○", "does not fit")));
    let signs = signs.map(|(sign, name)| (None, format!("{sign} {name}")));
    let named = chart.series.iter().map(|series| (Some(series), series.name.clone()));
    for (series, name) in named.chain(signs) {
        let wide = if series.is_some() { 30.0 } else { 0.0 } + 7.7 * name.chars().count() as f64 + 22.0;
        if x + wide > WIDTH - RIGHT && x > LEFT {
            (x, row) = (LEFT, row + 1);
        }
        let y = 46.0 + LINE * row as f64;
        if let Some(series) = series {
            let colour = colour(series);
            let drawn = match series.style {
                Style::Line | Style::Guide => format!(
                    "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2.5\"{}/>\n",
                    x + 24.0,
                    dash(series)
                ),
                Style::Points => {
                    format!("<circle cx=\"{}\" cy=\"{y}\" r=\"4\" fill=\"{colour}\"/>\n", x + 12.0)
                }
                Style::Ring => {
                    format!(
                        "<circle cx=\"{}\" cy=\"{y}\" r=\"5\" fill=\"none\" stroke=\"{TEXT}\" stroke-width=\"2\"/>\n",
                        x + 12.0
                    )
                }
                Style::Bars | Style::Stack => format!(
                    "<rect x=\"{x}\" y=\"{}\" width=\"24\" height=\"10\" fill=\"{colour}\"/>\n",
                    y - 5.0
                ),
            };
            svg.push_str(&drawn);
        }
        text(&mut svg, x + if series.is_some() { 30.0 } else { 0.0 }, y + 4.5, "start", "", &name);
        x += wide;
    }
    Legend { svg, rows: row }
}

fn colour(series: &Series) -> &'static str {
    COLOURS[series.colour % COLOURS.len()]
}

fn dash(series: &Series) -> &'static str {
    if series.style == Style::Guide { " stroke-dasharray=\"5 4\"" } else { "" }
}

/// A line, its points, and a figure at each point: above it, or below it if a guide would cross the figure.
fn line(out: &mut String, chart: &Chart, series: &Series, area: &PlotArea) {
    let colour = colour(series);
    let at = |(i, (&x, y)): (usize, (&f64, &Option<f64>))| y.map(|y| (area.x(x), area.y(y), i, y));
    let found: Vec<Option<(f64, f64, usize, f64)>> =
        series.x.iter().zip(&series.y).enumerate().map(at).collect();
    for piece in found.split(Option::is_none).filter(|piece| piece.len() > 1) {
        let path: Vec<String> = piece.iter().flatten().map(|(x, y, ..)| format!("{x:.1},{y:.1}")).collect();
        writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\"{}/>",
            path.join(" "),
            dash(series)
        )
        .expect("a string");
    }
    let lines = chart.series.iter().filter(|series| series.style == Style::Line).count();
    if series.style == Style::Guide || series.x.len() > 60 {
        return;
    }
    let guides = || chart.series.iter().filter(|series| series.style == Style::Guide);
    let crossed = |y: f64| {
        guides().flat_map(|guide| guide.y.iter().flatten()).any(|&v| (y - 26.0..y - 1.0).contains(&area.y(v)))
    };
    for &(px, py, i, y) in found.iter().flatten() {
        let fill = if is_hollow(series, i) { "none" } else { colour };
        writeln!(
            out,
            "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"4\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"
        )
        .expect("a string");
        if lines == 1 && series.x.len() <= MAX_FIGURES {
            let label = if crossed(py) { py + 20.0 } else { py - 10.0 };
            let more = format!("font-size=\"12\" fill=\"{colour}\"");
            text(out, px, label, "middle", &more, &figure(chart, y));
        }
    }
}

/// A number with its unit, without the unit's name where that is long.
fn figure(chart: &Chart, value: f64) -> String {
    let whole = chart.y.unit.format(value);
    whole.trim_end_matches("FLOP/s").trim_end_matches("tokens/s").trim_end().to_owned()
}

fn is_hollow(series: &Series, point: usize) -> bool {
    series.hollow.get(point).copied().unwrap_or(false)
}

fn points(out: &mut String, chart: &Chart, series: &Series, area: &PlotArea) {
    let many = chart.series.iter().any(|series| series.x.len() > 400);
    let (radius, opacity) = if many { (1.5, 0.6) } else { (4.0, 0.95) };
    for (&x, y) in series.x.iter().zip(&series.y) {
        let Some(y) = y else { continue };
        let (x, y, colour) = (area.x(x), area.y(*y), colour(series));
        writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\" fill-opacity=\"{opacity}\"/>"
        )
        .expect("a string");
    }
}

/// A ring around each point, with the series' name on the side that has room.
fn rings(out: &mut String, series: &Series, area: &PlotArea) {
    for (&x, y) in series.x.iter().zip(&series.y) {
        let Some(y) = y else { continue };
        let (x, y) = (area.x(x), area.y(*y));
        writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"7\" fill=\"none\" stroke=\"{TEXT}\" stroke-width=\"2\"/>"
        )
        .expect("a string");
        let (at, anchor) = if x > WIDTH / 2.0 { (x - 12.0, "end") } else { (x + 12.0, "start") };
        text(out, at, y - 6.0, anchor, "font-weight=\"600\"", &series.name);
    }
}

fn bars(out: &mut String, chart: &Chart, area: &PlotArea) {
    let beside: Vec<&Series> = chart.series.iter().filter(|series| series.style == Style::Bars).collect();
    let room = (area.x(1.0) - area.x(0.0)) * 0.72;
    let each = room / beside.len().max(1) as f64;
    let mut bar = |series: &Series, x: f64, wide: f64, [low, high]: [f64; 2], hollow: bool| {
        let (top, bottom, colour) = (area.y(high), area.y(low), colour(series));
        let fill = if hollow { "none" } else { colour };
        writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{wide:.1}\" height=\"{:.1}\" fill=\"{fill}\" stroke=\"{colour}\"/>",
            (bottom - top).max(0.0)
        )
        .expect("a string");
        if chart.x.categories.len() * beside.len() <= MAX_FIGURES && !beside.is_empty() {
            let more = format!("font-size=\"12\" fill=\"{colour}\"");
            text(out, x + wide / 2.0, top - 6.0, "middle", &more, &figure(chart, high));
        }
    };
    for (i, series) in beside.iter().enumerate() {
        for (point, (&x, y)) in series.x.iter().zip(&series.y).enumerate() {
            let Some(y) = y else { continue };
            let left = area.x(x) - room / 2.0 + each * i as f64;
            bar(series, left, (each - 3.0).max(1.0), [0.0, *y], is_hollow(series, point));
        }
    }
    let mut below: HashMap<u64, f64> = HashMap::new();
    for series in chart.series.iter().filter(|series| series.style == Style::Stack) {
        for (&x, y) in series.x.iter().zip(&series.y) {
            let from = below.entry(x.to_bits()).or_default();
            let to = *from + y.unwrap_or(0.0);
            if to > *from {
                bar(series, area.x(x) - room / 2.0, room.max(1.0), [*from, to], false);
            }
            *from = to;
        }
    }
}

/// Signs on the horizontal axis.
fn marks(out: &mut String, chart: &Chart, area: &PlotArea) {
    for mark in &chart.marks {
        let (sign, _) = mark.kind.legend();
        text(out, area.x(mark.x), area.top + PLOT - 4.0, "middle", "font-size=\"15\"", sign);
    }
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, more: &str, what: &str) {
    let what = what.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{what}</text>")
        .expect("a string");
}

/// The words of a text in lines of at most `width` characters, unless a word is longer.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Scale, Unit};
    use super::*;

    fn chart(series: Vec<Series>) -> Chart {
        Chart {
            title: "a < b".to_owned(),
            x: Axis::of("x", Unit::Number),
            y: Axis::from_zero("y", Unit::Number),
            series,
            ..Chart::default()
        }
    }

    fn line(values: &[Option<f64>]) -> Series {
        let points = values.iter().enumerate().map(|(i, &value)| (i as f64, value));
        Series::new("ours", Style::Line, 0).points(points)
    }

    #[test]
    fn a_gap_breaks_the_line_and_words_are_escaped() {
        let drawn = svg(&chart(vec![line(&[Some(1.0), Some(2.0), None, Some(1.0), Some(3.0)])]));
        assert_eq!(drawn.matches("<polyline").count(), 2);
        assert_eq!(drawn.matches("<circle").count(), 4);
        assert!(drawn.contains("a &lt; b"));
    }

    #[test]
    fn a_figure_that_a_guide_would_cross_is_below_its_point() {
        for (value, offset) in [(100.0, -10.0), (96.0, 20.0), (50.0, -10.0)] {
            let chart = chart(vec![line(&[Some(value)]), Series::guide("ideal", 1, [0.0, 1.0], 100.0)]);
            let area = PlotArea::new(&chart, 58.0);
            let at = format!("y=\"{:.1}\" text-anchor=\"middle\" font-size", area.y(value) + offset);
            assert!(svg(&chart).contains(&at), "{value}\n{}", svg(&chart));
        }
    }

    #[test]
    fn distances_are_to_scale() {
        let (axis, places) = Axis::of_values("nodes", &["8", "16", "128"].map(str::to_owned));
        assert_eq!((axis.scale, &places[..]), (Scale::Log, &[8.0, 16.0, 128.0][..]));
        let series = Series::new("a", Style::Line, 0).points(places.iter().map(|&x| (x, Some(1.0))));
        let area = PlotArea::new(&Chart { x: axis, ..chart(vec![series]) }, 58.0);
        let [a, b, c] = [8.0, 16.0, 128.0].map(|x| area.x(x));
        assert!(((c - b) / (b - a) - 3.0).abs() < 1e-9);
        let (axis, places) = Axis::of_values("schedule", &["1f1b", "gpipe"].map(str::to_owned));
        assert_eq!((axis.categories.len(), &places[..]), (2, &[0.0, 1.0][..]));
    }

    #[test]
    fn bars_stand_on_each_other_and_what_does_not_fit_is_hollow() {
        let bar =
            |style, colour| Series::new("a", style, colour).points([(0.0, Some(1.0)), (1.0, Some(2.0))]);
        let categories = Axis::of_categories("stage", ["0", "1"].map(str::to_owned).to_vec());
        let stacked =
            Chart { x: categories.clone(), ..chart(vec![bar(Style::Stack, 0), bar(Style::Stack, 1)]) };
        assert!((PlotArea::new(&stacked, 58.0).y.high - 4.0).abs() < 1e-9);
        // The legend has one each too.
        assert_eq!(svg(&stacked).matches("<rect").count(), 2 + 4);
        let hollow = Series { hollow: vec![false, true], ..bar(Style::Bars, 0) };
        let beside = Chart { x: categories, ..chart(vec![hollow]) };
        let drawn = svg(&beside);
        assert_eq!(drawn.matches("fill=\"none\" stroke").count(), 1);
        assert!(drawn.contains("○ does not fit"));
    }

    #[test]
    fn words_are_wrapped() {
        assert_eq!(wrap("one two three  four", 9), ["one two", "three", "four"]);
        assert_eq!(wrap("unbreakable a b", 3), ["unbreakable", "a b"]);
    }
}

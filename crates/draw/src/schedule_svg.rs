//! The schedule of a step as SVG: a row for each stage, a bar for each pass over a micro-batch.

use std::fmt::Write as _;

use kintsugi_simulate::Timeline;

use crate::schedule::{Bar, Kind, bars};

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 48.0;
pub(crate) const TEXT: &str = "#808890";

/// Draws a timeline; `caption` says what it is of.
pub fn schedule_svg(timeline: &Timeline, caption: &str) -> String {
    let stages: Vec<Vec<Bar>> = timeline.stages.iter().map(|spans| bars(spans)).collect();
    let tall = (560.0 / stages.len().max(1) as f64).clamp(8.0, 30.0);
    let height = TOP + tall * stages.len() as f64 + 34.0;
    let scale = (WIDTH - LEFT - 12.0) / timeline.end.max(f64::MIN_POSITIVE);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"12\" fill=\"{TEXT}\">\n"
    );
    text(&mut out, LEFT, 18.0, "start", TEXT, caption);
    legend(&mut out, &stages, timeline.bubble);
    for (stage, bars) in stages.iter().enumerate() {
        let y = TOP + tall * stage as f64;
        if tall >= 12.0 || stage % 2 == 0 {
            text(&mut out, LEFT - 8.0, y + tall / 2.0 + 4.0, "end", TEXT, &format!("stage {stage}"));
        }
        for bar in bars {
            let (x, wide) = (LEFT + bar.start * scale, (bar.end - bar.start) * scale);
            let (colour, ink) = colours(bar.kind);
            writeln!(
                out,
                "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{colour}\"/>",
                y + 1.0,
                (wide - if wide > 3.0 { 0.6 } else { 0.0 }).max(0.2),
                tall - 2.0
            )
            .expect("a string");
            let label = format!("{}{}", bar.kind.letter(), bar.micro);
            if !bar.ahead && wide > 7.5 * label.len() as f64 && tall >= 12.0 {
                text(&mut out, x + wide / 2.0, y + tall / 2.0 + 4.0, "middle", ink, &label);
            }
        }
    }
    out.push_str("</svg>\n");
    out
}

fn legend(out: &mut String, stages: &[Vec<Bar>], bubble: f64) {
    let mut x = LEFT;
    for kind in Kind::ALL.into_iter().filter(|&kind| stages.iter().flatten().any(|bar| bar.kind == kind)) {
        let (colour, _) = colours(kind);
        writeln!(out, "<rect x=\"{x}\" y=\"27\" width=\"16\" height=\"11\" fill=\"{colour}\"/>")
            .expect("a string");
        let name = format!("{} {}", kind.letter(), kind.name());
        text(out, x + 22.0, 37.0, "start", TEXT, &name);
        x += 40.0 + 7.0 * name.len() as f64;
    }
    text(out, x, 37.0, "start", TEXT, &format!("bubble {:.1} %", 100.0 * bubble));
}

/// A bar's colour, and that of its label.
fn colours(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Forward => ("#3b82c4", "#ffffff"),
        Kind::Backward | Kind::BackwardInput => ("#e0a32e", "#1d2125"),
        Kind::BackwardWeight => ("#2a9d8f", "#ffffff"),
    }
}

/// Writes a text.
pub(crate) fn text(out: &mut String, x: f64, y: f64, anchor: &str, colour: &str, what: &str) {
    let what = escape(what);
    writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{what}</text>")
        .expect("a string");
}

/// A text as it is written in XML.
pub(crate) fn escape(what: &str) -> String {
    what.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

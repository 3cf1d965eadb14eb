//! A trace as SVG: for every rank the rows of the trace, over one time axis.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::schedule_svg::{TEXT, escape, text};
use crate::trace::{Category, SpanKind, Trace, TraceSpan};

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 150.0;
const TOP: f64 = 48.0;
/// The height of a row, and the distance between two ranks.
const ROW: f64 = 17.0;
const GAP: f64 = 12.0;

/// Draws a trace; `caption` says what it is of. A transfer is lighter where its rank did not wait for it.
pub fn trace_svg(trace: &Trace, caption: &str) -> String {
    let rows = trace.rows();
    let of_rank = |(span, &row): (&TraceSpan, &usize)| ((span.rank, row), span.kind.category());
    let categories: BTreeMap<(usize, usize), Category> = trace.spans.iter().zip(&rows).map(of_rank).collect();
    // The position of every row, from the top.
    let (mut places, mut y, mut last_rank) = (BTreeMap::new(), TOP, None);
    for &(rank, row) in categories.keys() {
        if last_rank.replace(rank).is_some_and(|last| last != rank) {
            y += GAP;
        }
        places.insert((rank, row), y);
        y += ROW;
    }
    let end = trace.spans.iter().map(|span| span.start + span.duration).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - LEFT - 12.0) / end;
    let height = y + 34.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"11\" fill=\"{TEXT}\">\n"
    );
    text(&mut out, LEFT, 18.0, "start", TEXT, caption);
    legend(&mut out, trace);
    for (&(rank, row), &y) in &places {
        let name = categories[&(rank, row)].row_name(row);
        text(&mut out, LEFT - 8.0, y + ROW / 2.0 + 4.0, "end", TEXT, &format!("rank {rank} {name}"));
    }
    for (span, &row) in trace.spans.iter().zip(&rows) {
        bar(&mut out, span, places[&(span.rank, row)], scale);
    }
    axis(&mut out, end, scale, y);
    out.push_str("</svg>\n");
    out
}

fn bar(out: &mut String, span: &TraceSpan, y: f64, scale: f64) {
    let (x, wide) = (LEFT + span.start * scale, span.duration * scale);
    let waited = span.waited.unwrap_or(0.0).min(span.duration) * scale;
    let title = format!("{}: {:.2} ms", span.name, 1e3 * span.duration);
    writeln!(out, "<g><title>{}</title>", escape(&title)).expect("a string");
    for (x, wide, colour) in
        [(x, wide - waited, colour(span.kind)), (x + wide - waited, waited, colour(SpanKind::Communication))]
    {
        if wide > 0.0 {
            let shown = (wide - if wide > 3.0 { 0.5 } else { 0.0 }).max(0.2);
            writeln!(
                out,
                "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{shown:.2}\" height=\"{:.1}\" fill=\"{colour}\"/>",
                y + 1.0,
                ROW - 2.0
            )
            .expect("a string");
        }
    }
    out.push_str("</g>\n");
}

fn legend(out: &mut String, trace: &Trace) {
    let named = [
        (SpanKind::Forward, "forward"),
        (SpanKind::Recompute, "recompute"),
        (SpanKind::Backward, "backward"),
        (SpanKind::BackwardInput, "backward, inputs"),
        (SpanKind::BackwardWeight, "backward, weights"),
        (SpanKind::Optimizer, "optimizer"),
        (SpanKind::Kernel, "kernel"),
        (SpanKind::Transfer, "transfer that nobody waits for"),
        (SpanKind::Communication, "wait"),
    ];
    let mut x = LEFT;
    let has = |kind: SpanKind| {
        let waited = |span: &TraceSpan| kind == SpanKind::Communication && span.waited.is_some();
        trace.spans.iter().any(|span| span.kind == kind || waited(span))
    };
    for (kind, name) in named.into_iter().filter(|(kind, _)| has(*kind)) {
        writeln!(out, "<rect x=\"{x:.1}\" y=\"27\" width=\"16\" height=\"11\" fill=\"{}\"/>", colour(kind))
            .expect("a string");
        text(out, x + 22.0, 37.0, "start", TEXT, name);
        x += 42.0 + 6.2 * name.len() as f64;
    }
}

/// Milliseconds below the rows, at round numbers.
fn axis(out: &mut String, end: f64, scale: f64, y: f64) {
    let magnitude = 10_f64.powf((end / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * magnitude);
    let step = step.into_iter().find(|step| end / step <= 8.0).unwrap_or(end);
    for number in 0..=(end / step) as usize {
        let seconds = number as f64 * step;
        let x = LEFT + seconds * scale;
        writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"{TEXT}\" stroke-opacity=\"0.25\"/>",
            y + 4.0
        )
        .expect("a string");
        let label = format!("{} ms", (1e6 * seconds).round() / 1e3);
        text(out, x, y + 18.0, if number == 0 { "start" } else { "middle" }, TEXT, &label);
    }
}

fn colour(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Forward => "#3b82c4",
        SpanKind::Recompute => "#8ab6de",
        SpanKind::Backward | SpanKind::BackwardInput => "#e0a32e",
        SpanKind::BackwardWeight => "#2a9d8f",
        SpanKind::Optimizer => "#8e6bb0",
        SpanKind::Transfer => "#9fcf9a",
        SpanKind::Communication => "#c0392b",
        SpanKind::Other | SpanKind::Kernel => "#a0a8b0",
    }
}

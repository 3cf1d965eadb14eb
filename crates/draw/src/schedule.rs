//! A picture of a timeline for the terminal: one row per stage, time from left to right.
//!
//! A bar is one pass over one micro-batch, labelled with the number of the micro-batch. If the picture is too wide, its
//! middle is left out, and the scale is chosen so that both ends show work on every stage.

use std::fmt::Write;

use kintsugi_plan::{BackwardPart, Computation, Op};
use kintsugi_simulate::{OpSpan, Timeline};

/// How the picture distinguishes forwards and backwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// By letters and shading.
    Plain,
    /// By background colours (ANSI escapes).
    Colour,
}

/// What a bar is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
}

/// A run of computations of one kind on one micro-batch.
pub(crate) struct Bar {
    pub kind: Kind,
    pub micro: usize,
    pub start: f64,
    pub end: f64,
    /// Recomputation before its gradient has arrived: the pass itself comes later and has the label.
    pub ahead: bool,
}

/// One character of the picture.
#[derive(Clone, Copy)]
struct Mark {
    kind: Kind,
    /// Which of its stage's bars it belongs to.
    bar: usize,
    character: char,
}

/// `None` is idle.
type Cell = Option<Mark>;

/// Stands for the middle of a row that is too wide.
const GAP: &str = " … ";

/// Draws a timeline in at most `width` columns.
pub fn draw(timeline: &Timeline, width: usize, ink: Ink) -> String {
    let stages: Vec<Vec<Bar>> = timeline.stages.iter().map(|spans| bars(spans)).collect();
    let margin = format!("stage {}  ", stages.len().saturating_sub(1)).len();
    let room = width.saturating_sub(margin).max(1);
    let columns = columns(timeline.end, &stages, room, ink);
    let scale = columns as f64 / timeline.end.max(f64::MIN_POSITIVE);
    let narrow = typical(&stages).is_some_and(|forward| forward * scale < 0.99);
    let row = if narrow { mixed } else { cells };
    let mut picture = String::new();
    for (stage, bars) in stages.iter().enumerate() {
        let row = paint(row(bars, columns, scale, ink), room, ink);
        let row = format!("{:<margin$}{row}", format!("stage {stage}"));
        writeln!(picture, "{}", row.trim_end()).expect("a string takes it");
    }
    picture + &legend(timeline, &stages, width, ink)
}

/// The passes of a stage. Recomputation counts as a part of the backward that follows it, a wait for another stage
/// between them as idle.
pub(crate) fn bars(spans: &[OpSpan]) -> Vec<Bar> {
    let mut bars: Vec<Bar> = Vec::new();
    // Whether the stage has waited for another since the last bar.
    let mut waited = false;
    let mut recomputed: Option<(OpSpan, bool)> = None;
    for &span in spans {
        let Op::Compute { kind, micro, .. } = span.op else {
            waited |= matches!(span.op, Op::Wait(transfer) if transfer.crosses_stages());
            continue;
        };
        let kind = match kind {
            Computation::Forward | Computation::Evaluate | Computation::Decode => Kind::Forward,
            Computation::Backward(BackwardPart::Both) => Kind::Backward,
            Computation::Backward(BackwardPart::Input | BackwardPart::Frozen) => Kind::BackwardInput,
            Computation::Backward(BackwardPart::Weight) => Kind::BackwardWeight,
            Computation::Recompute => {
                recomputed = Some((span, std::mem::take(&mut waited)));
                continue;
            }
        };
        let mut bar = |span: OpSpan, ahead: bool, waited: bool| match bars.last_mut() {
            Some(bar) if bar.kind == kind && bar.micro == micro && !waited => {
                (bar.end, bar.ahead) = (span.end, bar.ahead && ahead);
            }
            _ => bars.push(Bar { kind, micro, start: span.start, end: span.end, ahead }),
        };
        if let Some((recomputed, waited)) = recomputed.take() {
            bar(recomputed, true, waited);
        }
        bar(span, false, std::mem::take(&mut waited));
    }
    bars
}

/// The number of columns of the whole picture: enough for the label of every forward, and more if there is room. If there
/// is less room, few enough that the two ends show the first and the last bar of every stage.
fn columns(makespan: f64, stages: &[Vec<Bar>], room: usize, ink: Ink) -> usize {
    let Some(typical) = typical(stages) else { return room };
    let label = stages.iter().flatten().map(|bar| label(bar.kind, bar.micro, ink).len()).max().unwrap_or(1);
    let at = |per_forward: f64| (makespan / typical * per_forward).ceil() as usize;
    let roomy = (label..=label + 2).rev().map(|per_forward| at(per_forward as f64));
    if let Some(whole) = roomy.into_iter().find(|&columns| columns <= room) {
        return whole;
    }
    let filled = stages.iter().filter_map(|bars| bars.first()).map(|bar| bar.end).fold(0.0, f64::max);
    let drained = stages.iter().filter_map(|bars| bars.last()).map(|bar| makespan - bar.start);
    let longest = filled.max(drained.fold(0.0, f64::max));
    let (_, tail) = ends(room);
    let shown = |&columns: &usize| columns <= room || longest * columns as f64 <= tail as f64 * makespan;
    let whole_columns = (1..=label.max(3)).rev().map(|per_forward| per_forward as f64);
    let shares = (2..).map(|forwards| 1.0 / f64::from(forwards));
    whole_columns.chain(shares).map(at).find(shown).unwrap_or(room)
}

/// How long a forward takes: the median.
fn typical(stages: &[Vec<Bar>]) -> Option<f64> {
    let forwards = stages.iter().flatten().filter(|bar| bar.kind == Kind::Forward);
    let mut forwards: Vec<f64> = forwards.map(|bar| bar.end - bar.start).collect();
    forwards.sort_by(f64::total_cmp);
    forwards.get(forwards.len() / 2).copied()
}

fn label(kind: Kind, micro: usize, ink: Ink) -> String {
    match ink {
        Ink::Plain => format!("{}{micro}", kind.letter()),
        Ink::Colour => micro.to_string(),
    }
}

fn cells(bars: &[Bar], columns: usize, scale: f64, ink: Ink) -> Vec<Cell> {
    let mut cells = vec![None; columns];
    for (index, bar) in bars.iter().enumerate() {
        let column = |time: f64| ((time * scale).round() as usize).min(columns);
        let (start, end) = (column(bar.start), column(bar.end));
        let label = if bar.ahead { String::new() } else { label(bar.kind, bar.micro, ink) };
        // A truncated number would be misread.
        let text = if label.len() <= end - start { label.as_str() } else { "" };
        let characters = text.chars().chain(std::iter::repeat(bar.kind.fill(ink)));
        for (cell, character) in cells[start..end].iter_mut().zip(characters) {
            *cell = Some(Mark { kind: bar.kind, bar: index, character });
        }
    }
    cells
}

/// A row whose bars are narrower than a column: each column shows the kind that takes most of it, or idle.
fn mixed(bars: &[Bar], columns: usize, scale: f64, ink: Ink) -> Vec<Cell> {
    let mut shares = vec![[0.0; Kind::ALL.len()]; columns];
    for bar in bars {
        let (start, end) = (bar.start * scale, bar.end * scale);
        let (first, last) = (start as usize, (end.ceil() as usize).min(columns));
        for (column, shares) in shares.iter_mut().enumerate().take(last).skip(first) {
            let left = column as f64;
            shares[bar.kind as usize] += end.min(left + 1.0) - start.max(left);
        }
    }
    let cell = |shares: &[f64; Kind::ALL.len()]| {
        let busy: f64 = shares.iter().sum();
        let most =
            Kind::ALL.into_iter().max_by(|&a, &b| shares[a as usize].total_cmp(&shares[b as usize]))?;
        (busy > 1.0 / 3.0).then(|| Mark { kind: most, bar: 0, character: most.fill(ink) })
    };
    shares.iter().map(cell).collect()
}

/// A row as text, its middle left out where it is wider than `room`.
fn paint(mut cells: Vec<Cell>, room: usize, ink: Ink) -> String {
    if cells.len() <= room {
        return run(&cells, ink);
    }
    let (head, tail) = ends(room);
    let tail = cells.len() - tail;
    hide_cut_label(&mut cells, head, ink);
    hide_cut_label(&mut cells, tail, ink);
    format!("{}{GAP}{}", run(&cells[..head], ink), run(&cells[tail..], ink))
}

/// How many columns are shown of the beginning and of the end of a row that is wider than `room`.
fn ends(room: usize) -> (usize, usize) {
    let kept = room.saturating_sub(GAP.chars().count());
    (kept - kept / 2, kept / 2)
}

/// Removes the label of a bar that is cut before column `cut`.
fn hide_cut_label(cells: &mut [Cell], cut: usize, ink: Ink) {
    let bar = |column: usize| cells.get(column).copied().flatten().map(|mark| mark.bar);
    let Some(bar) = bar(cut).filter(|_| cut > 0 && bar(cut - 1) == bar(cut)) else { return };
    for mark in cells.iter_mut().flatten().filter(|mark| mark.bar == bar) {
        mark.character = mark.kind.fill(ink);
    }
}

fn run(cells: &[Cell], ink: Ink) -> String {
    let kind = |cell: &Cell| cell.map(|mark| mark.kind);
    let pieces = cells.chunk_by(|a, b| kind(a) == kind(b)).map(|piece| {
        let text: String = piece.iter().map(|cell| cell.map_or(' ', |mark| mark.character)).collect();
        match kind(&piece[0]) {
            Some(kind) if ink == Ink::Colour => kind.coloured(&text),
            _ => text,
        }
    });
    pieces.collect()
}

/// The meaning of the bars and the bubble, wrapped to `width` columns.
fn legend(timeline: &Timeline, stages: &[Vec<Bar>], width: usize, ink: Ink) -> String {
    let present = |kind| stages.iter().flatten().any(|bar| bar.kind == kind);
    let mut entries: Vec<(usize, String)> = Kind::ALL
        .into_iter()
        .filter(|&kind| present(kind))
        .map(|kind| {
            let sample = format!("{}{}", kind.letter(), kind.fill(ink));
            let sample = if ink == Ink::Plain { sample } else { kind.coloured(&sample) };
            (kind.name().len() + 3, format!("{sample} {}", kind.name()))
        })
        .collect();
    let bubble = format!("bubble {:.1} %", 100.0 * timeline.bubble);
    entries.push((bubble.len(), bubble));
    let (mut text, mut used) = (String::new(), 0);
    for (len, entry) in entries {
        let separator = match used {
            0 => "",
            _ if used + 3 + len <= width => "   ",
            _ => "\n",
        };
        used = if separator == "   " { used + 3 + len } else { len };
        text = text + separator + &entry;
    }
    text + "\n"
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Forward, Kind::Backward, Kind::BackwardInput, Kind::BackwardWeight];

    pub fn letter(self) -> char {
        match self {
            Kind::Forward => 'F',
            Kind::Backward | Kind::BackwardInput => 'B',
            Kind::BackwardWeight => 'W',
        }
    }

    /// What a bar is filled with beside its label.
    fn fill(self, ink: Ink) -> char {
        match self {
            _ if ink == Ink::Colour => ' ',
            Kind::Forward => '░',
            Kind::Backward | Kind::BackwardInput => '▒',
            Kind::BackwardWeight => '▓',
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Forward => "forward",
            Kind::Backward => "backward",
            Kind::BackwardInput => "backward, inputs",
            Kind::BackwardWeight => "backward, weights",
        }
    }

    /// White on blue, black on gold, black on green.
    fn coloured(self, text: &str) -> String {
        let code = match self {
            Kind::Forward => "97;44",
            Kind::Backward | Kind::BackwardInput => "30;43",
            Kind::BackwardWeight => "30;42",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

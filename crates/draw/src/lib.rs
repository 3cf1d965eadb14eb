//! Pictures: a schedule for the terminal and as SVG, traces for Perfetto, charts as data and as SVG.
#![forbid(unsafe_code)]

pub mod chart;
mod schedule;
mod schedule_svg;
mod trace;

pub use schedule::{Ink, draw};
pub use schedule_svg::schedule_svg;
pub use trace::{Category, RankSpan, RankSpanKind, RankTransfer, SpanKind, Trace, TraceSpan};

//! Pictures: a schedule for the terminal and as SVG, traces for Perfetto and as SVG, charts as data and as SVG.
#![forbid(unsafe_code)]

pub mod chart;
mod schedule;
mod schedule_svg;
mod trace;
mod trace_svg;

pub use schedule::{Ink, draw};
pub use schedule_svg::schedule_svg;
pub use trace::{Category, RankSpan, RankSpanKind, RankTransfer, SpanKind, Trace, TraceSpan};
pub use trace_svg::trace_svg;

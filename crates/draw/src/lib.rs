//! Pictures: a schedule for the terminal, traces for Perfetto, charts as SVG.
#![forbid(unsafe_code)]

pub mod chart;
mod schedule;
mod trace;

pub use schedule::{Ink, draw};
pub use trace::{Category, TraceSpan, chrome, trace};

//! Time: plays the programs of all stages against a virtual clock, draws them, and writes traces.
//!
//! What an op costs is given; what the schedule makes of it follows from the programs alone.

mod bubble;
mod chrome;
mod costs;
mod draw;
mod play;
#[cfg(test)]
mod tests;

pub use bubble::bubble;
pub use chrome::{Category, TraceSpan, chrome};
pub use costs::{BlockCosts, Costs};
pub use draw::{Ink, draw};
pub use play::{Deadlock, SendEnds, play, play_programs};

use kintsugi_plan::Op;

/// When an op ran, in the unit of its costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// When it began to run or to wait.
    pub start: f64,
    /// When it was over.
    pub end: f64,
    /// The op.
    pub op: Op,
}

/// When every op of every stage ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The spans of each stage, in order.
    pub stages: Vec<Vec<Span>>,
    /// When the last stage was done.
    pub makespan: f64,
}

impl Timeline {
    /// The time in which a stage computes nothing.
    pub fn idle(&self, stage: usize) -> f64 {
        let computing = self.stages[stage].iter().filter(|span| is_computation(span.op));
        self.makespan - computing.map(|span| span.end - span.start).sum::<f64>()
    }

    /// The part of all stages' time in which they compute nothing.
    pub fn bubble(&self) -> f64 {
        if self.makespan == 0.0 {
            return 0.0;
        }
        let idle: f64 = (0..self.stages.len()).map(|stage| self.idle(stage)).sum();
        idle / (self.makespan * self.stages.len() as f64)
    }

    /// The spans that take time, as a trace in which the costs are seconds and `ranks_per_stage` ranks act as one.
    pub fn trace(&self, ranks_per_stage: usize) -> Vec<TraceSpan> {
        let of_stage = |(stage, spans): (usize, &Vec<Span>)| {
            let lasting = spans.iter().filter(|span| span.end > span.start);
            let trace = lasting.map(|span| TraceSpan {
                rank: stage * ranks_per_stage,
                stage,
                name: span.op.to_string(),
                category: Category::of(span.op),
                start_us: span.start * 1e6,
                duration_us: (span.end - span.start) * 1e6,
            });
            trace.collect::<Vec<_>>()
        };
        self.stages.iter().enumerate().flat_map(of_stage).collect()
    }
}

/// Whether an op keeps the device busy, as opposed to moving data or waiting for it.
fn is_computation(op: Op) -> bool {
    Category::of(op) == Category::Compute
}

//! When each op of a step ran on a rank.

use std::time::{Duration, Instant};

use kintsugi_plan::Op;

/// How long an op took on a rank.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// The op.
    pub op: Op,
    /// Since the step began.
    pub start: Duration,
    /// How long.
    pub duration: Duration,
}

/// Times the ops of a rank while it is on: each lasts until the next begins.
pub(crate) struct Timer {
    rank: usize,
    begun: Option<Instant>,
    open: Option<(Op, Duration)>,
    pub spans: Vec<Span>,
}

impl Timer {
    pub fn new(rank: usize) -> Self {
        Timer { rank, begun: None, open: None, spans: Vec::new() }
    }

    /// Starts timing a step.
    pub fn begin(&mut self) {
        self.begun = Some(Instant::now());
    }

    /// An op begins.
    pub fn op(&mut self, op: Op) {
        let Some(begun) = self.begun else { return };
        let now = begun.elapsed();
        self.close(now);
        self.open = Some((op, now));
    }

    /// The step is over.
    pub fn end(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.close(begun.elapsed());
        }
    }

    fn close(&mut self, now: Duration) {
        if let Some((op, start)) = self.open.take() {
            let duration = now.saturating_sub(start);
            self.spans.push(Span { rank: self.rank, op, start, duration });
        }
    }
}

//! Measures when each op and each kernel of a step ran on a rank.

use std::rc::Rc;
use std::time::Duration;

use kintsugi_plan::Op;
use kintsugi_tensor::{Backend, Launch, Mark};
use serde::{Deserialize, Serialize};

/// The time of an op or a kernel on a rank, by the clock of its device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredSpan {
    /// The rank.
    pub rank: usize,
    /// The op or kernel.
    pub kind: SpanKind,
    /// Start, since the step began.
    pub start: Duration,
    /// Duration.
    pub duration: Duration,
}

/// What was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum SpanKind {
    /// An op of the program, including the time that it waited.
    Op(Op),
    /// A kernel that the device ran as part of an op.
    Kernel(String),
}

/// Times one step of a rank: each op lasts until the next begins.
pub(crate) struct Timer {
    rank: usize,
    backend: Rc<dyn Backend>,
    begun: Mark,
    ops: Vec<(Op, Mark)>,
}

impl Timer {
    /// Starts to measure a step.
    pub fn begin(rank: usize, backend: &Rc<dyn Backend>) -> Self {
        backend.record_launches();
        Timer { rank, backend: Rc::clone(backend), begun: backend.mark(), ops: Vec::new() }
    }

    /// Marks the start of an op.
    pub fn op(&mut self, op: Op) {
        self.ops.push((op, self.backend.mark()));
    }

    /// Waits for the end of the step and returns its spans.
    pub fn end(self) -> Vec<MeasuredSpan> {
        let (end, launches) = (self.backend.mark(), self.backend.take_launches());
        let ends = self.ops.iter().skip(1).map(|(_, mark)| mark).chain([&end]);
        let ops = self.ops.iter().zip(ends).map(|((op, mark), end)| self.span(SpanKind::Op(*op), mark, end));
        let kernel =
            |Launch { name, begun, ended }: &Launch| self.span(SpanKind::Kernel(name.clone()), begun, ended);
        ops.chain(launches.iter().map(kernel)).collect()
    }

    fn span(&self, kind: SpanKind, from: &Mark, to: &Mark) -> MeasuredSpan {
        MeasuredSpan { rank: self.rank, kind, start: from.since(&self.begun), duration: to.since(from) }
    }
}

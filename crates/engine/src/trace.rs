//! Measures when each op and each kernel of a step ran on a rank.

use std::rc::Rc;
use std::time::{Duration, Instant};

use kintsugi_plan::Op;
use kintsugi_tensor::{Backend, Launch, LaunchedTransfer, Mark};
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
    /// A transfer that ran on a stream of its own.
    Transfer(MeasuredTransfer),
}

/// A transfer that ran beside the operations of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredTransfer {
    /// Operation and group.
    pub name: String,
    /// The stream on which it ran.
    pub stream: String,
    /// Bytes that the rank sent, or received in a message.
    pub bytes: u64,
    /// The op that started it.
    pub op: Op,
}

/// Times one step of a rank: each op lasts until the next begins.
pub(crate) struct Timer {
    rank: usize,
    backend: Rc<dyn Backend>,
    begun: Mark,
    ops: Vec<StartedOp>,
}

/// An op, and when it started: on the device, and on the host.
struct StartedOp {
    op: Op,
    mark: Mark,
    enqueued: Instant,
}

impl Timer {
    /// Starts to measure a step.
    pub fn begin(rank: usize, backend: &Rc<dyn Backend>) -> Self {
        backend.record_launches();
        Timer { rank, backend: Rc::clone(backend), begun: backend.mark(), ops: Vec::new() }
    }

    /// Marks the start of an op.
    pub fn op(&mut self, op: Op) {
        self.ops.push(StartedOp { op, mark: self.backend.mark(), enqueued: Instant::now() });
    }

    /// Waits for the end of the step and returns its spans.
    pub fn end(self) -> Vec<MeasuredSpan> {
        let (end, launches) = (self.backend.mark(), self.backend.take_launches());
        let ends = self.ops.iter().skip(1).map(|next| &next.mark).chain([&end]);
        let ops = self.ops.iter().zip(ends);
        let ops = ops.map(|(started, end)| self.span(SpanKind::Op(started.op), &started.mark, end));
        let launches =
            launches.iter().map(|launch| self.span(self.kind(launch), &launch.begun, &launch.ended));
        ops.chain(launches).collect()
    }

    /// What a launch is. A transfer belongs to the op during which the host enqueued it.
    fn kind(&self, Launch { name, transfer, enqueued, .. }: &Launch) -> SpanKind {
        let before = self.ops.partition_point(|started| started.enqueued <= *enqueued);
        match (transfer, before.checked_sub(1)) {
            (Some(LaunchedTransfer { stream, bytes }), Some(index)) => SpanKind::Transfer(MeasuredTransfer {
                name: name.clone(),
                stream: stream.to_string(),
                bytes: *bytes,
                op: self.ops[index].op,
            }),
            _ => SpanKind::Kernel(name.clone()),
        }
    }

    fn span(&self, kind: SpanKind, from: &Mark, to: &Mark) -> MeasuredSpan {
        MeasuredSpan { rank: self.rank, kind, start: from.since(&self.begun), duration: to.since(from) }
    }
}

//! Measures when each op, each kernel and each transfer of a step ran on a rank.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use kintsugi_comm::TransferObserver;
use kintsugi_comm::paper::{Entry, Transfer, sent_bytes};
use kintsugi_plan::{Coordinate, Mesh, Op, Plan, StepOp};
use kintsugi_spec::Topology;
use kintsugi_tensor::{Backend, Launch, LaunchedTransfer, Mark};
use serde::{Deserialize, Serialize};

use crate::job::Worker;

/// The time of an op, a kernel or a transfer on a rank, by the clock of its device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredSpan {
    /// The rank.
    pub rank: usize,
    /// What it was.
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
    /// A transfer: on a stream of its own from its start to its end, or else until the end of its wait.
    Transfer {
        /// Operation and group.
        name: String,
        /// Bytes that the rank sent, or received in a message.
        bytes: u64,
        /// The op that started it.
        op: Op,
        /// How long the rank waited for it, at its end; `None` on a stream of its own.
        waited: Option<Duration>,
    },
}

/// Times one step of a rank: each op lasts until the next begins.
pub(crate) struct Timer {
    rank: usize,
    backend: Rc<dyn Backend>,
    begun: Mark,
    ops: Vec<StartedOp>,
    recorder: Rc<TransferRecorder>,
}

/// An op, and when it started: on the device, and on the host.
struct StartedOp {
    op: Op,
    mark: Mark,
    enqueued: Instant,
}

impl Timer {
    /// Starts to measure a step.
    pub fn begin(worker: &mut Worker, plan: &Plan) -> Self {
        let (rank, backend) = (worker.number, Rc::clone(&worker.backend));
        let recorder = Rc::new(TransferRecorder {
            mesh: plan.mesh,
            topology: plan.cluster.topology,
            at: worker.at,
            backend: Rc::clone(&backend),
            op: Cell::new(Some(Op::Step(StepOp::Begin))),
            transfers: RefCell::default(),
        });
        worker.rank.observe(&(Rc::clone(&recorder) as Rc<dyn TransferObserver>));
        backend.record_launches();
        Timer { rank, begun: backend.mark(), backend, ops: Vec::new(), recorder }
    }

    /// Marks the start of an op.
    pub fn op(&mut self, op: Op) {
        self.recorder.op.set(Some(op));
        self.ops.push(StartedOp { op, mark: self.backend.mark(), enqueued: Instant::now() });
    }

    /// Waits for the end of the step and returns its spans.
    pub fn end(self) -> Vec<MeasuredSpan> {
        self.recorder.op.set(None);
        let (end, launches) = (self.backend.mark(), self.backend.take_launches());
        let ends = self.ops.iter().skip(1).map(|next| &next.mark).chain([&end]);
        let ops = self.ops.iter().zip(ends);
        let ops = ops.map(|(started, end)| self.span(SpanKind::Op(started.op), &started.mark, end));
        // Transfers on streams of their own are measured there.
        let on_streams = launches.iter().any(|launch| launch.transfer.is_some());
        let recorded = self.recorder.transfers.take();
        let recorded = recorded.iter().filter(|_| !on_streams).filter_map(|recorded| self.recorded(recorded));
        let launches =
            launches.iter().map(|launch| self.span(self.kind(launch), &launch.begun, &launch.ended));
        ops.chain(launches).chain(recorded).collect()
    }

    /// What a launch is. A transfer belongs to the op during which the host enqueued it.
    fn kind(&self, Launch { name, transfer, enqueued, .. }: &Launch) -> SpanKind {
        let before = self.ops.partition_point(|started| started.enqueued <= *enqueued);
        match (transfer, before.checked_sub(1)) {
            (Some(LaunchedTransfer { stream, bytes }), Some(index)) => SpanKind::Transfer {
                name: format!("{name} ({stream})"),
                bytes: *bytes,
                op: self.ops[index].op,
                waited: None,
            },
            _ => SpanKind::Kernel(name.clone()),
        }
    }

    /// A transfer that the observer saw; `None` if it has not ended.
    fn recorded(&self, recorded: &RecordedTransfer) -> Option<MeasuredSpan> {
        let [waits, ended] = [recorded.waits.as_ref()?, recorded.ended.as_ref()?];
        let (name, bytes, waited) = (recorded.name.clone(), recorded.bytes, Some(ended.since(waits)));
        let kind = SpanKind::Transfer { name, bytes, op: recorded.op, waited };
        Some(self.span(kind, &recorded.started, ended))
    }

    fn span(&self, kind: SpanKind, from: &Mark, to: &Mark) -> MeasuredSpan {
        MeasuredSpan { rank: self.rank, kind, start: from.since(&self.begun), duration: to.since(from) }
    }
}

/// Marks when the transfers of a step start, are waited for and have ended.
struct TransferRecorder {
    mesh: Mesh,
    topology: Topology,
    at: Coordinate,
    backend: Rc<dyn Backend>,
    /// The op that runs; `None` after the step.
    op: Cell<Option<Op>>,
    transfers: RefCell<Vec<RecordedTransfer>>,
}

struct RecordedTransfer {
    name: String,
    bytes: u64,
    op: Op,
    /// The address of its buffer.
    address: u64,
    started: Mark,
    waits: Option<Mark>,
    ended: Option<Mark>,
}

impl TransferRecorder {
    /// Updates the transfer of a buffer that has not ended.
    fn update(&self, address: u64, change: impl FnOnce(&mut RecordedTransfer, Mark)) {
        let mut transfers = self.transfers.borrow_mut();
        let open = |transfer: &&mut RecordedTransfer| transfer.address == address && transfer.ended.is_none();
        if let (Some(_), Some(transfer)) = (self.op.get(), transfers.iter_mut().rev().find(open)) {
            change(transfer, self.backend.mark());
        }
    }
}

impl TransferObserver for TransferRecorder {
    fn starts(&self, entry: Entry, address: u64) {
        let Some(op) = self.op.get() else { return };
        let ranks = self.mesh.group_size(entry.group, self.topology);
        let me = self.mesh.group_index(entry.group, self.at, self.topology);
        let (operation, bytes) = match entry.transfer {
            Transfer::Receive { .. } => ("receive", (entry.len * entry.dtype.bytes()) as u64),
            Transfer::Collective(_) | Transfer::Send { .. } => {
                let sent = sent_bytes(entry, ranks, me, |i| i, Topology::ONE_NODE);
                (entry.operation().name(), sent.map(|(.., bytes)| bytes).sum())
            }
        };
        self.transfers.borrow_mut().push(RecordedTransfer {
            name: format!("{operation} over {}", entry.group),
            bytes,
            op,
            address,
            started: self.backend.mark(),
            waits: None,
            ended: None,
        });
    }

    fn waits(&self, address: u64) {
        self.update(address, |transfer, mark| transfer.waits = Some(mark));
    }

    fn ended(&self, address: u64) {
        self.update(address, |transfer, mark| transfer.ended = Some(mark));
    }
}

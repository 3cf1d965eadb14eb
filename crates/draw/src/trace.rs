//! What every rank did in a step, predicted or measured, and the Chrome trace event format, which Perfetto reads too: one
//! process per rank, rows by category, an arrow for every message between stages.

use std::collections::{BTreeMap, HashMap};

use kintsugi_plan::{BackwardPart, Block, Computation, Coordinate, MessageKind, Op, Plan, StepOp, Transfer};
use kintsugi_simulate::{StepWork, Timeline, TransferSpan};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What a span is about: the row it is shown in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// Work on the device.
    Compute,
    /// Ops that start transfers or wait for them.
    Communication,
    /// Kernels and copies of both.
    Kernels,
    /// The transfers themselves. Those that run at the same time are in several rows.
    Transfers,
}

/// What a span is, for its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum SpanKind {
    Forward,
    Recompute,
    Backward,
    BackwardInput,
    BackwardWeight,
    Communication,
    Optimizer,
    Other,
    Kernel,
    Transfer,
}

/// Something that a rank did.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSpan {
    /// The rank.
    pub rank: usize,
    /// Its stage.
    pub stage: usize,
    /// What it did.
    pub name: String,
    /// Which kind of thing that is.
    pub kind: SpanKind,
    /// The micro-batch, if it is about one.
    pub micro: Option<usize>,
    /// Start, seconds.
    pub start: f64,
    /// Duration, seconds.
    pub duration: f64,
    /// Bytes that the rank sent over links, or waited for.
    pub bytes: u64,
    /// Floating-point operations.
    pub flops: u64,
    /// The op that a transfer belongs to.
    pub op: Option<String>,
    /// Seconds at the end of a measured transfer that the rank waited for it.
    pub waited: Option<f64>,
}

/// The spans of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// In the order of the ranks' programs.
    pub spans: Vec<TraceSpan>,
    /// Messages between stages: the span that made the message and the span that used it.
    pub flows: Vec<(usize, usize)>,
}

/// What a rank did, when, in seconds.
#[derive(Clone, Debug)]
pub struct RankSpan {
    /// The rank.
    pub rank: usize,
    /// What it was.
    pub what: RankSpanKind,
    /// Start.
    pub start: f64,
    /// Duration.
    pub duration: f64,
}

/// What a rank did.
#[derive(Clone, Debug)]
pub enum RankSpanKind {
    /// An op.
    Op(Op),
    /// A kernel of this name.
    Kernel(String),
    /// A transfer.
    Transfer(RankTransfer),
}

/// A transfer that a rank took part in.
#[derive(Clone, Debug)]
pub struct RankTransfer {
    /// Operation and group.
    pub name: String,
    /// Bytes that the rank sent, or received in a message.
    pub bytes: u64,
    /// The op that started it.
    pub op: Op,
    /// Seconds at its end that the rank waited for it, if measured.
    pub waited: Option<f64>,
}

impl Trace {
    /// The trace of a predicted step. One rank stands for all of its stage.
    pub fn predicted(plan: &Plan, timeline: &Timeline) -> Self {
        let ranks_per_stage = plan.mesh.ranks_per_stage();
        let span = |stage: usize, what: RankSpanKind, start: f64, end: f64| RankSpan {
            rank: stage * ranks_per_stage,
            what,
            start,
            duration: end - start,
        };
        let work = StepWork::of(plan);
        let mut spans = Vec::new();
        for (stage, ops) in timeline.stages.iter().enumerate() {
            spans.extend(ops.iter().map(|op| span(stage, RankSpanKind::Op(op.op), op.start, op.end)));
        }
        for (stage, transfers) in timeline.transfers.iter().enumerate() {
            spans.extend(transfers.iter().filter_map(|&TransferSpan { start, end, op, number }| {
                let (started, transfer) = (StepWork::started(op), work.transfer(stage, op, number)?);
                let operation = if matches!(started, Op::Start(Transfer::Receive(_))) {
                    "receive"
                } else {
                    transfer.operation.name()
                };
                let name = format!("{operation} over {}", transfer.group);
                let what = RankTransfer { name, bytes: transfer.bytes, op: started, waited: None };
                Some(span(stage, RankSpanKind::Transfer(what), start, end))
            }));
        }
        Trace::of_spans(plan, &work, spans)
    }

    /// The trace of what ranks of a plan did.
    pub fn new(plan: &Plan, spans: impl IntoIterator<Item = RankSpan>) -> Self {
        Trace::of_spans(plan, &StepWork::of(plan), spans)
    }

    fn of_spans(plan: &Plan, work: &StepWork, spans: impl IntoIterator<Item = RankSpan>) -> Self {
        let mut trace = Trace::default();
        let mut places: HashMap<(usize, Op), usize> = HashMap::new();
        for RankSpan { rank, what, start, duration } in spans {
            let stage = plan.mesh.coordinate(rank).pp();
            let blank = TraceSpan {
                rank,
                stage,
                name: String::new(),
                kind: SpanKind::Kernel,
                micro: None,
                start,
                duration,
                bytes: 0,
                flops: 0,
                op: None,
                waited: None,
            };
            trace.spans.push(match what {
                RankSpanKind::Op(op) => {
                    places.insert((rank, op), trace.spans.len());
                    let work = work.of_op(stage, op);
                    let (kind, micro) = (SpanKind::of(op), op.micro());
                    TraceSpan {
                        name: op.to_string(),
                        kind,
                        micro,
                        bytes: work.bytes,
                        flops: work.flops,
                        ..blank
                    }
                }
                RankSpanKind::Kernel(name) => TraceSpan { name, ..blank },
                RankSpanKind::Transfer(RankTransfer { name, bytes, op, waited }) => TraceSpan {
                    name,
                    kind: SpanKind::Transfer,
                    micro: op.micro(),
                    bytes,
                    op: Some(op.to_string()),
                    waited,
                    ..blank
                },
            });
        }
        trace.flows = flows(plan, &places);
        trace
    }

    /// The trace as JSON.
    pub fn to_chrome(&self) -> String {
        let mut ranks: Vec<(usize, usize)> = self.spans.iter().map(|span| (span.rank, span.stage)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let mut events = Vec::with_capacity(6 * ranks.len() + self.spans.len() + 2 * self.flows.len());
        let rows = self.rows();
        for (rank, stage) in ranks {
            events.push(label("process_name", rank, 0, &format!("rank {rank}, stage {stage}")));
            let of_rank = self.spans.iter().zip(&rows).filter(|(span, _)| span.rank == rank);
            let used = of_rank.map(|(span, &row)| (row, span.kind.category()));
            let first =
                [Category::Compute, Category::Communication].map(|category| (category as usize, category));
            let named: BTreeMap<usize, Category> = used.chain(first).collect();
            for (row, category) in named {
                events.push(label("thread_name", rank, row, &category.row_name(row)));
            }
        }
        events.extend(self.spans.iter().zip(&rows).map(|(span, &row)| complete(span, row)));
        for (id, &(from, to)) in self.flows.iter().enumerate() {
            let (made, used) = (&self.spans[from], &self.spans[to]);
            // Inside of its span: at its very end the next one may have begun.
            events.push(arrow("s", id, from, made, made.start + 0.999 * made.duration));
            events.push(arrow("f", id, to, used, used.start + 0.001 * used.duration));
        }
        json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string()
    }

    /// The row of every span: its category, and for transfers the first row that is free.
    pub(crate) fn rows(&self) -> Vec<usize> {
        let mut rows: Vec<usize> = self.spans.iter().map(|span| span.kind.category() as usize).collect();
        let is_transfer = |&i: &usize| self.spans[i].kind == SpanKind::Transfer;
        let mut transfers: Vec<usize> = (0..self.spans.len()).filter(is_transfer).collect();
        transfers.sort_by(|&a, &b| self.spans[a].start.total_cmp(&self.spans[b].start));
        // When each row of a rank becomes free.
        let mut free: HashMap<usize, Vec<f64>> = HashMap::new();
        for i in transfers {
            let TraceSpan { rank, start, duration, .. } = self.spans[i];
            let free = free.entry(rank).or_default();
            let row = free.iter().position(|&free| free <= start).unwrap_or(free.len());
            free.resize(free.len().max(row + 1), 0.0);
            free[row] = start + duration;
            rows[i] += row;
        }
        rows
    }

    /// Reads what [`Trace::to_chrome`] has written; `None` if it is something else.
    pub fn from_chrome(text: &str) -> Option<Self> {
        let file: File = serde_json::from_str(text).ok()?;
        let mut trace = Trace::default();
        let mut begun: HashMap<u64, usize> = HashMap::new();
        for event in file.events {
            match event.ph.as_str() {
                "X" => trace.spans.push(TraceSpan {
                    rank: event.pid,
                    stage: event.args.stage?,
                    name: event.name,
                    kind: event.args.kind?,
                    micro: event.args.micro,
                    start: event.ts * 1e-6,
                    duration: event.dur * 1e-6,
                    bytes: event.args.bytes,
                    flops: event.args.flops,
                    op: event.args.op,
                    waited: event.args.waited.map(|microseconds| microseconds * 1e-6),
                }),
                "s" => drop(begun.insert(event.id?, event.args.span?)),
                "f" => trace.flows.push((*begun.get(&event.id?)?, event.args.span?)),
                _ => {}
            }
        }
        let whole = trace.flows.iter().all(|&(a, b)| a < trace.spans.len() && b < trace.spans.len());
        (whole && !trace.spans.is_empty()).then_some(trace)
    }
}

/// A trace as it is read.
#[derive(Deserialize)]
struct File {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    ph: String,
    name: String,
    pid: usize,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    id: Option<u64>,
    #[serde(default)]
    args: Arguments,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Arguments {
    stage: Option<usize>,
    kind: Option<SpanKind>,
    micro: Option<usize>,
    bytes: u64,
    flops: u64,
    span: Option<usize>,
    op: Option<String>,
    /// Microseconds.
    waited: Option<f64>,
}

/// For every message between stages the span that made it and the one that used it, where both are there.
fn flows(plan: &Plan, places: &HashMap<(usize, Op), usize>) -> Vec<(usize, usize)> {
    type Key = (usize, usize, MessageKind, Block, usize);
    let mut made: HashMap<Key, Op> = HashMap::new();
    let mut used: Vec<(Key, Op)> = Vec::new();
    for stage in 0..plan.mesh.pp() {
        let (mut last, mut received): (Option<Op>, Vec<Key>) = (None, Vec::new());
        for op in plan.program(stage).ops {
            match op {
                Op::Compute { .. } => {
                    used.extend(received.drain(..).map(|key| (key, op)));
                    last = Some(op);
                }
                Op::Start(Transfer::Send(message)) => {
                    let key = (stage, message.peer, message.kind, message.block, message.micro);
                    made.extend(last.map(|op| (key, op)));
                }
                Op::Wait(Transfer::Receive(message)) => {
                    received.push((message.peer, stage, message.kind, message.block, message.micro));
                }
                _ => {}
            }
        }
    }
    let places_in_stage = 0..plan.mesh.ranks_per_stage();
    let arrow = |place: usize, (key, op): &(Key, Op)| {
        let rank = |stage: usize| plan.mesh.rank(Coordinate::of_stage(stage)) + place;
        let from = places.get(&(rank(key.0), *made.get(key)?))?;
        Some((*from, *places.get(&(rank(key.1), *op))?))
    };
    places_in_stage.flat_map(|place| used.iter().filter_map(move |used| arrow(place, used))).collect()
}

impl SpanKind {
    /// The kind of an op.
    pub fn of(op: Op) -> Self {
        match op {
            Op::Compute { kind, .. } => match kind {
                Computation::Forward | Computation::Evaluate | Computation::Decode => SpanKind::Forward,
                Computation::Recompute => SpanKind::Recompute,
                Computation::Backward(BackwardPart::Both) => SpanKind::Backward,
                Computation::Backward(BackwardPart::Input | BackwardPart::Frozen) => SpanKind::BackwardInput,
                Computation::Backward(BackwardPart::Weight) => SpanKind::BackwardWeight,
            },
            Op::Step(StepOp::Measure | StepOp::Clip | StepOp::Update | StepOp::Average)
            | Op::Matrices { .. } => SpanKind::Optimizer,
            Op::Step(StepOp::Begin)
            | Op::Load { .. }
            | Op::Feed { .. }
            | Op::Choose { .. }
            | Op::Release { .. }
            | Op::Discard { .. } => SpanKind::Other,
            Op::Start(_) | Op::Wait(_) => SpanKind::Communication,
        }
    }

    pub(crate) fn category(self) -> Category {
        match self {
            SpanKind::Communication => Category::Communication,
            SpanKind::Kernel => Category::Kernels,
            SpanKind::Transfer => Category::Transfers,
            SpanKind::Forward
            | SpanKind::Recompute
            | SpanKind::Backward
            | SpanKind::BackwardInput
            | SpanKind::BackwardWeight
            | SpanKind::Optimizer
            | SpanKind::Other => Category::Compute,
        }
    }
}

impl Category {
    fn name(self) -> &'static str {
        match self {
            Category::Compute => "compute",
            Category::Communication => "communication",
            Category::Kernels => "kernels",
            Category::Transfers => "transfers",
        }
    }

    /// The name of one of its rows.
    pub(crate) fn row_name(self, row: usize) -> String {
        match row - self as usize {
            0 => self.name().to_owned(),
            more => format!("{} {}", self.name(), more + 1),
        }
    }
}

/// A metadata event: the name of a process or thread.
fn label(what: &str, rank: usize, thread: usize, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": rank, "tid": thread, "args": { "name": name } })
}

/// A complete event: one span.
fn complete(span: &TraceSpan, row: usize) -> Value {
    let mut args = json!({ "stage": span.stage, "kind": span.kind });
    if let Some(micro) = span.micro {
        args["micro"] = micro.into();
    }
    for (name, value) in [("bytes", span.bytes), ("flops", span.flops)] {
        if value > 0 {
            args[name] = value.into();
        }
    }
    if let Some(op) = &span.op {
        args["op"] = op.as_str().into();
    }
    if let Some(waited) = span.waited {
        args["waited"] = (waited * 1e6).into();
    }
    json!({
        "ph": "X",
        "name": span.name,
        "cat": span.kind.category().name(),
        "pid": span.rank,
        "tid": row,
        "ts": span.start * 1e6,
        "dur": span.duration * 1e6,
        "args": args,
    })
}

/// One end of an arrow. It belongs to the span that encloses its time.
fn arrow(ph: &str, id: usize, place: usize, span: &TraceSpan, at: f64) -> Value {
    json!({
        "ph": ph,
        "bp": "e",
        "name": "message",
        "cat": "message",
        "id": id,
        "pid": span.rank,
        "tid": span.kind.category() as usize,
        "ts": at * 1e6,
        "args": { "span": place },
    })
}

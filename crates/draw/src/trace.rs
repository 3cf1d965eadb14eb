//! Traces in the Chrome trace event format, which Perfetto reads too: one process per rank, one row per category.

use kintsugi_plan::Op;
use kintsugi_simulate::{Span, Timeline};
use serde_json::{Value, json};

/// What a span is about: the row it is shown in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// Work on the device.
    Compute,
    /// Transfers between ranks, and waiting for them.
    Communication,
    /// What the device ran for both.
    Kernels,
}

/// Something that a rank did, predicted or measured.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSpan {
    /// The rank.
    pub rank: usize,
    /// Its stage.
    pub stage: usize,
    /// What it did.
    pub name: String,
    /// Which row it belongs to.
    pub category: Category,
    /// Start, microseconds.
    pub start_us: f64,
    /// Duration, microseconds.
    pub duration_us: f64,
}

impl Category {
    /// The category of an op.
    pub fn of(op: Op) -> Self {
        match op {
            Op::Begin
            | Op::Load { .. }
            | Op::Forward { .. }
            | Op::Evaluate { .. }
            | Op::Feed { .. }
            | Op::Decode { .. }
            | Op::Choose { .. }
            | Op::Recompute { .. }
            | Op::Backward { .. }
            | Op::Release { .. }
            | Op::Measure
            | Op::Clip
            | Op::Step => Category::Compute,
            Op::GatherStart { .. }
            | Op::GatherWait { .. }
            | Op::ReduceStart { .. }
            | Op::ReduceWait { .. }
            | Op::SendStart { .. }
            | Op::SendWait { .. }
            | Op::ReceiveStart { .. }
            | Op::ReceiveWait { .. }
            | Op::ShareStart
            | Op::ShareWait
            | Op::NormStart { .. }
            | Op::NormWait { .. }
            | Op::RefreshStart { .. }
            | Op::RefreshWait { .. } => Category::Communication,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Category::Compute => "compute",
            Category::Communication => "communication",
            Category::Kernels => "kernels",
        }
    }
}

/// The spans of a predicted step. `ranks_per_stage` ranks act as one.
pub fn trace(timeline: &Timeline, ranks_per_stage: usize) -> Vec<TraceSpan> {
    let stages = timeline.stages.iter().enumerate();
    let spans = stages.flat_map(|(stage, spans)| spans.iter().map(move |span| (stage, span)));
    let one = |(stage, span): (usize, &Span)| TraceSpan {
        rank: stage * ranks_per_stage,
        stage,
        name: span.op.to_string(),
        category: Category::of(span.op),
        start_us: span.start * 1e6,
        duration_us: (span.end - span.start) * 1e6,
    };
    spans.map(one).collect()
}

/// The trace of a run as JSON.
pub fn chrome(spans: &[TraceSpan]) -> String {
    let mut ranks: Vec<(usize, usize)> = spans.iter().map(|span| (span.rank, span.stage)).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let mut events = Vec::with_capacity(4 * ranks.len() + spans.len());
    for (rank, stage) in ranks {
        events.push(label("process_name", rank, 0, &format!("rank {rank}, stage {stage}")));
        let has_kernels = |span: &TraceSpan| span.rank == rank && span.category == Category::Kernels;
        let kernels = spans.iter().any(has_kernels).then_some(Category::Kernels);
        for category in [Category::Compute, Category::Communication].into_iter().chain(kernels) {
            events.push(label("thread_name", rank, category as usize, category.name()));
        }
    }
    events.extend(spans.iter().map(complete));
    json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string()
}

/// A metadata event: the name of a process or thread.
fn label(what: &str, rank: usize, thread: usize, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": rank, "tid": thread, "args": { "name": name } })
}

/// A complete event: one span.
fn complete(span: &TraceSpan) -> Value {
    json!({
        "ph": "X",
        "name": span.name,
        "cat": span.category.name(),
        "pid": span.rank,
        "tid": span.category as usize,
        "ts": span.start_us,
        "dur": span.duration_us,
    })
}

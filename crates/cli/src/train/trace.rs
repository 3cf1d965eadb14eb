//! The measured trace of one step.

use std::path::Path;

use kintsugi_engine::Span;
use kintsugi_plan::Plan;
use kintsugi_simulate::timeline::{Category, TraceSpan, chrome};

use crate::failure::Failure;
use crate::files::write_whole;

/// The step of a run of `steps` that is traced, from 0: the third, when caches are warm, or the last of fewer.
pub fn step(steps: u64) -> u64 {
    steps.clamp(1, 3) - 1
}

/// Writes the trace and says so.
pub fn write(plan: &Plan, spans: &[Span], path: &Path) -> Result<String, Failure> {
    if spans.is_empty() {
        return Ok("trace    none: the run ended before the step that is traced\n".to_owned());
    }
    let spans: Vec<TraceSpan> = spans.iter().map(|span| trace_span(plan, span)).collect();
    write_whole(path, &chrome(&spans))?;
    Ok(format!("trace    {}\n", path.display()))
}

fn trace_span(plan: &Plan, span: &Span) -> TraceSpan {
    TraceSpan {
        rank: span.rank,
        stage: plan.mesh.coordinate(span.rank).pp,
        name: span.op.to_string(),
        category: Category::of(span.op),
        start_us: span.start.as_secs_f64() * 1e6,
        duration_us: span.duration.as_secs_f64() * 1e6,
    }
}

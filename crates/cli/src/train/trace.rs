//! The measured trace of one step.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use clap::Args;
use kintsugi_draw::{RankSpan, RankSpanKind, RankTransfer, Trace, trace_svg};
use kintsugi_engine::{MeasuredSpan, SpanKind};
use kintsugi_plan::Plan;

use crate::failure::Failure;
use crate::files::{check_writable, write_whole};

/// Number of kernel names that are listed, the slowest first. The others are summed.
const NAMED: usize = 24;

/// The arguments that select the traced step.
#[derive(Args)]
pub struct TraceArguments {
    /// Writes a trace of one step on all ranks, for ui.perfetto.dev
    ///
    /// A picture if FILE ends with .svg. `kintsugi report` looks for the trace as trace.json in the run's folder.
    #[arg(long = "trace", value_name = "FILE")]
    pub path: Option<PathBuf>,
    /// The step to trace, from 1; by default the third, when caches are warm
    #[arg(long = "trace-step", value_name = "N", requires = "path")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    step: Option<u64>,
}

impl TraceArguments {
    /// The step to trace of a run of `steps`, from 0, if a path was given.
    pub fn step(&self, steps: u64) -> Result<Option<u64>, Failure> {
        let Some(path) = &self.path else { return Ok(None) };
        check_writable(path)?;
        match self.step {
            Some(step) if step > steps => {
                Err(Failure::mistake(format!("--trace-step {step}: this run has {steps} steps")))
            }
            Some(step) => Ok(Some(step - 1)),
            None => Ok(Some(steps.clamp(1, 3) - 1)),
        }
    }
}

/// Writes the trace. Returns a line about it, and a table of the slowest GPU kernels.
pub fn write(plan: &Plan, spans: &[MeasuredSpan], path: &Path) -> Result<String, Failure> {
    if spans.is_empty() {
        return Ok("trace    none: the run ended before the traced step\n".to_owned());
    }
    let trace = Trace::new(plan, spans.iter().map(rank_span));
    write_file(path, plan, &trace, "measured")?;
    Ok(format!("{}trace    {}\n", kernels(spans), path.display()))
}

/// Writes a trace to a file, whose name says whether as a picture. `origin` says where the times come from.
pub fn write_file(path: &Path, plan: &Plan, trace: &Trace, origin: &str) -> Result<(), Failure> {
    let is_picture = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg"));
    let text = if is_picture {
        let layout = kintsugi_report::plan::layout(plan);
        trace_svg(trace, &format!("{}, one step, {origin}: {layout}", plan.model.name))
    } else {
        trace.to_chrome()
    };
    write_whole(path, text.as_bytes())
}

fn rank_span(span: &MeasuredSpan) -> RankSpan {
    RankSpan {
        rank: span.rank,
        what: match &span.kind {
            SpanKind::Op(op) => RankSpanKind::Op(*op),
            SpanKind::Kernel(name) => RankSpanKind::Kernel(name.clone()),
            SpanKind::Transfer { name, bytes, op, waited } => RankSpanKind::Transfer(RankTransfer {
                name: name.clone(),
                bytes: *bytes,
                op: *op,
                waited: waited.map(|waited| waited.as_secs_f64()),
            }),
        },
        start: span.start.as_secs_f64(),
        duration: span.duration.as_secs_f64(),
    }
}

/// The total time of the kernels of each name on rank 0, longest first; empty if there are none.
fn kernels(spans: &[MeasuredSpan]) -> String {
    let mut sums: HashMap<&str, (u64, f64)> = HashMap::new();
    for span in spans.iter().filter(|span| span.rank == 0) {
        if let SpanKind::Kernel(name) = &span.kind {
            let (count, ms) = sums.entry(name).or_default();
            *count += 1;
            *ms += span.duration.as_secs_f64() * 1e3;
        }
    }
    if sums.is_empty() {
        return String::new();
    }
    let step = spans.iter().filter(|span| span.rank == 0).map(|span| span.start + span.duration).max();
    let step = step.unwrap_or_default().as_secs_f64() * 1e3;
    let mut sums: Vec<(&str, (u64, f64))> = sums.into_iter().collect();
    sums.sort_by(|(a, (_, x)), (b, (_, y))| y.total_cmp(x).then(a.cmp(b)));
    let row = |name: &str, count: u64, ms: f64| {
        format!("  {name:<56} {count:>6} {ms:>9.3} ms {:>6.1} %\n", 100.0 * ms / step)
    };
    let mut table = format!("kernels  of rank 0 in the traced step of {step:.1} ms\n");
    let (named, others) = sums.split_at(sums.len().min(NAMED));
    table.extend(named.iter().map(|&(name, (count, ms))| row(name, count, ms)));
    let add = |(count, ms), &(_, (more, longer)): &(&str, (u64, f64))| (count + more, ms + longer);
    let (count, ms) = others.iter().fold((0, 0.0), add);
    if count > 0 {
        table += &row("others", count, ms);
    }
    table
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kintsugi_plan::{Op, StepOp};

    use super::*;

    fn span(rank: usize, kind: SpanKind, start: u64, duration: u64) -> MeasuredSpan {
        MeasuredSpan {
            rank,
            kind,
            start: Duration::from_millis(start),
            duration: Duration::from_millis(duration),
        }
    }

    fn kernel(rank: usize, name: &str, start: u64, duration: u64) -> MeasuredSpan {
        span(rank, SpanKind::Kernel(name.to_owned()), start, duration)
    }

    #[test]
    fn kernels_are_summed_by_name_and_the_longest_come_first() {
        let spans = [
            span(0, SpanKind::Op(Op::Step(StepOp::Begin)), 0, 10),
            kernel(0, "norm", 0, 1),
            kernel(0, "product", 1, 5),
            kernel(0, "norm", 6, 2),
            kernel(1, "product", 0, 100),
        ];
        let said: Vec<String> = kernels(&spans)
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            said,
            [
                "kernels of rank 0 in the traced step of 10.0 ms",
                "product 1 5.000 ms 50.0 %",
                "norm 2 3.000 ms 30.0 %"
            ]
        );
    }

    #[test]
    fn many_kernels_are_named_in_part() {
        let spans: Vec<MeasuredSpan> = (0..40).map(|i| kernel(0, &format!("kernel {i}"), i, 1)).collect();
        let said = kernels(&spans);
        assert_eq!(said.lines().count(), 1 + NAMED + 1, "{said}");
        assert!(said.lines().last().is_some_and(|line| line.trim_start().starts_with("others")), "{said}");
    }

    #[test]
    fn a_device_without_kernels_has_no_table() {
        assert_eq!(kernels(&[span(0, SpanKind::Op(Op::Step(StepOp::Begin)), 0, 10)]), "");
    }
}

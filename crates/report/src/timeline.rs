//! What ranks did in a step, as the page draws it: spans in columns, a row for each rank.

use std::collections::{HashMap, HashSet};

use kintsugi_draw::{SpanKind, Trace, TraceSpan};
use serde::Serialize;

/// A timeline on a page.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TimelineData {
    /// Its heading.
    pub title: String,
    /// The question that it answers.
    pub question: String,
    /// Below it.
    pub caption: String,
    /// `seconds`, or `units` if nothing is known of the device's speed.
    pub unit: &'static str,
    /// When the step ends.
    pub end: f64,
    /// The names of the rows.
    pub rows: Vec<String>,
    /// The kinds of spans.
    pub kinds: Vec<SpanKind>,
    /// The names of spans.
    pub names: Vec<String>,
    row: Vec<usize>,
    start: Vec<f64>,
    duration: Vec<f64>,
    kind: Vec<usize>,
    name: Vec<usize>,
    micro: Vec<Option<usize>>,
    bytes: Vec<u64>,
    flops: Vec<u64>,
    /// Messages: the span that made it and the span that used it.
    flows: Vec<(usize, usize)>,
}

/// Spans on a page: about two megabytes.
const MAX_SPANS: usize = 30_000;

impl TimelineData {
    /// The timeline of a trace. If it has very many spans, one rank of each stage is shown, then the layers of a pass
    /// together, then the beginning of the step; the caption says so.
    pub fn new(title: &str, trace: &Trace, unit: &'static str) -> Self {
        let mut timeline = TimelineData { title: title.to_owned(), unit, ..TimelineData::default() };
        // The bars of a rank are what it does itself. Its transfers run beside them.
        let (mut spans, mut flows) = kept(&trace.spans, &trace.flows, |span| span.kind != SpanKind::Transfer);
        let mut notes = Vec::new();
        if spans.len() > MAX_SPANS {
            (spans, flows) = one_of_each_stage(&spans, &flows);
            notes.push("one rank of each stage is shown");
        }
        if spans.len() > MAX_SPANS {
            (spans, flows) = passes(&spans, &flows);
            notes.push("the layers of a pass are one bar");
        }
        if spans.len() > MAX_SPANS {
            (spans, flows) = beginning(&spans, &flows);
            notes.push("only the beginning of the step is shown");
        }
        timeline.caption = notes.join("; ");
        let mut rows: Vec<(usize, bool, usize)> =
            spans.iter().map(|span| (span.rank, span.kind == SpanKind::Kernel, span.stage)).collect();
        rows.sort_unstable();
        rows.dedup();
        // One rank stands for its stage in a prediction.
        let stages: HashSet<usize> = rows.iter().map(|&(_, _, stage)| stage).collect();
        let alone = stages.len() == rows.len() && rows.len() > 1;
        let name = |&(rank, kernels, stage): &(usize, bool, usize)| match (alone, kernels) {
            (true, _) => format!("stage {stage}"),
            (false, true) => format!("rank {rank}, kernels"),
            (false, false) => format!("rank {rank}, stage {stage}"),
        };
        timeline.rows = rows.iter().map(name).collect();
        let row_of: HashMap<(usize, bool), usize> =
            rows.iter().enumerate().map(|(i, &(rank, kernels, _))| ((rank, kernels), i)).collect();
        let mut names: HashMap<String, usize> = HashMap::new();
        for span in spans {
            timeline.row.push(row_of[&(span.rank, span.kind == SpanKind::Kernel)]);
            timeline.start.push(short(span.start));
            timeline.duration.push(short(span.duration));
            timeline.end = timeline.end.max(span.start + span.duration);
            let kind = timeline.kinds.iter().position(|&kind| kind == span.kind);
            timeline.kind.push(kind.unwrap_or(timeline.kinds.len()));
            timeline.kinds.extend(kind.is_none().then_some(span.kind));
            let next = names.len();
            timeline.name.push(*names.entry(span.name.clone()).or_insert_with(|| {
                timeline.names.push(span.name);
                next
            }));
            timeline.micro.push(span.micro);
            timeline.bytes.push(span.bytes);
            timeline.flops.push(span.flops);
        }
        timeline.flows = flows;
        timeline
    }
}

/// To the picosecond.
fn short(seconds: f64) -> f64 {
    (seconds * 1e12).round() / 1e12
}

type Spans = (Vec<TraceSpan>, Vec<(usize, usize)>);

/// The spans that `keep` returns a new place for, and the flows between them.
fn kept(spans: &[TraceSpan], flows: &[(usize, usize)], keep: impl Fn(&TraceSpan) -> bool) -> Spans {
    let mut places = vec![None; spans.len()];
    let mut left = Vec::new();
    for (i, span) in spans.iter().enumerate().filter(|(_, span)| keep(span)) {
        places[i] = Some(left.len());
        left.push(span.clone());
    }
    (left, flows.iter().filter_map(|&(a, b)| Some((places[a]?, places[b]?))).collect())
}

fn one_of_each_stage(spans: &[TraceSpan], flows: &[(usize, usize)]) -> Spans {
    let mut first: HashMap<usize, usize> = HashMap::new();
    for span in spans {
        let rank = first.entry(span.stage).or_insert(span.rank);
        *rank = span.rank.min(*rank);
    }
    kept(spans, flows, |span| first[&span.stage] == span.rank)
}

/// Joins spans of one kind and micro-batch that follow each other on a rank.
fn passes(spans: &[TraceSpan], flows: &[(usize, usize)]) -> Spans {
    let mut joined: Vec<TraceSpan> = Vec::new();
    let mut places = Vec::with_capacity(spans.len());
    for span in spans {
        match joined.last_mut() {
            Some(last) if (last.rank, last.kind, last.micro) == (span.rank, span.kind, span.micro) => {
                last.duration = span.start + span.duration - last.start;
                last.bytes = last.bytes.saturating_add(span.bytes);
                last.flops = last.flops.saturating_add(span.flops);
                last.name = match span.micro {
                    Some(micro) => format!("{}, micro-batch {micro}", word(span.kind)),
                    None => word(span.kind),
                };
            }
            _ => joined.push(span.clone()),
        }
        places.push(joined.len() - 1);
    }
    (joined, flows.iter().map(|&(a, b)| (places[a], places[b])).collect())
}

fn word(kind: SpanKind) -> String {
    let value = serde_json::to_value(kind).expect("a word");
    value.as_str().unwrap_or_default().replace('-', " ")
}

/// The spans of all ranks that begin first.
fn beginning(spans: &[TraceSpan], flows: &[(usize, usize)]) -> Spans {
    let mut starts: Vec<f64> = spans.iter().map(|span| span.start).collect();
    starts.sort_unstable_by(f64::total_cmp);
    let until = starts[MAX_SPANS - 1];
    kept(spans, flows, |span| span.start < until)
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_simulate::Timeline;

    use super::*;

    fn timeline(micro_batches: usize) -> TimelineData {
        let global = format!("batch.global={micro_batches}");
        let sets =
            ["parallel.tp=1", "parallel.dp=1", "parallel.pp=4", "batch.micro=1", "model.layers=16", &global];
        let plan = ConfigSource::demo().sets(sets).plan().expect("a plan");
        TimelineData::new("predicted", &Trace::predicted(&plan, &Timeline::of(&plan)), "units")
    }

    /// Spans that are no waits.
    fn computed(found: &TimelineData) -> usize {
        found.kind.iter().filter(|&&kind| found.kinds[kind] != SpanKind::Communication).count()
    }

    #[test]
    fn a_short_step_has_every_op_and_message() {
        let found = timeline(4);
        assert_eq!((&found.rows[3][..], found.caption.as_str()), ("stage 3", ""));
        assert_eq!(computed(&found), 16 * 4 * 2, "layers, micro-batches, forward and backward");
        assert_eq!(found.flows.len(), 3 * 4 * 2);
        assert_eq!(found.kinds.len(), 3, "forward, backward and waiting");
    }

    #[test]
    fn a_long_step_shows_passes() {
        let found = timeline(1200);
        assert_eq!(found.caption, "one rank of each stage is shown; the layers of a pass are one bar");
        assert_eq!(computed(&found), 4 * 1200 * 2);
        assert!(found.names.contains(&"forward, micro-batch 7".to_owned()), "{:?}", &found.names[..9]);
    }
}

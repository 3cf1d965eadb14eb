//! What a search has found: as rows, as a table, and in JSON.

use std::fmt::Write as _;

use kintsugi_plan::{Integer, Plan, When};
use kintsugi_simulate::{Coverage, LINK_EFFICIENCY, LinkTimes, TimeRange, Timing, predict, time};
use kintsugi_spec::units;
use kintsugi_tune::{
    Candidate, Counts, FREE_SHARE, Gain, Outcome, Pick, SearchResult, complexity, outcome, reason,
};
use serde::Serialize;

use super::search::{FinishedSearch, limit};
use super::speed::spread;
use crate::describe::{self, Fact, fact};
use crate::fit;
use crate::host::planned_device;
use crate::table::{Fit, Table, left_out};

/// A strategy as a row.
#[derive(Serialize)]
pub struct Row {
    tp: usize,
    /// Only if the search varies it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cp: Option<usize>,
    pp: usize,
    dp: usize,
    micro: usize,
    micro_batches: usize,
    schedule: String,
    virtual_stages: usize,
    layers_per_stage: Vec<usize>,
    sequence_parallel: bool,
    zero: usize,
    /// Replicas over which weights, gradients, states and a secondary shard are sharded.
    shards: [usize; 4],
    /// The codes of weights, of their refresh and of gradients.
    quantized: [Option<Integer>; 3],
    gather: Option<When>,
    reduce: Option<When>,
    recompute: String,
    #[serde(flatten)]
    outcome: Outcome,
    /// The range of a step's time.
    range: TimeRange,
    reason: String,
    #[serde(skip)]
    pub plan: Plan,
}

/// The rows of a search.
pub struct Rows {
    /// The best strategies.
    pub best: Vec<Row>,
    /// Why the first is preferred to the fastest, if it is another.
    pub pick: Option<String>,
    /// What its mechanisms gain, and what others would gain.
    pub gains: Vec<Gain>,
    /// The configuration's own strategy.
    pub configured: Option<Row>,
}

/// What `plan --search --json` prints.
#[derive(Serialize)]
pub struct Answer<'a> {
    ranks: usize,
    counts: Counts,
    pick: Option<&'a str>,
    gains: &'a [Gain],
    #[serde(rename = "given")]
    configured: Option<&'a Row>,
    best: &'a [Row],
}

impl Rows {
    /// The rows of what a search has found, and of the plan of the configuration if it has as many ranks.
    pub fn new(base: &Plan, found: &SearchResult, configured: Option<Plan>) -> Self {
        let plan = |candidate: &Candidate| {
            base.with_strategy(&candidate.strategy).expect("a strategy that was found")
        };
        let Some(first) = found.best.first() else {
            return Rows { best: Vec::new(), pick: None, gains: Vec::new(), configured: None };
        };
        let fastest = found.fastest.as_ref().filter(|fastest| fastest.strategy != first.strategy);
        let pick = fastest.zip(found.pick.as_ref()).map(|(fastest, pick)| preference(pick, fastest));
        let winner = (plan(first), first.timing);
        let lost = |plan: &Plan, timing: &Timing| reason((&winner.0, &winner.1), (plan, timing));
        let best = found.best.iter().enumerate().map(|(i, candidate)| {
            let plan = plan(candidate);
            let reserved = candidate.reserved.unwrap_or(candidate.peak);
            let reason = match &pick {
                None if i == 0 => "the best".to_owned(),
                Some(_) if i == 0 => "the pick".to_owned(),
                _ => lost(&plan, &candidate.timing),
            };
            let fits = limit(base).map(|_| true);
            let range = TimeRange::new(&plan, &candidate.timing, candidate.links);
            row(plan, (&candidate.timing, range), reserved, fits, reason)
        });
        let best = best.collect();
        let configured = configured.and_then(|plan| Some((time(&plan)?, plan))).map(|(timing, plan)| {
            let range = TimeRange::of(&plan, &timing);
            let device = planned_device(&plan, plan.mesh.ranks());
            let prediction = predict(&plan, device, Coverage::quick(&plan)).under_framework(&plan);
            let fits = fit::known(&plan, &prediction);
            let reserved = prediction.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0);
            let reason = lost(&plan, &timing);
            row(plan, (&timing, range), reserved, fits, reason)
        });
        let gains = found.pick.as_ref().map(|pick| pick.gains.clone()).unwrap_or_default();
        Rows { best, pick, gains, configured }
    }
}

impl<'a> Answer<'a> {
    /// The answer of a search.
    pub fn new(FinishedSearch { ranks, found, rows, .. }: &'a FinishedSearch) -> Self {
        Answer {
            ranks: *ranks,
            counts: found.counts,
            pick: rows.pick.as_deref(),
            gains: &rows.gains,
            configured: rows.configured.as_ref(),
            best: &rows.best,
        }
    }
}

fn row(
    plan: Plan,
    (timing, range): (&Timing, TimeRange),
    reserved: u64,
    fits: Option<bool>,
    reason: String,
) -> Row {
    let (mesh, sharding) = (plan.mesh, plan.sharding);
    let sharded = [sharding.states, sharding.gradients, sharding.weights];
    Row {
        tp: mesh.tp(),
        cp: (mesh.cp() > 1).then_some(mesh.cp()),
        pp: mesh.pp(),
        dp: mesh.dp(),
        micro: plan.batch.micro,
        micro_batches: plan.micro_batches(),
        schedule: describe::word(&plan.pipeline.schedule),
        virtual_stages: plan.pipeline.virtual_stages,
        layers_per_stage: plan.pipeline.layers.clone(),
        sequence_parallel: plan.sequence_parallel,
        zero: sharded.iter().rposition(|&shards| shards > 1).map_or(0, |last| last + 1),
        shards: [sharding.weights, sharding.gradients, sharding.states, sharding.secondary],
        quantized: [sharding.quantized.weights, sharding.quantized.refresh, sharding.quantized.gradients]
            .map(|codes| codes.map(|codes| codes.integer)),
        gather: (sharding.weights > 1).then_some(sharding.gather),
        reduce: (sharding.gradients > 1).then_some(sharding.reduce),
        recompute: describe::word(&plan.memory.recompute),
        outcome: outcome(&plan, timing, reserved, fits),
        range,
        reason,
        plan,
    }
}

/// What was searched.
pub fn heading(searched: &FinishedSearch) -> Vec<Fact> {
    let FinishedSearch { base, ranks, supported, found, rows } = searched;
    let counts = &found.counts;
    let refused = match counts.refused {
        0 => String::new(),
        some => format!(", {some} of the best do not fit by their full prediction"),
    };
    let search = format!(
        "{ranks} ranks ({}), {} samples a step: {} strategies, {} cannot be among the best, {} do not fit, {} timed{refused}",
        base.cluster.name, base.batch.global, counts.enumerated, counts.bounded, counts.dropped, counts.timed,
    );
    let seconds = counts.enumeration_s + counts.timing_s;
    let each = units::count((counts.enumerated as f64 / seconds.max(1e-9)).round());
    let speed = format!("{}: {each} strategies per second", units::seconds(seconds));
    let mut facts = vec![describe::model(base), fact("search", search), fact("speed", speed)];
    if limit(base).is_none() {
        facts.push(fact("memory", "unknown (cluster.device.memory), so no strategy was left out"));
    }
    facts.extend(supported.iter().map(|support| fact("only", support.describe())));
    facts.extend((!found.left_out.is_empty()).then(|| fact("left out", found.left_out.join("; "))));
    if let Some(row) = rows.best.first() {
        let links = row.range.links.map_or(String::new(), |_| {
            let slow = 100.0 * LINK_EFFICIENCY[0];
            format!("; with slow links, collectives reach {slow:.0} % of the links between nodes")
        });
        facts.push(fact("range", format!("{}{links}", spread(&row.range))));
    }
    facts
}

/// The table of the best strategies, and what the pick gains.
pub fn text(counts: &Counts, rows: &Rows) -> String {
    let mut text = String::new();
    if counts.enumerated == 0 {
        return text + "no strategy is allowed: use another number of ranks, or relax --only\n";
    }
    if rows.best.is_empty() {
        return text + "no strategy fits: use more nodes (cluster.nodes), or relax --only\n";
    }
    let mut table = Table::new(HEADER);
    for (i, row) in rows.best.iter().enumerate() {
        table.row(cells(&(i + 1).to_string(), row));
    }
    if let Some(row) = &rows.configured {
        table.row(cells(if row.outcome.fits == Some(false) { "given*" } else { "given" }, row));
    }
    let dropped = table.fit_terminal(FIT);
    text.push_str(&table.to_string());
    text.push_str(&left_out(dropped));
    if rows.configured.as_ref().is_some_and(|row| row.outcome.fits == Some(false)) {
        text.push_str("  * does not fit\n");
    }
    if let Some(pick) = &rows.pick {
        writeln!(text, "pick     1 {pick}").expect("a string");
    }
    text.push_str(&describe::lines(gains(&rows.gains).as_slice()));
    text.push('\n');
    text
}

/// Why a pick is preferred to the fastest strategy.
fn preference(pick: &Pick, fastest: &Candidate) -> String {
    let percent = |ratio: f64| format!("{:.1} %", 100.0 * (ratio - 1.0));
    let slower = percent(pick.candidate.timing.step_s / fastest.timing.step_s);
    let [own, other] = [&pick.candidate, fastest].map(|candidate| complexity(&candidate.strategy));
    let judged = match pick.candidate.pessimistic.zip(fastest.pessimistic) {
        None => String::new(),
        Some((own, other)) if own > other => format!(", {} by pessimistic times", percent(own / other)),
        Some((own, other)) => format!(" and {} faster by pessimistic times", percent(other / own)),
    };
    let room = if pick.has_room {
        String::new()
    } else {
        format!("; nothing near the best leaves {:.0} % of the memory free", 100.0 * FREE_SHARE)
    };
    format!("is {slower} slower than the fastest{judged}, with {own} mechanisms instead of {other}{room}")
}

/// What the mechanisms of the pick gain, and what others would gain.
pub fn gains(gains: &[Gain]) -> Option<Fact> {
    let one = |Gain { mechanism, used, gain }: &Gain| {
        let amount = match gain {
            Some(gain) if *gain < 10.0 => format!("{:.1} %", 100.0 * gain),
            Some(gain) => format!("{gain:.0} times the time"),
            None => "all, nothing fits with less".to_owned(),
        };
        let verb = if mechanism.ends_with('s') { "gain" } else { "gains" };
        format!("{mechanism} {verb} {amount}{}", if *used { "" } else { ": left out" })
    };
    let all: Vec<String> = gains.iter().map(one).collect();
    (!all.is_empty()).then(|| fact("gains", all.join(", ")))
}

/// The columns of the table.
pub const HEADER: [&str; 21] = [
    "",
    "tp",
    "pp",
    "dp",
    "micro",
    "schedule",
    "chunks",
    "layers",
    "sequence",
    "ZeRO",
    "gather",
    "reduce",
    "recompute",
    "step",
    "slow links",
    "no overlap",
    "TFLOP/s",
    "MFU",
    "bubble",
    "memory",
    "why not first",
];

/// The columns that a narrow terminal does not show.
const FIT: Fit = Fit {
    least: &[
        "gather",
        "reduce",
        "layers",
        "sequence",
        "chunks",
        "TFLOP/s",
        "bubble",
        "no overlap",
        "slow links",
        "recompute",
        "why not first",
        "micro",
        "memory",
        "ZeRO",
    ],
    sentences: Some("why not first"),
};

/// The ZeRO stage, and the codes that weights and gradients travel as.
fn zero(row: &Row) -> String {
    let codes: Vec<&str> = row.quantized.iter().flatten().map(|integer| integer.name()).collect();
    let mut cell = row.zero.to_string();
    if !codes.is_empty() {
        write!(cell, " {}", codes.join("/")).expect("a string");
    }
    cell
}

/// A row of the table.
pub fn cells(name: &str, row: &Row) -> Vec<String> {
    let when = |when: Option<When>| when.map_or("–".to_owned(), |when| describe::word(&when));
    let outcome = &row.outcome;
    let links = |of: fn(&LinkTimes) -> f64| {
        row.range.links.map_or("–".to_owned(), |links| units::seconds(of(&links)))
    };
    vec![
        name.to_owned(),
        row.cp.map_or(row.tp.to_string(), |cp| format!("{}, cp {cp}", row.tp)),
        row.pp.to_string(),
        row.dp.to_string(),
        row.micro.to_string(),
        row.schedule.clone(),
        row.virtual_stages.to_string(),
        layers(&row.layers_per_stage),
        if row.sequence_parallel { "yes" } else { "–" }.to_owned(),
        zero(row),
        when(row.gather),
        when(row.reduce),
        row.recompute.clone(),
        units::seconds(outcome.step_s),
        links(|links| links.slow_s),
        links(|links| links.no_overlap_s),
        format!("{:.1}", outcome.model_tflops_per_gpu),
        outcome.mfu.map_or("–".to_owned(), |mfu| format!("{:.1} %", 100.0 * mfu)),
        format!("{:.1} %", 100.0 * outcome.bubble),
        units::bytes(outcome.reserved),
        row.reason.clone(),
    ]
}

/// The layers per chunk: of the first one, and of the last one if it has another number.
fn layers(chunks: &[usize]) -> String {
    match (chunks.first(), chunks.last()) {
        (Some(first), Some(last)) if first != last => format!("{first}–{last}"),
        (first, _) => first.map_or_else(String::new, usize::to_string),
    }
}

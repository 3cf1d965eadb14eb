//! `kintsugi plan --search`: every strategy that fits, ranked.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kintsugi_draw::chart::svg;
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Integer, Plan, When};
use kintsugi_report::TableData;
use kintsugi_report::search::{Against, chart};
use kintsugi_simulate::{Coverage, LINK_EFFICIENCY, LinkTimes, TimeRange, Timing, predict, time};
use kintsugi_spec::units;
use kintsugi_tune::{
    By, Candidate, Counts, FREE_SHARE, Gain, Limit, Only, Outcome, Pick, SearchError, SearchPhase,
    SearchResult, Settings, SupportedValues, complexity, outcome, reason, search,
};
use serde::Serialize;

use super::rows::PlotFigure;
use super::speed::spread;
use crate::config::ConfigArguments;
use crate::describe::{self, Fact, fact};
use crate::failure::{ErrorContext, Failure};
use crate::files::{check_writable, write_whole};
use crate::fit;
use crate::host::planned_device;
use crate::output::{Output, json};
use crate::progress::Progress;
use crate::table::{Fit, Table, left_out};

/// The arguments of a search.
#[derive(Args)]
pub struct SearchArguments {
    /// Ranks every strategy that fits: tp, pp, dp, micro-batch, schedule, chunks, sharding, recomputation
    #[arg(long, conflicts_with_all = ["draw", "trace", "scale", "sweep"])]
    search: bool,
    /// The criterion of the ranking
    #[arg(long, value_enum, default_value = "time", requires = "search")]
    by: ByName,
    /// The number of strategies to show
    #[arg(long, value_name = "N", default_value_t = 10, requires = "search")]
    top: usize,
    /// Restricts a key to these values, as in --only parallel.tp=4,8
    #[arg(long, value_name = "KEY=VALUE,…", requires = "search")]
    only: Vec<String>,
    /// Writes the best strategy as a configuration
    ///
    /// With --draw the schedule as SVG, with --reproduce the page.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ByName {
    /// The shortest step
    Time,
    /// The fewest joules
    Energy,
    /// The Pareto front of time and energy
    Pareto,
}

impl From<ByName> for By {
    fn from(name: ByName) -> Self {
        match name {
            ByName::Time => By::Time,
            ByName::Energy => By::Energy,
            ByName::Pareto => By::Pareto,
        }
    }
}

impl SearchArguments {
    /// Whether a search was requested.
    pub fn wanted(&self) -> bool {
        self.search
    }
}

/// A search and what it found.
struct FinishedSearch {
    base: Plan,
    ranks: usize,
    supported: Vec<SupportedValues>,
    found: SearchResult,
    rows: Rows,
}

impl FinishedSearch {
    fn answer(&self) -> Answer<'_> {
        let FinishedSearch { ranks, found, rows, .. } = self;
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

/// What `plan --search --json` prints for a configuration. `by` is a value of `--by`.
pub fn answer_json(
    config: &ConfigArguments,
    only: &[String],
    by: &str,
    top: usize,
) -> Result<String, Failure> {
    let by = ByName::from_str(by, false).map_err(|_| {
        Failure::mistake(format!("by = \"{by}\" is not known; use \"time\", \"energy\" or \"pareto\""))
    })?;
    searched(config, only, (by.into(), top), false).map(|searched| json(&searched.answer()))
}

fn searched(
    config: &ConfigArguments,
    only: &[String],
    (by, top): (By, usize),
    every: bool,
) -> Result<FinishedSearch, Failure> {
    let config = config.read()?;
    let (base, ranks) = config.search_base()?;
    let only = only.iter().map(|text| Only::parse(text)).collect::<Result<Vec<Only>, _>>();
    let only = only.map_err(|error| Failure::mistake(ErrorContext::new("--only", error)))?;
    let power = base.cluster.device.power_idle.and(base.cluster.device.power_max);
    if power.is_none() && by != By::Time {
        let text =
            "--by energy and --by pareto need cluster.device.power_idle and power_max, which are not set";
        return Err(Failure::mistake(text));
    }
    let supported = supported(&base)?;
    let configured = configured_strategy(&config, ranks);
    let progress = Progress::new("enumerating", 0);
    let found = search(
        &Settings {
            base: &base,
            ranks,
            only: &only,
            supported: &supported,
            by,
            top: top.max(1),
            every,
            limit: limit(&base),
            device: planned_device(&base, ranks),
            fits: &|plan, prediction| fit::planned(plan, prediction).is_ok(),
        },
        &|phase, done, best| {
            begin_phase(&progress, phase);
            progress.add_with(done as u64, &best.map_or_else(String::new, best_so_far));
        },
    );
    drop(progress);
    let found = found.map_err(|error| match error {
        SearchError::UnknownSpeed => unknown_speed(),
    })?;
    let rows = rows(&base, &found, configured);
    Ok(FinishedSearch { base, ranks, supported, found, rows })
}

/// Shows the phase of a search.
pub fn begin_phase(progress: &Progress, phase: SearchPhase) {
    match phase {
        SearchPhase::Bounding(count) => progress.begin("bounding", count as u64),
        SearchPhase::Timing(count) => progress.begin("timing", count as u64),
    }
}

/// The pick of a search over the layouts of so many ranks, and how many of them fit. `None` if none fits.
pub fn fastest(config: &ConfigSource, ranks: usize) -> Result<Option<(Plan, usize)>, Failure> {
    let (base, _) = config.search_base()?;
    let found = search(
        &Settings {
            base: &base,
            ranks,
            only: &[],
            supported: &supported(&base)?,
            by: By::Time,
            top: 1,
            every: false,
            limit: limit(&base),
            device: planned_device(&base, ranks),
            fits: &|plan, prediction| fit::planned(plan, prediction).is_ok(),
        },
        &|_, _, _| {},
    );
    let found = found.map_err(|SearchError::UnknownSpeed| unknown_speed())?;
    let Some(best) = found.best.first() else { return Ok(None) };
    Ok(Some((base.with_strategy(&best.strategy)?, found.counts.timed)))
}

/// The best strategy so far, for the progress.
fn best_so_far(best: &Candidate) -> String {
    let (mesh, step) = (best.strategy.mesh, units::seconds(best.timing.step_s));
    format!("{step} with tp {}, pp {}, dp {}", mesh.tp(), mesh.pp(), mesh.dp())
}

/// What the plan's framework can run.
pub fn supported(plan: &Plan) -> Result<Vec<SupportedValues>, Failure> {
    SupportedValues::by_framework(plan)
        .map_err(|error| Failure::mistake(ErrorContext::new("framework.supports", error)))
}

/// Searches, prints what was found, and draws it if a picture is wanted.
pub fn run(
    arguments: &SearchArguments,
    config: &ConfigArguments,
    plot: Option<(&Path, Option<PlotFigure>)>,
    output: Output,
) -> Result<(), Failure> {
    arguments.out.as_deref().into_iter().chain(plot.map(|(path, _)| path)).try_for_each(check_writable)?;
    let against = plot.map(|(_, figure)| against(figure)).transpose()?;
    let searched = searched(config, &arguments.only, (arguments.by.into(), arguments.top), plot.is_some())?;
    let FinishedSearch { base, ranks, found, rows, .. } = &searched;
    output.result(&searched.answer())?;
    if !output.json {
        output.text(&(describe::lines(&heading(&searched)) + "\n" + &text(&found.counts, rows)))?;
    }
    if let (Some((path, _)), Some(against)) = (plot, against) {
        let Some(mut chart) = chart(&found.timed, found.best.first(), against, false) else {
            let reason = "no strategy fits, or the power of the device is not known";
            return Err(Failure::run(format!("{reason}, so {} is not drawn", path.display())));
        };
        chart.title = format!("{} on {ranks} ranks of {}", base.model.name, base.cluster.name);
        if let Some(best) = rows.best.first() {
            let layout = kintsugi_report::plan::layout(&best.plan);
            chart.caption = format!("{}; the pick: {layout}", chart.caption);
        }
        write_whole(path, svg(&chart).as_bytes())?;
        output.text(&format!("plot     {}\n", path.display()))?;
    }
    let Some(path) = &arguments.out else { return Ok(()) };
    let Some(best) = rows.best.first() else {
        return Err(Failure::run(format!("no strategy fits, so {} is not written", path.display())));
    };
    write_whole(path, config.given()?.with_strategy_of(&best.plan, "kintsugi plan --search")?.as_bytes())?;
    output.text(&format!("written  {}\n", path.display()))
}

fn against(figure: Option<PlotFigure>) -> Result<Against, Failure> {
    match figure {
        None | Some(PlotFigure::Memory) => Ok(Against::Memory),
        Some(PlotFigure::Energy) => Ok(Against::Energy),
        Some(_) => {
            let text = "--plot-figure of a search is memory or energy, each over the time of a step";
            Err(Failure::mistake(text))
        }
    }
}

/// What a page of a search shows.
pub struct SearchPage {
    /// The model, the batch and the machine.
    pub base: Plan,
    /// Every strategy that was timed.
    pub timed: Vec<Candidate>,
    /// What was searched.
    pub facts: Vec<Fact>,
    /// The strategy that the search picks, if any fits.
    pub pick: Option<Candidate>,
    /// The best, with the reason why each is not first.
    pub best: TableData,
}

/// Searches for a page.
pub fn search_page(config: &ConfigArguments, only: &[String], top: usize) -> Result<SearchPage, Failure> {
    let searched = searched(config, only, (By::Time, top), true)?;
    let mut facts = heading(&searched);
    let FinishedSearch { base, found, rows, .. } = searched;
    facts.extend(rows.pick.as_ref().map(|pick| fact("pick", format!("1 {pick}"))));
    facts.extend(gains(&rows.gains));
    let numbered = rows.best.iter().enumerate().map(|(i, row)| cells(&(i + 1).to_string(), row));
    let configured = rows.configured.iter().map(|row| cells("given", row));
    let best = TableData {
        title: "The fastest strategies".to_owned(),
        question: "Which is best, and why are the others not first?".to_owned(),
        header: HEADER.map(str::to_owned).to_vec(),
        rows: numbered.chain(configured).collect(),
        ..TableData::default()
    };
    let pick = found.best.into_iter().next();
    Ok(SearchPage { facts, base, timed: found.timed, pick, best })
}

/// The error if the speed of the device is unknown.
pub fn unknown_speed() -> Failure {
    let text = "the speed of cluster.device is unknown (peak_fp32, memory_bandwidth), so no time can be predicted; \
                set a cluster.preset such as \"frontier\", or measure this machine with kintsugi calibrate and add --profile \
                profile.toml";
    Failure::mistake(text)
}

/// The memory of the plan's devices less their headroom, or of this machine if the plan is for this machine.
pub fn limit(base: &Plan) -> Option<Limit> {
    let of_device = base.cluster.device.planned_memory().map(Limit::PerRank);
    of_device.or_else(|| fit::bound(base).map(|bound| Limit::Shared(bound.bytes)))
}

/// The configuration's own layout, if it has the same number of ranks.
fn configured_strategy(config: &ConfigSource, ranks: usize) -> Option<(Plan, Timing)> {
    let plan = config.plan().ok().filter(|plan| plan.mesh.ranks() == ranks)?;
    let timing = time(&plan)?;
    Some((plan, timing))
}

/// A row of the result.
#[derive(Serialize)]
struct Row {
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
    plan: Plan,
}

struct Rows {
    best: Vec<Row>,
    /// Why the first is preferred to the fastest, if it is another.
    pick: Option<String>,
    /// What its mechanisms gain, and what others would gain.
    gains: Vec<Gain>,
    /// The configuration's own strategy.
    configured: Option<Row>,
}

#[derive(Serialize)]
struct Answer<'a> {
    ranks: usize,
    counts: Counts,
    pick: Option<&'a str>,
    gains: &'a [Gain],
    #[serde(rename = "given")]
    configured: Option<&'a Row>,
    best: &'a [Row],
}

fn rows(base: &Plan, found: &SearchResult, configured: Option<(Plan, Timing)>) -> Rows {
    let plan =
        |candidate: &Candidate| base.with_strategy(&candidate.strategy).expect("a strategy that was found");
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
    let configured = configured.map(|(plan, timing)| {
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
fn heading(searched: &FinishedSearch) -> Vec<Fact> {
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

fn text(counts: &Counts, rows: &Rows) -> String {
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
fn gains(gains: &[Gain]) -> Option<Fact> {
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

const HEADER: [&str; 21] = [
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

fn cells(name: &str, row: &Row) -> Vec<String> {
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

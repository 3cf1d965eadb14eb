//! `kintsugi plan --search`: every strategy that fits, ranked.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kintsugi_draw::chart::svg;
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_report::TableData;
use kintsugi_report::search::{Against, chart};
use kintsugi_simulate::Prediction;
use kintsugi_spec::units;
use kintsugi_tune::{
    By, Candidate, Limit, Only, SearchError, SearchPhase, SearchResult, Settings, SupportedValues, search,
};

use super::rows::PlotFigure;
use super::strategies::{Answer, HEADER, Rows, cells, gains, heading, text};
use crate::config::ConfigArguments;
use crate::describe::{self, Fact, fact};
use crate::failure::{ErrorContext, Failure};
use crate::files::{check_writable, write_whole};
use crate::fit;
use crate::host::planned_device;
use crate::output::{Output, json};
use crate::progress::Progress;

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
pub(super) struct FinishedSearch {
    pub base: Plan,
    pub ranks: usize,
    pub supported: Vec<SupportedValues>,
    pub found: SearchResult,
    pub rows: Rows,
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
    searched(config, only, (by.into(), top), false).map(|searched| json(&Answer::new(&searched)))
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
    let progress = Progress::new("enumerating", 0);
    let settings = settings(&base, ranks, &supported);
    let found =
        search(&Settings { only: &only, by, top: top.max(1), every, ..settings }, &|phase, done, best| {
            begin_phase(&progress, phase);
            progress.add_with(done as u64, &best.map_or_else(String::new, best_so_far));
        });
    drop(progress);
    let found = found.map_err(|SearchError::UnknownSpeed| unknown_speed())?;
    let rows = Rows::new(&base, &found, config.plan().ok().filter(|plan| plan.mesh.ranks() == ranks));
    Ok(FinishedSearch { base, ranks, supported, found, rows })
}

/// A search for the fastest layout of so many ranks.
pub fn settings<'a>(base: &'a Plan, ranks: usize, supported: &'a [SupportedValues]) -> Settings<'a> {
    Settings {
        base,
        ranks,
        only: &[],
        supported,
        by: By::Time,
        top: 1,
        every: false,
        limit: limit(base),
        device: planned_device(base, ranks),
        fits: &|plan: &Plan, prediction: &Prediction| fit::planned(plan, prediction).is_ok(),
    }
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
    let found = search(&settings(&base, ranks, &supported(&base)?), &|_, _, _| {});
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
    output.result(&Answer::new(&searched))?;
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

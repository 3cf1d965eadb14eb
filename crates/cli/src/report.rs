//! `kintsugi report`: a page about runs, a plan or a search.

use std::path::{Path, PathBuf};

use clap::Args;
use kintsugi_plan::Plan;
use kintsugi_report::plan::PlanFigures;
use kintsugi_report::runs::{PredictedRun, report};
use kintsugi_report::tuning;
use kintsugi_report::{Context, Detail, Report, ReportRun, page};
use kintsugi_run::is_run;
use kintsugi_spec::units;
use kintsugi_tune::trials::{TRIALS, read};

use crate::config::ConfigArguments;
use crate::describe;
use crate::failure::{ErrorContext, Failure};
use crate::files::{check_writable, write_whole};
use crate::host::planned_device;
use crate::output::Output;
use crate::plan;

/// Writes an HTML page about runs, a plan, a search or a tuning.
///
/// The page is one file that needs no network.
///
/// For the folder of a run: loss, validation, gradient norm, learning rate, speed, energy, checkpoints and skipped steps,
/// and memory, traffic and the schedule of a step, predicted beside measured. The measured schedule is that of trace.json
/// in the run's folder, or of --trace. Several runs are drawn over each other, with a table of what differs in their
/// configurations. Long runs are thinned; the smallest and the largest value of every bin stay, so no spike is lost.
///
/// For a configuration: memory of every stage, traffic by level, where the time goes, and the predicted schedule. With
/// --search every strategy by time, memory and energy, and the best with the reasons why each is not first.
///
/// For the folder of `kintsugi tune`: the trajectory of its trials, which settings matter, and every trial.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Folders of runs, the folder of a tuning, or one configuration; without either, the built-in demo's plan
    #[arg(value_name = "RUN|CONFIG.toml")]
    paths: Vec<PathBuf>,
    /// Where the page is written
    #[arg(long, value_name = "FILE.html", default_value = "report.html")]
    out: PathBuf,
    /// The measured schedule: a file of train --trace, for one run
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Compares every strategy for the configuration
    #[arg(long)]
    search: bool,
    /// Searches only where a key has one of these values, as in --only parallel.tp=4,8
    #[arg(long, value_name = "KEY=VALUE,…", requires = "search")]
    only: Vec<String>,
    /// How many of the best strategies are in the table
    #[arg(long, value_name = "N", default_value_t = 25, requires = "search")]
    top: usize,
    /// Device profile written by `kintsugi calibrate`; overrides the cluster's preset
    #[arg(long, value_name = "FILE.toml")]
    profile: Option<PathBuf>,
    /// Sets one value over the configuration's, as in --set parallel.tp=4
    #[arg(long = "set", value_name = "TABLE.KEY=VALUE")]
    sets: Vec<String>,
    /// Prints what the page shows as JSON, and writes no page
    #[arg(long, conflicts_with = "out")]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi report out
      the run in out, as report.html
  kintsugi train --set run.out=a --trace a/trace.json && kintsugi report a
      with the measured schedule of one step
  kintsugi report runs/a runs/b runs/c --out compared.html
      three runs over each other, and what differs in their configurations
  kintsugi report 175b.toml --set parallel.pp=8
      a plan: memory, traffic and schedule
  kintsugi report 22b.toml --search --out strategies.html
      every strategy by time, memory and energy";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    if !arguments.json {
        check_writable(&arguments.out)?;
    }
    let of_runs = arguments.paths.iter().any(|path| path.is_dir());
    let report = match &arguments.paths[..] {
        [folder] if folder.join(TRIALS).is_file() => of_tuning(folder)?,
        _ if of_runs => of_runs_page(arguments)?,
        _ => of_plan(arguments)?,
    };
    if arguments.json {
        return output.result(&report);
    }
    let page = page::file(&report);
    write_whole(&arguments.out, page.as_bytes())?;
    let size = units::bytes(page.len() as u64);
    output.text(&format!("report   {} ({size}): open it in a browser\n", arguments.out.display()))
}

/// The page of a tuning.
fn of_tuning(folder: &Path) -> Result<Report, Failure> {
    let path = folder.join(TRIALS);
    let (records, damaged) = read(&path).map_err(|error| Failure::file("read", &path, error))?;
    let mut report = tuning::report(&records);
    if damaged > 0 {
        report.notes.push(format!("{damaged} damaged lines of {} are left out", path.display()));
    }
    Ok(report)
}

fn of_runs_page(arguments: &Arguments) -> Result<Report, Failure> {
    let paths = &arguments.paths;
    let mistake = |text: String| Err(Failure::mistake(text));
    if arguments.search || !arguments.sets.is_empty() || arguments.profile.is_some() {
        return mistake(
            "--search, --set and --profile are for a configuration, and a run is given".to_owned(),
        );
    }
    if arguments.trace.is_some() && paths.len() > 1 {
        return mistake("--trace is for one run; put trace.json into the folder of each".to_owned());
    }
    if let Some(path) = paths.iter().find(|path| !is_run(path)) {
        return mistake(format!(
            "{} is not the folder of a run: it has no file metrics.jsonl",
            path.display()
        ));
    }
    let open = |(path, name): (&PathBuf, String)| {
        ReportRun::open(path, name, arguments.trace.as_deref()).map_err(|error| match &arguments.trace {
            Some(trace) => {
                let context = format!("cannot read {} or {}", path.display(), trace.display());
                Failure::mistake(ErrorContext::new(context, error))
            }
            None => Failure::file("read", path, error),
        })
    };
    let runs: Vec<ReportRun> = paths.iter().zip(names(paths)).map(open).collect::<Result<_, _>>()?;
    let context = context();
    let predict = |run: &ReportRun| run.plan.as_ref().map(|plan| PredictedRun::of(plan, &context));
    let predicted: Vec<Option<PredictedRun>> = runs.iter().map(predict).collect();
    let pairs: Vec<_> = runs.iter().zip(predicted.iter().map(Option::as_ref)).collect();
    Ok(report(&pairs, Detail::File))
}

/// The last part of each path, or the whole path where two have the same.
fn names(paths: &[PathBuf]) -> Vec<String> {
    let last = |path: &Path| {
        let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        whole
            .file_name()
            .map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    };
    let short: Vec<String> = paths.iter().map(|path| last(path)).collect();
    let alone = |name: &String| short.iter().filter(|other| *other == name).count() == 1;
    let name = |(path, name): (&PathBuf, &String)| {
        if alone(name) { name.clone() } else { path.display().to_string() }
    };
    paths.iter().zip(&short).map(name).collect()
}

/// What a page of runs needs beside their files.
pub fn context() -> Context<'static> {
    Context {
        facts: &|plan: &Plan| describe::plan(plan),
        device: &|plan: &Plan| planned_device(plan, plan.mesh.ranks()),
    }
}

fn of_plan(arguments: &Arguments) -> Result<Report, Failure> {
    let file = match &arguments.paths[..] {
        [] => None,
        [file] => Some(file.clone()),
        [_, other, ..] => {
            let text = "is one configuration too many; several runs are given by their folders";
            return Err(Failure::mistake(format!("{} {text}", other.display())));
        }
    };
    if arguments.trace.is_some() {
        return Err(Failure::mistake("--trace is for a run, and a configuration is given"));
    }
    let config = ConfigArguments::new(file, arguments.profile.clone(), arguments.sets.clone());
    if arguments.search {
        let figures = plan::search_page(&config, &arguments.only, arguments.top)?;
        return Ok(kintsugi_report::search::report(&kintsugi_report::search::SearchFigures {
            base: &figures.base,
            timed: &figures.timed,
            facts: figures.facts,
            pick: figures.pick.as_ref(),
            best: figures.best,
        }));
    }
    let predicted = plan::PlanPrediction::new(&config)?;
    let facts = predicted.heading();
    let plan::PlanPrediction { plan, prediction, speed, notes, .. } = &predicted;
    let timing = speed.as_ref().map(|speed| &speed.timing);
    let figures = PlanFigures { plan, prediction, timing, facts, notes: notes.clone() };
    Ok(kintsugi_report::plan::report(&figures))
}

//! `kintsugi tune`: a strategy by a few real trials, with the planner's predictions as a prior.

mod answer;
mod candidates;
mod learn;
mod progress;
mod steps;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use kintsugi_draw::chart::svg;
use kintsugi_plan::config::ConfigSource;
use kintsugi_report::tuning::{importance_chart, important_settings, trajectory_chart};
use kintsugi_spec::units;
use kintsugi_tune::trials::{
    Constraints, Executor, Journal, Objective, Processes, Record, Simulated, TRIALS, Tuning, best, read,
    trials_folder, tune,
};

use crate::config::ConfigArguments;
use crate::describe::{fact, lines};
use crate::failure::{ErrorContext, Failure};
use crate::files::{read_text, write_whole};
use crate::host;
use crate::output::Output;
use crate::signals::stop_on_signal;
use answer::Answer;
use candidates::Candidates;
use progress::TrialProgress;

/// Finds a strategy by a few short runs.
///
/// The candidates are the strategies of `kintsugi plan --search` that fit. The first trial is the planner's first choice.
/// After every trial a model learns how far predictions are off, in general and by setting, and proposes the candidate with
/// the largest expected improvement. So what the planner knows is not searched for, and what it gets wrong is learned in a
/// few trials. Without a prediction (the speed of the device is unknown) it is an ordinary Bayesian search.
///
/// A trial is `kintsugi train` in a process of its own, for some steps after a warm-up; the median step counts. A trial
/// that runs out of memory, crashes, hangs or reports nonsense is a result too: points like it are avoided. Trials whose
/// first steps are far slower than the best are stopped.
///
/// Every trial is a line of trials.jsonl in the folder --out, on the disk before the next one begins. An interrupted tuning
/// continues with the same command. best.toml there is a configuration for train with the strategy of the best trial.
/// `kintsugi report` makes a page of the folder, and `kintsugi watch` shows it while trials go on.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Number of trials in all, those of an interrupted tuning included
    #[arg(long, value_name = "N", default_value_t = 30)]
    trials: usize,
    /// Tries only these values of a key, as in --space parallel.tp=1,2
    ///
    /// A key that a strategy decides is restricted, with the words of plan --search --only. Of any other key, as
    /// cluster.nodes or memory.attention, every value is tried.
    #[arg(long, value_name = "KEY=VALUE,…")]
    space: Vec<String>,
    /// What is optimised
    #[arg(long, value_enum, default_value = "speed")]
    by: ByName,
    /// The folder of trials.jsonl, best.toml and the files of the trials
    #[arg(long, value_name = "FOLDER", default_value = "tuning")]
    out: PathBuf,
    /// Learns from the trials of another tuning, too
    ///
    /// They are not results of this one. Can be repeated.
    #[arg(long, value_name = "TRIALS.jsonl")]
    from: Vec<PathBuf>,
    /// How trials run
    #[arg(long, value_enum, default_value = "threads")]
    executor: ExecutorName,
    /// Steps that are measured
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Steps before those
    #[arg(long, value_name = "N", default_value_t = 3)]
    warm_up: u32,
    /// Seconds that a trial may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    deadline: f64,
    /// Resident bytes that a trial may have; without it nine tenths of what this machine has left
    #[arg(long, value_name = "BYTES")]
    memory: Option<u64>,
    /// A constraint: the fullest rank takes at most these bytes from its device
    #[arg(long, value_name = "BYTES")]
    at_most_memory: Option<u64>,
    /// A constraint: a step takes at most these seconds
    #[arg(long, value_name = "SECONDS")]
    at_most_step: Option<f64>,
    /// The machine as it is, for --executor simulated; the planner does not see it
    #[arg(long, value_name = "FILE.toml", required_if_eq("executor", "simulated"))]
    world: Option<PathBuf>,
    /// Writes what the trials say of kernels and links, as a profile for plan --profile
    #[arg(long, value_name = "FILE.toml")]
    learn: Option<PathBuf>,
    /// Draws the tuning as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// What --plot draws
    #[arg(
        long = "plot-figure",
        value_enum,
        value_name = "FIGURE",
        default_value = "trajectory",
        requires = "plot"
    )]
    figure: FigureName,
    /// Decides between equal candidates, and the noise of simulated trials
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Prints the result as JSON, and nothing else to stdout
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum ByName {
    /// Tokens per second
    Speed,
    /// Tokens per second of each rank, where the number of nodes is tried
    SpeedPerRank,
    /// Joules per token, where the device has a meter
    Energy,
    /// Money per token, by cluster.price
    Cost,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ExecutorName {
    /// Ranks are threads of one process, or one rank is a GPU
    Threads,
    /// Ranks are processes, by kintsugi launch
    Launch,
    /// Ranks are processes of a Slurm allocation, by srun; trials run side by side on disjoint nodes
    Srun,
    /// No run: the time that the profile --world predicts, with noise
    Simulated,
}

impl ExecutorName {
    /// How trials run, in words.
    fn words(self) -> &'static str {
        match self {
            ExecutorName::Threads => "threads",
            ExecutorName::Launch => "processes",
            ExecutorName::Srun => "steps of Slurm",
            ExecutorName::Simulated => "simulated",
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum FigureName {
    /// The speed of every trial, the best so far, and what was predicted
    Trajectory,
    /// Which settings matter
    Importance,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi tune run.toml --trials 12
      the configuration of a run on this machine: its number of ranks, its model and batch
  kintsugi tune run.toml --space parallel.tp=1,2 --space parallel.schedule=1f1b,zero-bubble
      only these values, with the words of plan --search --only
  kintsugi tune gpu.toml --space memory.attention=flash,plain --space batch.sequence=1024,2048
      settings that a strategy does not decide, too: every combination is tried as it is
  kintsugi tune run.toml --by energy --at-most-memory 60000000000
      the fewest joules per token in 60 GB
  salloc --nodes=8 --exclusive kintsugi tune run.toml --executor srun --set cluster.per_node=8
      in an allocation of Slurm: trials of two nodes run four at a time
  kintsugi tune run.toml --trials 40
      continues the tuning above, up to 40 trials
  kintsugi tune 175b.toml --executor simulated --world slow-links.toml
      no run: what a tuning finds if the links are slower than the planner believes";

/// How many times as long as the best's the steps of a trial may take before it is stopped.
const STOP_FACTOR: f64 = 1.5;
/// The standard deviation of the times of simulated trials.
const NOISE: f64 = 0.02;

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let deadline = Duration::try_from_secs_f64(arguments.deadline).ok().filter(|limit| !limit.is_zero());
    let Some(deadline) = deadline else {
        return Err(Failure::mistake("--deadline must be a number of seconds above 0, and a sensible one"));
    };
    if arguments.at_most_step.is_some_and(|most| !(most.is_finite() && most > 0.0)) {
        return Err(Failure::mistake("--at-most-step must be a number of seconds above 0"));
    }
    let executor = arguments.executor.words();
    let candidates =
        Candidates::new(&arguments.config, &arguments.space, executor, arguments.at_most_memory)?;
    if candidates.all.is_empty() {
        let text = "no strategy fits: use more nodes (cluster.nodes), or relax --space or --at-most-memory";
        return Err(Failure::run(text.to_owned()));
    }
    let mut others = others(&arguments.from)?;
    fs::create_dir_all(&arguments.out).map_err(|error| Failure::file("create", &arguments.out, error))?;
    let path = arguments.out.join(TRIALS);
    let mut journal = Journal::open(&path).map_err(|error| Failure::file("open", &path, error))?;
    // Trials of an earlier tuning of a larger space teach, but are no results of this one.
    let outside = candidates.outside(&mut journal);
    let before = Earlier { outside: outside.len(), others: others.len() };
    others.extend(outside);
    let config = |index: usize| candidates.config(index).map_err(Into::into);
    let tuning = Tuning {
        task: &candidates.task,
        candidates: &candidates.all,
        config: &config,
        first: candidates.first,
        objective: objective(arguments)?,
        constraints: Constraints { memory: arguments.at_most_memory, step_s: arguments.at_most_step },
        trials: arguments.trials,
        others: &others,
        stop_factor: STOP_FACTOR,
        seed: arguments.seed,
    };
    output.text(&heading(&candidates, &tuning, &journal, &before))?;
    let world = arguments.world.as_deref().map(read_text).transpose()?;
    let plan = |config: &str| {
        let source = ConfigSource::text(config);
        let source = match &world {
            Some(text) => source.profile("--world", text.clone()),
            None => source,
        };
        source.plan()
    };
    let processes;
    let simulated;
    let executor: &dyn Executor = if arguments.executor == ExecutorName::Simulated {
        simulated = Simulated { plan: &plan, noise: NOISE, seed: arguments.seed };
        &simulated
    } else {
        processes = self::processes(arguments, deadline, &candidates)?;
        processes.end_leftovers();
        &processes
    };
    let progress = TrialProgress::new(&tuning, &candidates, journal.records(), output);
    let result = tune(&tuning, &mut journal, executor, &mut |event| progress.tell(&event));
    drop(progress);
    let records = journal.records();
    let best = best(&tuning, records);
    let written = best.map_or(Ok(()), |(record, _)| write_best(arguments, &candidates, record));
    let mut answer = Answer::new(&tuning, &candidates, records);
    output.text(&answer.text(&arguments.out, &candidates))?;
    let learned = arguments.learn.as_deref().map(|to| learn::write(to, &candidates, records, &path));
    let learned = learned.transpose();
    if let Ok(Some((errors, line))) = &learned {
        output.text(line)?;
        answer.learned = Some(*errors);
    }
    let plotted = arguments.plot.as_deref().map(|path| plot(path, arguments.figure, records));
    output.result(&answer)?;
    // What ended the tuning comes first: a full disk also fails the other files.
    result.map_err(Failure::run)?;
    written?;
    learned?;
    plotted.transpose()?;
    if best.is_none() && !records.is_empty() {
        return Err(Failure::run("no trial worked: see the messages above".to_owned()));
    }
    Ok(())
}

/// Writes the configuration of the best trial.
fn write_best(arguments: &Arguments, candidates: &Candidates, best: &Record) -> Result<(), Failure> {
    let index = candidates.index_of(&best.settings).expect("the best is a candidate");
    write_whole(&arguments.out.join("best.toml"), candidates.config(index)?.as_bytes())
}

/// Draws the trials.
fn plot(path: &Path, figure: FigureName, records: &[Record]) -> Result<(), Failure> {
    let chart = match figure {
        FigureName::Trajectory => Some(trajectory_chart(records)).filter(|_| !records.is_empty()),
        FigureName::Importance => importance_chart(&important_settings(records)),
    };
    let Some(chart) = chart else {
        return Err(Failure::run(format!("there are too few trials, so {} is not drawn", path.display())));
    };
    write_whole(path, svg(&chart).as_bytes())
}

fn objective(arguments: &Arguments) -> Result<Objective, Failure> {
    Ok(match arguments.by {
        ByName::Speed => Objective::Speed,
        ByName::SpeedPerRank => Objective::SpeedPerRank,
        ByName::Energy => Objective::Energy,
        ByName::Cost => {
            let (base, _) = arguments.config.read()?.search_base()?;
            let price = base.cluster.price.filter(|&price| price > 0.0);
            let missing = || Failure::mistake("--by cost needs cluster.price, which is not set".to_owned());
            Objective::Cost { price: price.ok_or_else(missing)? }
        }
    })
}

/// The trials of other tunings.
fn others(paths: &[PathBuf]) -> Result<Vec<Record>, Failure> {
    let mut all = Vec::new();
    for path in paths {
        let (records, damaged) = read(path).map_err(|error| Failure::file("read", path, error))?;
        if records.is_empty() {
            let path = path.display();
            return Err(Failure::mistake(format!(
                "--from: {path} has no trials ({damaged} lines are damaged)"
            )));
        }
        all.extend(records);
    }
    Ok(all)
}

fn processes(
    arguments: &Arguments,
    deadline: Duration,
    candidates: &Candidates,
) -> Result<Processes, Failure> {
    let own = std::env::current_exe()
        .map_err(|error| Failure::run(ErrorContext::new("cannot find this program's own file", error)))?;
    let left = || host::memory().map(|bound| bound.bytes / 10 * 9);
    let processes = Processes {
        program: own,
        launcher: Vec::new(),
        nodes: None,
        slots: 1,
        folder: trials_folder(&arguments.out),
        warm_up: arguments.warm_up as usize,
        steps: arguments.steps as usize,
        deadline,
        memory: arguments.memory.or_else(left),
        stop: stop_on_signal()?,
    };
    match arguments.executor {
        ExecutorName::Launch => {
            let launcher = ["launch", "--ranks", "{ranks}"].map(str::to_owned).to_vec();
            Ok(Processes { launcher, ..processes })
        }
        ExecutorName::Srun => steps::with_steps(processes, arguments, candidates),
        ExecutorName::Threads | ExecutorName::Simulated => Ok(processes),
    }
}

/// Trials that teach and are no results: of the same folder outside of the space, and of other folders.
struct Earlier {
    outside: usize,
    others: usize,
}

/// What is tuned, in lines.
fn heading(candidates: &Candidates, tuning: &Tuning, journal: &Journal, earlier: &Earlier) -> String {
    let variants = match candidates.variants() {
        0 | 1 => String::new(),
        some => format!(", {some} combinations of other settings"),
    };
    let guide = match candidates.first {
        Some(_) => "predicted, and the first choice of the planner is the first trial",
        None => "not predicted, because the speed of the device is unknown",
    };
    let count = units::count(candidates.all.len() as f64);
    let space = format!("{count} candidates that fit{variants}; their times are {guide}");
    let mut facts = vec![fact("task", tuning.task), fact("space", space)];
    if !journal.records().is_empty() {
        let before = format!("{} trials of {}", journal.records().len(), journal.path().display());
        facts.push(fact("before", before));
    }
    if journal.damaged() > 0 {
        facts.push(fact("note", format!("{} damaged lines of it are ignored", journal.damaged())));
    }
    if earlier.outside > 0 {
        facts.push(fact(
            "outside",
            format!("{} trials of it are outside of this space; they are learned from", earlier.outside),
        ));
    }
    if earlier.others > 0 {
        facts.push(fact("from", format!("{} trials of other tunings", earlier.others)));
    }
    lines(&facts)
}

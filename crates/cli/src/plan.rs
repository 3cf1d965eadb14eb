//! `kintsugi plan`: predicts a step without running it.

mod answer;
mod report;
mod rows;
mod search;
mod speed;
mod validation;

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use kintsugi_draw::{Ink, chrome, draw, trace};
use kintsugi_plan::Plan;
use kintsugi_simulate::{Coverage, Misfit, Prediction, Timeline, bubble, memory_of, predict};
use kintsugi_spec::units;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::files::{check_writable, write_whole};
use crate::fit;
use crate::host::planned_device;
use crate::output::Output;
use crate::table::terminal_width;
use answer::Answer;
use speed::Speed;

/// Predicts a training step: parameters, FLOPs, memory, traffic, time, energy and the pipeline bubble.
///
/// The program that `train` would run is executed on paper, for one rank of each stage, so memory and traffic are
/// exact. Nothing is allocated: a laptop can plan for a supercomputer. Time and energy are estimates from the cluster's
/// profile (a preset, or the file in cluster.profile); --validate shows their accuracy. The bubble is the share of time
/// in which stages wait for each other. Without a profile it is computed as if a layer's forward, input gradient and
/// weight gradient took equally long.
///
/// The tables of --search, --scale and --sweep leave out columns that do not fit the width of the terminal, or of the
/// variable COLUMNS. --json has all columns.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Prints the prediction as JSON; values that are not predicted are null
    #[arg(long)]
    json: bool,
    /// Exits with 1, and prints the reason to stderr, if the plan does not fit or if that is unknown
    #[arg(long, conflicts_with_all = ["validate", "reproduce", "search", "scale", "sweep"])]
    check: bool,
    /// Draws the pipeline schedule
    #[arg(long, conflicts_with = "json")]
    draw: bool,
    /// Predicts the published runs in the tables of this folder instead, and prints the errors
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["draw", "trace"])]
    validate: Option<PathBuf>,
    /// Prints a page that compares our predictions with a published study
    #[arg(long, value_name = "STUDY", conflicts_with_all = ["draw", "trace", "json", "validate"])]
    reproduce: Option<validation::Study>,
    /// Writes the predicted schedule for ui.perfetto.dev (in unit time if the device's speed is unknown)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    search: search::SearchArguments,
    #[command(flatten)]
    rows: rows::RowArguments,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi plan --set parallel.schedule=interleaved --draw
      the demo under another schedule
  kintsugi plan --set model.preset=gpt-175b --set cluster.preset=frontier --set parallel.tp=8 \\
      --set parallel.pp=16 --set parallel.dp=8 --set batch.sequence=2048 --set batch.micro=1 \\
      --set batch.global=512 --set memory.recompute=full --set precision.compute=bf16
      a large model on a supercomputer
  kintsugi plan run.toml --search --out best.toml
      every strategy that fits, ranked, and the best as a configuration
  kintsugi plan run.toml --scale strong --nodes 16,32,64,128 --plot strong.svg
      the same batch on more and more nodes
  kintsugi plan run.toml --sweep batch.micro=1,2,4,8
      compares several values of a setting
  kintsugi plan run.toml --json
      for scripts
  kintsugi plan run.toml --check && kintsugi train run.toml
      trains only what fits
  kintsugi plan --reproduce frontier
      the Frontier study's figures beside ours";

/// Width of a picture that is not printed to a terminal.
const WIDTH: usize = 100;

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    if let Some(folder) = &arguments.validate {
        return validation::run(folder, output);
    }
    if let Some(study) = arguments.reproduce {
        return output.text(&study.page());
    }
    arguments.rows.check()?;
    if arguments.search.wanted() {
        return search::run(&arguments.search, &arguments.config, output);
    }
    if arguments.rows.wanted() {
        return rows::run(&arguments.rows, &arguments.config, output);
    }
    let (plan, notes) = arguments.config.plan_with_notes()?;
    arguments.trace.as_deref().map(check_writable).transpose()?;
    if arguments.draw || arguments.trace.is_some() {
        check_drawable(&plan)?;
    }
    let prediction = predict(&plan, planned_device(&plan, plan.mesh.ranks()), Coverage::quick(&plan));
    let misfit = fit::planned(&plan, &prediction).err();
    let fits = fit::known(&plan, &prediction);
    let speed = Speed::of(&plan);
    let bubble = speed.as_ref().map_or_else(|| bubble(&plan), |speed| speed.timing.bubble);
    let notes: Vec<String> = notes.into_iter().chain(memory_of_others(&plan, &prediction)).collect();
    if arguments.json {
        output.result(&Answer::new(&plan, &prediction, speed.as_ref(), bubble, fits, notes))?;
    } else {
        let fits = match (fits, &misfit) {
            (_, Some(misfit)) => format!("no: {misfit}"),
            (Some(_), None) => "yes".to_owned(),
            (None, None) => format!("unknown: {UNKNOWN_MEMORY}"),
        };
        output.text(&report::text(&plan, &prediction, speed.as_ref(), bubble, &fits))?;
        for note in notes {
            output.text(&format!("note: {note}\n"))?;
        }
    }
    if arguments.draw || arguments.trace.is_some() {
        show_timeline(arguments, &plan, output)?;
    }
    if arguments.check { check(fits, misfit) } else { Ok(()) }
}

/// Draws the schedule and writes its trace, if requested.
fn show_timeline(arguments: &Arguments, plan: &Plan, output: Output) -> Result<(), Failure> {
    let timeline = Timeline::of(plan);
    if arguments.draw {
        output.text(&picture(&timeline))?;
    }
    if let Some(path) = &arguments.trace {
        let spans = trace(&timeline, plan.mesh.dp * plan.mesh.tp);
        write_whole(path, chrome(&spans).as_bytes())?;
        output.text(&format!("trace    {}\n", path.display()))?;
    }
    Ok(())
}

/// Why it is unknown whether a plan fits.
const UNKNOWN_MEMORY: &str = "this machine has no GPU; set cluster.preset or cluster.device.memory";

/// Fails unless the plan is known to fit.
fn check(fits: Option<bool>, misfit: Option<Misfit>) -> Result<(), Failure> {
    match (fits, misfit) {
        (_, Some(misfit)) => Err(Failure::Run(format!("the plan does not fit: {misfit}"))),
        (Some(_), None) => Ok(()),
        (None, None) => Err(Failure::Run(format!("it is unknown whether the plan fits: {UNKNOWN_MEMORY}"))),
    }
}

/// Refuses to expand a step that would take gigabytes.
fn check_drawable(plan: &Plan) -> Result<(), Failure> {
    let Some(ops) = Timeline::too_long(plan) else { return Ok(()) };
    Err(Failure::Mistake(format!(
        "--draw and --trace expand every op of a step, and this step has about {ops}; a smaller batch.global has the same \
         schedule with fewer micro-batches"
    )))
}

/// The memory of the fullest rank under another framework, if that is more than under this engine.
fn memory_of_others(plan: &Plan, prediction: &Prediction) -> Option<String> {
    let ours = prediction.stages.iter().map(|stage| stage.total).max().unwrap_or(0);
    let theirs = memory_of(plan, prediction) as u64;
    (theirs > ours).then(|| {
        let theirs = units::bytes(theirs);
        format!("memory and whether it fits are this engine's own; with [framework] the fullest rank takes about {theirs}")
    })
}

fn picture(timeline: &Timeline) -> String {
    let terminal = std::io::stdout().is_terminal();
    let ink = if terminal && console::colors_enabled() { Ink::Colour } else { Ink::Plain };
    format!("\n{}", draw(timeline, terminal_width().unwrap_or(WIDTH), ink))
}

//! `kintsugi plan`: predicts a step without running it.

mod answer;
mod compare;
pub mod place;
mod report;
mod rows;
mod search;
mod speed;
mod strategies;
mod validation;

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use kintsugi_draw::chart::{Chart, svg};
use kintsugi_draw::{Ink, Trace, draw, schedule_svg};
use kintsugi_plan::Plan;
use kintsugi_simulate::{Coverage, Misfit, Prediction, Timeline, bubble, has_own_memory, predict};
use kintsugi_spec::units;

use crate::config::ConfigArguments;
use crate::describe::{self, Fact};
use crate::failure::Failure;
use crate::files::{check_writable, write_whole};
use crate::fit;
use crate::host::planned_device;
use crate::output::Output;
use crate::table::terminal_width;
use crate::train::write_trace;
use answer::Answer;
use rows::PlotFigure;
pub use search::{
    answer_json as search_answer, begin_phase, fastest, limit, search_page, settings as search_settings,
    supported,
};
use speed::Speed;

/// Predicts a training step: memory, traffic, time and energy.
///
/// The program that `train` would run is executed on paper, for one rank of each stage, so memory and traffic are
/// exact. No tensors are allocated: a laptop can plan for a supercomputer.
///
/// Time and energy are estimates from the cluster's profile (a preset, or the file in cluster.profile); --validate shows
/// their accuracy. The bubble is the share of time in which stages wait for each other. Without a profile it is computed
/// as if a layer's forward, input gradient and weight gradient took equally long.
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
    /// Exits with 1 and a reason if the plan does not fit, or if that is unknown
    #[arg(long, conflicts_with_all = ["validate", "reproduce", "search", "scale", "sweep"])]
    check: bool,
    /// Draws the pipeline schedule; with --out as SVG
    #[arg(long, conflicts_with = "json")]
    draw: bool,
    /// Predicts the measured runs in the tables (CSV) of this folder, and prints the errors
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["draw", "trace"])]
    validate: Option<PathBuf>,
    /// With --validate: predicts every run under this framework instead of its own
    #[arg(long, value_name = "PRESET", requires = "validate")]
    framework: Option<String>,
    /// Prints a page that compares our predictions with a published study
    #[arg(long, value_name = "STUDY", conflicts_with_all = ["draw", "trace", "json", "validate"])]
    reproduce: Option<validation::Study>,
    /// Compares the known ways to shard: memory, bytes over each level of links, time and energy
    ///
    /// --plot draws the bytes.
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with_all = ["check", "draw", "trace", "validate", "reproduce", "search", "scale", "sweep"])]
    compare: Option<compare::Comparison>,
    /// Chooses nodes of a table, and the order of ranks on them, so that the predicted step is shortest
    ///
    /// FILE has a line for each free node with its pod (a leaf switch, a rail group), or what `scontrol show topology` and
    /// `sinfo` print. --out writes the placement, and a host file beside it.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["check", "draw", "trace", "validate", "reproduce", "search", "scale", "sweep", "compare"])]
    place: Option<PathBuf>,
    /// Writes the predicted schedule for ui.perfetto.dev
    ///
    /// A picture if FILE ends with .svg. In unit time if the speed of the device is unknown.
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
  kintsugi plan run.toml --sweep batch.micro=1,2,4,8 --sweep memory.recompute=none,full \\
      --plot micro.svg
      what one setting changes, as a curve for each value of another
  kintsugi plan run.toml --search --plot strategies.svg
      every strategy by time and memory
  kintsugi plan run.toml --compare sharding --plot sharding.svg
      what ZeRO, MiCS, ZeRO++ and three levels need and move
  kintsugi plan run.toml --place nodes.txt --out placement.toml
      the nodes and the order of ranks that make the step shortest
  kintsugi plan run.toml --draw --out schedule.svg
      the schedule as a picture
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
        let request = validation::Request {
            folder,
            sets: arguments.config.sets(),
            framework: arguments.framework.as_deref(),
            plot: arguments.rows.plot.as_deref(),
        };
        return validation::run(&request, output);
    }
    if let Some(study) = arguments.reproduce {
        return study.write(arguments.search.out.as_deref(), output);
    }
    if let Some(table) = &arguments.place {
        let files = [&arguments.search.out, &arguments.rows.plot].map(|path| path.as_deref());
        return place::run(&arguments.config, table, files, output);
    }
    if arguments.search.wanted() {
        let plot = arguments.rows.plot.as_deref().map(|path| (path, arguments.rows.figure));
        return search::run(&arguments.search, &arguments.config, plot, output);
    }
    if let Some(compare::Comparison::Sharding) = arguments.compare {
        return compare::run(&arguments.config, arguments.rows.plot.as_deref(), output);
    }
    if arguments.search.out.is_some() && (!arguments.draw || arguments.rows.wanted()) {
        let text = "--out takes the best of --search, the picture of --draw, the page of --reproduce or the nodes of --place: give one of them";
        return Err(Failure::mistake(text));
    }
    if arguments.rows.wanted() {
        return rows::run(&arguments.rows, &arguments.config, output);
    }
    for path in [&arguments.trace, &arguments.search.out, &arguments.rows.plot].into_iter().flatten() {
        check_writable(path)?;
    }
    let predicted = PlanPrediction::new(&arguments.config)?;
    let PlanPrediction { plan, prediction, fits, .. } = &predicted;
    if arguments.draw || arguments.trace.is_some() {
        check_drawable(plan)?;
    }
    let chart =
        arguments.rows.plot.is_some().then(|| chart(&predicted, arguments.rows.figure)).transpose()?;
    if arguments.json {
        output.result(&predicted.answer())?;
    } else {
        output.text(&format!(
            "{}\n{}",
            describe::lines(&predicted.heading()),
            report::tables(plan, prediction)
        ))?;
        for note in &predicted.notes {
            output.text(&format!("note: {note}\n"))?;
        }
    }
    if arguments.draw || arguments.trace.is_some() {
        show_timeline(arguments, plan, output)?;
    }
    if let (Some(path), Some(chart)) = (&arguments.rows.plot, chart) {
        write_whole(path, svg(&chart).as_bytes())?;
        output.text(&format!("plot     {}\n", path.display()))?;
    }
    if arguments.check { check(*fits, predicted.misfit) } else { Ok(()) }
}

/// What `plan --json` prints for a configuration.
pub fn answer(config: &ConfigArguments) -> Result<Answer, Failure> {
    PlanPrediction::new(config).map(|predicted| predicted.answer())
}

/// A plan and all that is predicted for it.
pub struct PlanPrediction {
    /// The plan.
    pub plan: Plan,
    /// Memory and traffic.
    pub prediction: Prediction,
    /// Time and energy, if the speed of the device is known.
    pub speed: Option<Speed>,
    /// The share of the step in which stages wait for each other.
    pub bubble: f64,
    /// Notes for the user.
    pub notes: Vec<String>,
    fits: Option<bool>,
    misfit: Option<Misfit>,
}

impl PlanPrediction {
    /// Predicts the plan of a configuration.
    pub fn new(config: &ConfigArguments) -> Result<Self, Failure> {
        let (plan, notes) = config.plan_with_notes()?;
        let engine = predict(&plan, planned_device(&plan, plan.mesh.ranks()), Coverage::quick(&plan));
        let prediction = engine.clone().under_framework(&plan);
        let misfit = fit::planned(&plan, &prediction).err();
        let fits = fit::known(&plan, &prediction);
        let speed = Speed::of(&plan);
        let bubble = speed.as_ref().map_or_else(|| bubble(&plan), |speed| speed.timing.bubble);
        let supported = search::supported(&plan)?;
        let unsupported = supported
            .iter()
            .filter_map(|support| support.refusal(&plan))
            .map(|refusal| format!("{} cannot run {refusal}", framework_name(&plan)));
        let notes = notes.into_iter().chain(memory_note(&plan, &engine)).chain(unsupported).collect();
        Ok(PlanPrediction { plan, prediction, speed, bubble, notes, fits, misfit })
    }

    fn answer(&self) -> Answer {
        let PlanPrediction { plan, prediction, speed, bubble, notes, fits, .. } = self;
        Answer::new(plan, prediction, speed.as_ref(), *bubble, *fits, notes.clone())
    }

    /// A description of the plan and its step, a line each.
    pub fn heading(&self) -> Vec<Fact> {
        let fits = match (self.fits, &self.misfit) {
            (_, Some(misfit)) => format!("no: {misfit}"),
            (Some(_), None) => "yes".to_owned(),
            (None, None) => format!("unknown: {UNKNOWN_MEMORY}"),
        };
        report::heading(&self.plan, &self.prediction, self.speed.as_ref(), self.bubble, &fits)
    }
}

/// A chart of a plan: the memory of its stages, or where the time of a step goes.
fn chart(predicted: &PlanPrediction, figure: Option<PlotFigure>) -> Result<Chart, Failure> {
    let PlanPrediction { plan, prediction, speed, .. } = predicted;
    let mut chart = match (figure, speed) {
        (None | Some(PlotFigure::Memory), _) => kintsugi_report::plan::memory_chart(plan, &prediction.stages),
        (Some(PlotFigure::Step), Some(speed)) => kintsugi_report::plan::time_chart(&speed.timing),
        (Some(PlotFigure::Step), None) => return Err(search::unknown_speed()),
        (Some(_), _) => {
            let text = "--plot-figure of a single plan is memory or step; others are for --scale, --sweep and --search";
            return Err(Failure::mistake(text));
        }
    };
    chart.title = format!("{} on {}: {}", plan.model.name, plan.cluster.name, chart.title.to_lowercase());
    chart.caption = kintsugi_report::plan::layout(plan);
    Ok(chart)
}

/// Draws the schedule, on the terminal or as a file, and writes its trace, if requested.
fn show_timeline(arguments: &Arguments, plan: &Plan, output: Output) -> Result<(), Failure> {
    let timeline = Timeline::of(plan);
    match &arguments.search.out {
        Some(path) => {
            let caption = format!("{}: {}", plan.model.name, kintsugi_report::plan::layout(plan));
            write_whole(path, schedule_svg(&timeline, &caption).as_bytes())?;
            output.text(&format!("drawing  {}\n", path.display()))?;
        }
        None if arguments.draw => output.text(&picture(&timeline))?,
        None => {}
    }
    if let Some(path) = &arguments.trace {
        write_trace(path, plan, &Trace::predicted(plan, &timeline), "predicted")?;
        output.text(&format!("trace    {}\n", path.display()))?;
    }
    Ok(())
}

/// Why it is unknown whether a plan fits.
const UNKNOWN_MEMORY: &str = "this machine has no GPU; set cluster.preset or cluster.device.memory";

/// Fails unless the plan is known to fit.
fn check(fits: Option<bool>, misfit: Option<Misfit>) -> Result<(), Failure> {
    match (fits, misfit) {
        (_, Some(misfit)) => Err(Failure::run(format!("the plan does not fit: {misfit}"))),
        (Some(_), None) => Ok(()),
        (None, None) => Err(Failure::run(format!("it is unknown whether the plan fits: {UNKNOWN_MEMORY}"))),
    }
}

/// Refuses to expand a step that would take gigabytes.
fn check_drawable(plan: &Plan) -> Result<(), Failure> {
    let Some(ops) = Timeline::too_long(plan) else { return Ok(()) };
    Err(Failure::mistake(format!(
        "--draw and --trace expand every op of a step, and this step has about {ops}; a smaller batch.global has the same \
         schedule with fewer micro-batches"
    )))
}

/// Whose memory a plan shows, if it is not this engine's.
fn memory_note(plan: &Plan, engine: &Prediction) -> Option<String> {
    let ours = engine.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0);
    has_own_memory(plan).then(|| {
        let (name, ours) = (framework_name(plan), units::bytes(ours));
        format!("memory is an estimate for {name}; this engine would take {ours} on its fullest rank")
    })
}

/// The name of a plan's framework in messages.
fn framework_name(plan: &Plan) -> &str {
    plan.framework.preset.as_deref().unwrap_or("[framework]")
}

fn picture(timeline: &Timeline) -> String {
    let terminal = std::io::stdout().is_terminal();
    let ink = if terminal && console::colors_enabled() { Ink::Colour } else { Ink::Plain };
    format!("\n{}", draw(timeline, terminal_width().unwrap_or(WIDTH), ink))
}

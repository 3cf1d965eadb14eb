//! `kintsugi train`: the prediction, the run, and a comparison of both.

mod begin;
mod compare;
mod copies;
mod events;
mod finished;
mod progress;
mod shared_folder;
mod summary;
mod trace;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use kintsugi_checkpoint::{
    Checkpoint, CheckpointFolder, CheckpointInfo, CopyFolder, SkippedSamples, WeightsFolder, device_of_run,
};
use kintsugi_comm::Connection;
use kintsugi_comm::mpi::launched;
use kintsugi_data::{BatchRange, Dataset, write_batches};
use kintsugi_engine::{
    CopiedStart, Event, MemoryChoice, Start, TrainOptions, TrainOutcome, WithoutSkipped, dataset, device,
    train, with_end_of_document, with_steps,
};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Data, DeviceKind, Plan, Resume};
use kintsugi_rank::StepMetrics;
use kintsugi_run::MetricsLine;
use kintsugi_simulate::{Consumption, Coverage, Prediction, predict, time};
use kintsugi_spec::Hardware;
use serde::{Deserialize, Serialize};

use crate::config::ConfigArguments;
use crate::describe::{self, Fact};
use crate::failure::Failure;
use crate::files::check_writable;
use crate::fit;
use crate::output::Output;
use crate::processes::{self, DeviceChoice, JobConnection};
use crate::signals::stop_on_signal;
use crate::verdict;
use begin::{Beginning, Task};
use copies::Copies;
use events::Events;
use progress::Progress;
use shared_folder::FolderCheck;
use summary::summary;
use trace::TraceArguments;
pub use trace::write_file as write_trace;

/// Trains a model, and compares the run with its prediction.
///
/// Before anything is allocated, memory and traffic of a step are predicted to the byte, and a run that does not fit is
/// refused. At the end a table shows predicted and measured figures side by side. Every rank is a thread of this process,
/// or a process of its own under `kintsugi launch`, mpirun or srun.
///
/// The run writes to the folder run.out: config.toml (the whole configuration, defaults included), metrics.jsonl (one
/// line per step, during the run) and summary.json (at the end). The same configuration and seed give the same losses,
/// bit for bit; on a GPU this needs --set run.deterministic=true. Two runs cannot use one folder at the same time.
///
/// Weights and optimizer states are saved to run.out/checkpoints at the end, and every N steps with
/// --set `run.checkpoint_every=N`, while training continues. The newest run.keep checkpoints are kept, and the
/// `run.keep_best` with the lowest validation loss. With --set run.steps=0 the initial weights are saved.
///
/// --resume continues from the newest complete checkpoint: bit for bit on the same layout, or on any other one. tp, pp,
/// dp, ZeRO, recomputation and precision may all change. If the run has already finished, it says so and changes
/// nothing.
///
/// Ctrl-C, SIGTERM, SIGUSR1 (Slurm's --signal) and SIGHUP (a closed terminal) end the run after the running step, with
/// a checkpoint and a summary. A second signal other than SIGHUP ends it at once. Under nohup, SIGHUP is ignored.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Continues from the newest complete checkpoint in run.out, or from the given one
    ///
    /// RUN/best is the best checkpoint of a run. The same as run.resume.
    #[arg(long, value_name = "CHECKPOINT", require_equals = true)]
    #[expect(clippy::option_option, reason = "not given, given, and given with a value")]
    resume: Option<Option<PathBuf>>,
    #[command(flatten)]
    trace: TraceArguments,
    /// Writes the batches of this run as an array of 32-bit tokens: [step, sample, sequence + 1]
    #[arg(long, value_name = "FILE.npy")]
    write_batches: Option<PathBuf>,
    /// Prints the summary as JSON, and nothing else to stdout
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// The plan of the run that they describe.
    pub fn plan(&self) -> Result<Plan, Failure> {
        self.config.read()?.plan().map_err(Failure::from)
    }

    /// The configuration.
    pub fn config(&self) -> &ConfigArguments {
        &self.config
    }

    /// Whether only the summary is printed, as JSON.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Whether they ask for files that only one attempt of a run can write.
    pub fn is_for_one_attempt(&self) -> bool {
        self.trace.path.is_some() || self.write_batches.is_some()
    }
}

const EXAMPLES: &str = "\
Examples:
  kintsugi train
      the built-in demo: a small GPT on 8 ranks, tp 2 · pp 2 · dp 2
  kintsugi train run.toml --set run.steps=1000 --set run.out=runs/a
      a configuration of your own, with two values changed
  kintsugi train --set parallel.schedule=zero-bubble --trace step.json
      another schedule, and a picture of one step of it
  kintsugi train out/config.toml
      the same run again
  kintsugi train out/config.toml --resume --set run.steps=2000 --set parallel.tp=1
      continues from the last checkpoint, on another layout";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let requested = RequestedRun::new(arguments);
    let JobConnection { connection, device } =
        processes::connect(requested.as_ref().ok().map(|requested| (&requested.plan, requested.device)))?;
    let prepared = requested
        .and_then(|requested| requested.on(device))
        .and_then(|(plan, notes)| PreparedRun::new(plan, notes, connection, arguments));
    let prepared = processes::agree(connection, prepared, |prepared| &prepared.plan)?;
    if connection.is_first() {
        run_first(arguments, connection, prepared)
    } else {
        run_other(connection, prepared)
    }
}

/// A run that is possible, before anything of an earlier run is touched.
struct PreparedRun {
    plan: Plan,
    /// What in the configuration has no effect.
    notes: Vec<String>,
    dataset: Box<dyn Dataset>,
    prediction: Prediction,
}

impl PreparedRun {
    fn new(
        plan: Plan,
        notes: Vec<String>,
        connection: Connection,
        arguments: &Arguments,
    ) -> Result<Self, Failure> {
        let plan = with_end_of_document(plan)?;
        check_node(&plan)?;
        let dataset = dataset(&plan)?;
        let plan = with_steps(plan, &*dataset)?;
        let prediction = predict(&plan, device(&plan, connection), Coverage::WholeStep);
        fit::here(&plan, &prediction, connection.ranks_here(plan.mesh.ranks())).map_err(Failure::mistake)?;
        fit::check_device(&plan)?;
        copies::check(&plan, connection)?;
        let written = arguments.write_batches.as_deref().filter(|_| connection.is_first());
        written.map(check_writable).transpose()?;
        Ok(PreparedRun { plan, notes, dataset, prediction })
    }
}

/// Refuses to run on another node than the one that was chosen for this process, if Slurm says which it is.
fn check_node(plan: &Plan) -> Result<(), Failure> {
    let (Some(placement), Some(per_node)) = (&plan.cluster.placement, plan.cluster.topology.per_node) else {
        return Ok(());
    };
    let (Some(process), Ok(here)) = (launched(), std::env::var("SLURMD_NODENAME")) else { return Ok(()) };
    match placement.nodes.get(process.rank / per_node) {
        Some(node) if process.size > 1 && *node != here => Err(Failure::mistake(format!(
            "rank {} is on {here}, and cluster.placement has {node} for it; start the job by kintsugi launch --slurm, which asks \
             for the nodes and their order",
            process.rank
        ))),
        _ => Ok(()),
    }
}

/// What every process must know of the beginning of a run.
#[derive(Serialize, Deserialize)]
struct SharedBeginning {
    /// The token that ends documents, which a checkpoint may decide.
    end_of_document: Option<u32>,
    /// The split of the data, which a checkpoint may decide.
    split: Option<f64>,
    trace_step: Option<u64>,
    start: SharedStart,
    folder: Option<FolderCheck>,
    skipped: SkippedSamples,
}

/// Where every process finds what a run starts from.
#[derive(Serialize, Deserialize)]
enum SharedStart {
    Seed,
    Weights(PathBuf),
    Checkpoint(PathBuf),
    /// A set of copies, as JSON, and what the run would have started from without it.
    Copies(String, Box<SharedStart>),
}

impl SharedStart {
    fn new(start: &Start, init: Option<&PathBuf>) -> Self {
        match (start, init) {
            (Start::Checkpoint(checkpoint), _) => SharedStart::Checkpoint(checkpoint.path().to_owned()),
            (Start::Copies(copied), _) => {
                let origin = SharedStart::new(&copied.origin, init);
                SharedStart::Copies(copies::to_json(&copied.set), Box::new(origin))
            }
            (Start::Weights(_), Some(folder)) => SharedStart::Weights(folder.clone()),
            (Start::Weights(_) | Start::Seed, _) => SharedStart::Seed,
        }
    }

    /// The start of this process, whose copies are in `folder`.
    fn open(self, folder: Option<&CopyFolder>) -> Result<Start, Failure> {
        Ok(match self {
            SharedStart::Seed => Start::Seed,
            SharedStart::Weights(folder) => Start::Weights(Arc::new(WeightsFolder::open(&folder)?)),
            SharedStart::Checkpoint(path) => Start::Checkpoint(Arc::new(Checkpoint::open(&path)?)),
            SharedStart::Copies(set, origin) => {
                let (set, origin) = (copies::from_json(&set), origin.open(folder)?);
                let folder = folder.expect("the run copies states").clone();
                Start::Copies(Arc::new(CopiedStart { folder, set, origin }))
            }
        })
    }
}

impl SharedBeginning {
    fn new(plan: &Plan, beginning: &Beginning, folder: Option<FolderCheck>) -> Self {
        SharedBeginning {
            folder,
            skipped: beginning.skipped.clone(),
            end_of_document: plan.end_of_document(),
            split: split(plan),
            trace_step: beginning.trace_step,
            start: SharedStart::new(&beginning.start, plan.init.as_ref()),
        }
    }
}

/// Trains in a process other than that of rank 0: no output and no files but its shards of checkpoints.
fn run_other(connection: Connection, prepared: PreparedRun) -> Result<(), Failure> {
    let PreparedRun { mut plan, mut dataset, prediction, .. } = prepared;
    let Copies { folder: copies, .. } = Copies::prepare(&plan, connection)?;
    let beginning: Option<SharedBeginning> = processes::share(connection, None)?;
    let Some(beginning) = beginning else { return Ok(()) };
    FolderCheck::compare(beginning.folder.as_ref(), &plan.run, connection)?;
    if let (Data::Tokens(tokens), Some(end)) = (&mut plan.data, beginning.end_of_document) {
        tokens.end_of_document = Some(end);
    }
    if beginning.split != split(&plan) {
        if let Data::Tokens(tokens) = &mut plan.data {
            tokens.split = beginning.split;
        }
        dataset = kintsugi_engine::dataset(&plan)?;
    }
    let start = beginning.start.open(copies.as_ref())?;
    let options = options(&plan, &prediction, connection, (start, beginning.skipped), beginning.trace_step)?;
    let options = TrainOptions { copies, ..options };
    verdict::set_run(&plan.run.out);
    train(&plan, &*dataset, &options, |_| {})?;
    Ok(())
}

/// Trains in the process of rank 0, which shows the run and writes its files.
fn run_first(arguments: &Arguments, connection: Connection, prepared: PreparedRun) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let PreparedRun { mut plan, notes, mut dataset, prediction } = prepared;
    let split_before = split(&plan);
    let floor = dataset.floor(plan.batch.sequence);
    let predicted = predicted(&plan, &prediction);
    let copies = Copies::prepare(&plan, connection)?;
    let begun = Task::new(&mut plan, &arguments.config, &arguments.trace, &copies).and_then(|task| {
        let shared = match &task {
            Task::Train(beginning) => {
                let folder = FolderCheck::begin(&plan.run.out, connection, plan.run.keep > 0)?;
                Some(SharedBeginning::new(&plan, beginning, folder))
            }
            Task::Nothing(_) => None,
        };
        Ok((task, shared))
    });
    let (task, shared) = match begun {
        Ok((task, shared)) => (Some(task), Ok(shared)),
        Err(failure) => (None, Err(failure)),
    };
    let shared = processes::share(connection, Some(shared))?;
    let mut beginning = match task.expect("it was shared") {
        Task::Train(beginning) => beginning,
        Task::Nothing(finished) => return finished.report(output),
    };
    FolderCheck::compare(shared.and_then(|shared| shared.folder).as_ref(), &plan.run, connection)?;
    if split(&plan) != split_before {
        dataset = kintsugi_engine::dataset(&plan)?;
    }
    output.text(&introduction(&plan, connection, &predicted))?;
    for note in notes.into_iter().chain(other_device(&plan)) {
        output.text(&format!("note     {note}\n"))?;
    }
    output.text(&beginning.notes)?;
    if let Some(path) = &arguments.write_batches {
        let batches = batches(&plan, &beginning.start);
        let mut skipped = beginning.start.progress().spikes.skipped;
        skipped.add_all(&beginning.skipped);
        write_batches(path, &WithoutSkipped { dataset: &*dataset, skipped }, batches)?;
        output.text(&format!("batches  {}: {} steps\n", path.display(), batches.steps))?;
    }
    let start = (beginning.start.clone(), beginning.skipped.clone());
    let options = options(&plan, &prediction, connection, start, beginning.trace_step)?;
    let options = TrainOptions { copies: copies.folder, ..options };
    verdict::set_run(&plan.run.out);
    let (outcome, [metrics, events]) =
        train_with_progress(&plan, &*dataset, &options, floor, &mut beginning)?;
    let summary = summary(&plan, &predicted, &outcome, floor, &options.start);
    let written = summary.write(&plan.run.out).map_err(Failure::from);
    let table = if outcome.steps > 0 { compare::table(&predicted, &outcome.measured) } else { String::new() };
    let shown = output.text(&(table + &conclusion(&plan, &outcome, floor)));
    let trace = arguments.trace.path.as_ref().map(|path| trace::write(&plan, &outcome.spans, path));
    let traced = trace.map_or(Ok(()), |trace| output.text(&trace?));
    let result = output.result(&summary);
    // One failure does not hide another. If the last checkpoint failed, the run is done and its result is lost.
    let of_run = outcome.failure.map(Failure::run);
    let of_saving = outcome.saves.failure.map(Failure::run);
    let of_files = [metrics, events, written, shown, traced, result];
    let of_files = of_files.map(|result| result.err().map(Failure::run));
    report([of_run, of_saving].into_iter().chain(of_files).flatten().collect())
}

/// Prints the failures of a run, one line each.
fn report(mut failures: Vec<Failure>) -> Result<(), Failure> {
    let Some(last) = failures.pop() else { return Ok(()) };
    for failure in failures {
        failure.report();
    }
    // The other processes have finished the run.
    Err(Failure::Agreed(Box::new(last)))
}

/// The share of the data that is set aside for validation, if it is given.
fn split(plan: &Plan) -> Option<f64> {
    match &plan.data {
        Data::Demo => None,
        Data::Tokens(tokens) => tokens.split,
    }
}

/// The batches that a run is about to read.
fn batches(plan: &Plan, start: &Start) -> BatchRange {
    let before = start.progress();
    let steps = plan.run.steps.saturating_sub(before.step);
    BatchRange { first: before.samples, steps, global: plan.batch.global, sequence: plan.batch.sequence }
}

/// A run as the user requested it, before its device is chosen.
struct RequestedRun {
    source: ConfigSource,
    /// The plan, with `--resume` applied.
    plan: Plan,
    device: DeviceChoice,
}

impl RequestedRun {
    fn new(arguments: &Arguments) -> Result<Self, Failure> {
        let source = arguments.config.read()?;
        let mut plan = source.plan()?;
        if let Some(path) = &arguments.resume {
            plan.run.resume = path.clone().map_or(Resume::Newest, Resume::From);
        }
        let before = match &plan.run.resume {
            Resume::No => None,
            Resume::Newest => device_of_run(&plan.run.out),
            Resume::From(path) => device_of_run(path),
        };
        let device = match (DeviceChoice::of(&source, &plan)?, before) {
            // A run that is continued keeps its device, and with it its bits.
            (DeviceChoice::Auto, Some(before)) => DeviceChoice::Given(before),
            (choice, _) => choice,
        };
        Ok(RequestedRun { source, plan, device })
    }

    /// The plan on a device, and notes about settings without effect.
    fn on(self, device: DeviceKind) -> Result<(Plan, Vec<String>), Failure> {
        let source = self.source.set(format!("run.device={}", device.name()));
        let mut plan = source.plan()?;
        plan.run.resume = self.plan.run.resume;
        let notes = source.notes(&plan)?;
        Ok((plan, notes))
    }
}

/// Explains that the ranks do not run on the devices that the cluster describes.
fn other_device(plan: &Plan) -> Option<String> {
    let name = &plan.cluster.device.name;
    let (here, there) = match (plan.run.device, plan.cluster.device.kind?) {
        (DeviceKind::Cpu, Hardware::Gpu) => ("this machine's CPU", format!("GPUs ({name})")),
        (DeviceKind::Cuda | DeviceKind::Hip, Hardware::Cpu) => {
            ("this machine's GPU", format!("CPUs ({name})"))
        }
        (DeviceKind::Cpu, Hardware::Cpu) | (DeviceKind::Cuda | DeviceKind::Hip, Hardware::Gpu) => {
            return None;
        }
    };
    Some(format!(
        "the ranks run on {here}, but the cluster describes {there}: the predicted memory is for {here}, the predicted \
         time for the cluster"
    ))
}

/// The prediction of a step, with time and energy if the speed of its devices is known.
fn predicted(plan: &Plan, prediction: &Prediction) -> StepMetrics {
    let mut figures = prediction.figures();
    if let Some(timing) = time(plan) {
        figures.step_s = Some(timing.step_s);
        figures.tokens_per_s = Some(plan.tokens_per_step() as f64 / timing.step_s);
        figures.energy_j = Consumption::new(plan, &timing).map(|used| used.joules);
    }
    figures
}

/// A description of the run and its prediction.
fn introduction(plan: &Plan, connection: Connection, predicted: &StepMetrics) -> String {
    let copies = describe::copies(plan, predicted.replication.as_ref());
    let facts = describe::plan(plan).into_iter().chain(copies).chain(describe::processes(connection));
    let facts: Vec<Fact> = facts.collect();
    format!(
        "{}\npredicted\n{}{}\n",
        describe::lines(&facts),
        compare::memory_table(predicted),
        describe::traffic_table(&predicted.comm_bytes),
    )
}

fn options(
    plan: &Plan,
    prediction: &Prediction,
    connection: Connection,
    (start, skipped): (Start, SkippedSamples),
    trace_step: Option<u64>,
) -> Result<TrainOptions, Failure> {
    Ok(TrainOptions {
        memory: MemoryChoice::Slab(prediction.stages.iter().map(|memory| memory.reserved).collect()),
        connection,
        stop: stop_on_signal()?,
        trace_step,
        start,
        skipped,
        checkpoints: (plan.run.keep > 0).then(|| CheckpointFolder::of_run(&plan.run.out)),
        copies: None,
        overlap_steps: None,
        flight: Some(plan.run.out.clone()),
    })
}

/// Trains. Returns the outcome, and whether all metrics and all events could be written in the end.
fn train_with_progress(
    plan: &Plan,
    dataset: &dyn Dataset,
    options: &TrainOptions,
    floor: Option<f64>,
    beginning: &mut Beginning,
) -> Result<(TrainOutcome, [Result<(), Failure>; 2]), Failure> {
    let mut progress = Progress::new(plan, floor);
    let mut failing = [false; 2];
    let outcome = train(plan, dataset, options, |event| {
        progress.tell(event);
        if let Event::RolledBack(rollback) = event
            && let Err(failure) = beginning.go_back(plan, rollback)
        {
            progress.warn(&format!("{failure}; the run continues"));
        }
        if let Event::Step(report) = event {
            let line =
                MetricsLine::new(plan, report, |samples| dataset.epochs(samples).into_iter().collect());
            let metrics = beginning.metrics.step(&line).map_err(Failure::from);
            let events = beginning.events.as_mut().map_or(Ok(()), |events| events.step(&line));
            for (written, failing) in [metrics, events].iter().zip(&mut failing) {
                if let (Err(failure), false) = (written, *failing) {
                    progress.warn(&format!(
                        "{failure}; the run continues, and writes the steps as soon as it can"
                    ));
                }
                *failing = written.is_err();
            }
        }
    });
    progress.finish();
    let events = beginning.events.as_mut().map_or(Ok(()), Events::flush);
    let flushed = [beginning.metrics.flush().map_err(Failure::from), events];
    Ok((outcome?.expect("the outcome comes to rank 0"), flushed))
}

/// The losses, and the paths of the files.
fn conclusion(plan: &Plan, outcome: &TrainOutcome, floor: Option<f64>) -> String {
    if outcome.steps == 0 {
        let saved = outcome.saves.last.as_ref().map(|saved| checkpoint_line(outcome, saved));
        return format!("steps    0: nothing was trained\n{}", saved.unwrap_or_default());
    }
    let mut losses = vec![format!("{:.4} → {:.4}", outcome.loss_first, outcome.loss_last)];
    losses.extend(outcome.validation_loss.map(|loss| format!("validation {loss:.4}")));
    losses.extend(floor.map(|floor| {
        let distance = outcome.validation_loss.unwrap_or(outcome.loss_last) - floor;
        format!("{distance:.4} above the {floor:.4} of a perfect model")
    }));
    let mut steps = match (&outcome.failure, outcome.stopped, outcome.skipped) {
        (Some(_), ..) => format!("{} of {}: ended early", outcome.steps, plan.run.steps),
        (None, true, _) => format!("{} of {}: stopped on request", outcome.steps, plan.run.steps),
        (None, false, 0) => outcome.steps.to_string(),
        (None, false, skipped) => format!("{}, {skipped} of them skipped", outcome.steps),
    };
    if outcome.replayed > 0 {
        write!(steps, "; {} replayed as a graph", outcome.replayed).expect("a string");
    }
    if let Some(waits @ 1..) = outcome.host_waits {
        write!(steps, "; in the last one the host waited {waits} times for the GPU").expect("a string");
    }
    let out = plan.run.out.display();
    let saved = outcome.saves.last.as_ref().map(|saved| checkpoint_line(outcome, saved)).unwrap_or_default();
    format!(
        "loss     {}\n\
         steps    {steps}\n\
         {saved}\
         files    {out}/metrics.jsonl, {out}/summary.json, {out}/config.toml (to repeat this run)\n",
        losses.join(", ")
    )
}

/// The path of the last checkpoint, and the time that saving took.
fn checkpoint_line(outcome: &TrainOutcome, saved: &CheckpointInfo) -> String {
    let (path, saves) = (saved.path.display(), &outcome.saves);
    let blocked = compare::duration(saves.blocked_s);
    let written = compare::duration(saves.write_s);
    format!(
        "saved    {path} ({} in all; training paused for {blocked}, and writing took {written} in the background)\n",
        saves.saved
    )
}

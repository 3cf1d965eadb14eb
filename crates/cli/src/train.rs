//! `kintsugi train`: prediction, run, and the two side by side.

mod compare;
mod progress;
mod record;
mod trace;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use kintsugi_engine::{MemoryChoice, Outcome, TrainOptions, dataset, device, train};
use kintsugi_plan::Plan;
use kintsugi_rank::Figures;
use kintsugi_simulate::{Play, Prediction, predict};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::config::ConfigArguments;
use crate::describe;
use crate::failure::Failure;
use crate::files;
use crate::fit;
use crate::output::Output;
use progress::Progress;
use record::{Metrics, Summary};

/// Trains a model; shows the prediction before the run and "predicted / measured" after it.
///
/// Every rank is a thread of this process. Before anything is allocated, memory and traffic of a step are predicted
/// to the byte and the run is refused if it does not fit. Into the folder run.out it writes config.toml, the
/// whole configuration with nothing left to defaults, metrics.jsonl, a line per step as it goes, and at the end
/// summary.json. The same configuration and seed give the same losses, bit for bit.
///
/// Ctrl-C ends the run after the running step, with a whole summary; a second one ends it at once.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Writes what every rank did in one step, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Prints the summary as JSON, and nothing else to stdout
    #[arg(long)]
    json: bool,
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
      the same run again";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let plan = arguments.config.resolve()?;
    let floor = dataset(&plan)?.floor(plan.batch.sequence);
    let prediction = predict(&plan, device(&plan), Play::Full);
    fit::here(&plan, &prediction).map_err(|misfit| Failure::Mistake(misfit.to_string()))?;
    let predicted = prediction.figures();
    let mut metrics = begin_record(&plan, arguments)?;
    output.text(&introduction(&plan, &predicted))?;
    let options = options(&plan, &prediction, arguments.trace.is_some())?;
    let outcome = train_with_progress(&plan, &options, floor, &mut metrics)?;
    let summary = Summary::new(&plan, &predicted, &outcome, floor);
    summary.write(&plan.run.out)?;
    output.text(&compare::table(&predicted, &outcome.measured))?;
    output.text(&conclusion(&plan, &outcome, floor))?;
    if let Some(path) = &arguments.trace {
        output.text(&trace::write(&plan, &outcome.spans, path)?)?;
    }
    output.result(&summary)
}

/// Makes the run's folder ready, and sees to it that nothing stands in the way of what is written at the end.
fn begin_record(plan: &Plan, Arguments { config, trace, .. }: &Arguments) -> Result<Metrics, Failure> {
    let out = &plan.run.out;
    record::create_folder(out)?;
    trace.as_deref().map(files::check_writable).transpose()?;
    let path = record::config_path(out);
    match (config.is_file(&path), config.has_sets()) {
        (false, _) => files::write_whole(&path, &plan.to_toml())?,
        // The user's own file stays as it is.
        (true, false) => {}
        (true, true) => {
            let path = path.display();
            let rule = "is the configuration itself, and --set would change it; give another run.out";
            return Err(Failure::Mistake(format!("{path} {rule}")));
        }
    }
    Metrics::create(out)
}

/// What is about to be run, and what it will take.
fn introduction(plan: &Plan, predicted: &Figures) -> String {
    format!(
        "{}{}\npredicted\n{}{}\n",
        describe::model(plan),
        describe::layout(plan),
        compare::memory_table(predicted),
        describe::traffic_table(&predicted.comm_bytes),
    )
}

fn options(plan: &Plan, prediction: &Prediction, traced: bool) -> Result<TrainOptions, Failure> {
    Ok(TrainOptions {
        memory: MemoryChoice::Slab(prediction.stages.iter().map(|memory| memory.reserved).collect()),
        stop: stop_on_signal()?,
        trace_step: traced.then(|| trace::step(plan)),
    })
}

fn train_with_progress(
    plan: &Plan,
    options: &TrainOptions,
    floor: Option<f64>,
    metrics: &mut Metrics,
) -> Result<Outcome, Failure> {
    let mut progress = Progress::new(plan, floor);
    let mut written = Ok(());
    let outcome = train(plan, options, |report| {
        progress.step(&report);
        if written.is_ok() {
            written = metrics.step(&report);
        }
        // A run whose metrics are lost is not worth its time.
        if written.is_err() {
            options.stop.store(true, Ordering::Relaxed);
        }
    });
    progress.finish();
    written?;
    Ok(outcome?)
}

/// A flag that SIGINT and SIGTERM set; the second of them has its usual effect.
pub fn stop_on_signal() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The order matters: the first signal must find the flag unset.
        flag::register_conditional_default(signal, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(|error| Failure::Run(format!("cannot listen for signal {signal}: {error}")))?;
    }
    Ok(stop)
}

/// How the loss went, and where the files are.
fn conclusion(plan: &Plan, outcome: &Outcome, floor: Option<f64>) -> String {
    let mut losses = vec![format!("{:.4} → {:.4}", outcome.loss_first, outcome.loss_last)];
    losses.extend(outcome.validation_loss.map(|loss| format!("validation {loss:.4}")));
    losses.extend(floor.map(|floor| {
        let distance = outcome.validation_loss.unwrap_or(outcome.loss_last) - floor;
        format!("{distance:.4} above the {floor:.4} of a perfect model")
    }));
    let steps = match (outcome.stopped, outcome.skipped) {
        (true, _) => format!("{} of {}: stopped when asked to", outcome.steps, plan.run.steps),
        (false, 0) => outcome.steps.to_string(),
        (false, skipped) => format!("{}, of which {skipped} were skipped", outcome.steps),
    };
    let out = plan.run.out.display();
    format!(
        "loss     {}\n\
         steps    {steps}\n\
         files    {out}/metrics.jsonl, {out}/summary.json, {out}/config.toml (to repeat this run)\n",
        losses.join(", ")
    )
}

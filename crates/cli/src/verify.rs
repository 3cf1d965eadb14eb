//! `kintsugi verify`: compares every layout with one rank.

mod base;
mod tally;

use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use kintsugi_comm::Connection;
use kintsugi_comm::mpi::launched;
use kintsugi_engine::nccl_settings;
use kintsugi_engine::verify::{
    Fault, Layout, Reference, compare, layouts, nccl_layouts, record, record_reference,
};
use kintsugi_plan::config::ConfigError;
use kintsugi_plan::{Plan, Transport};

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::host;
use crate::launch;
use crate::output::Output;
use crate::processes::{self, ConnectOptions, DeviceChoice};
use crate::progress::Progress;
use base::Base;
pub use base::{memory, on_one_rank};
use tally::{Tally, Verdict};

/// Checks that every layout trains the same model as one rank.
///
/// It compares the loss and the gradient norm of every step, the whole gradient of every parameter at the first step
/// (Adam hides a constant factor of the gradient, so losses alone prove little), and every weight at the end; each by
/// the largest relative difference. Copies on several ranks must have the same bits. A key bias without rotary
/// positions is left out: softmax is invariant to it, so its gradient is only rounding.
///
/// With a CONFIG, its model is trained. Each layout replaces its tables parallel, sharding and memory, and layouts that
/// the model or the batch does not allow are skipped. Without a CONFIG, batch.micro = 1, batch.global = 8 and nothing is
/// evaluated, to be quick. Unless --set names another model, some layouts also train the demo's model as other families.
/// With run.device = "auto" the layouts run on the CPU, unless they communicate by NCCL.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Training steps per layout
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Injects a fault wherever it can occur, to check that it is detected (exit code 1)
    #[arg(long, value_name = "FAULT", value_parser = fault_parser())]
    inject: Option<Fault>,
    /// How the ranks are connected, in place of run.transport
    ///
    /// With mpi and nccl the command starts the processes itself. With nccl it runs 12 layouts that have every kind of
    /// transfer, on the GPU, unless --layouts chooses others.
    #[arg(long, value_name = "TRANSPORT", value_parser = transport_parser())]
    transport: Option<Transport>,
    /// Runs only the layouts whose names contain one of these words
    #[arg(long, value_name = "WORDS", value_delimiter = ',')]
    layouts: Vec<String>,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi verify
      the demo under every layout, in all families and precisions
  kintsugi verify run.toml --steps 5
      your own model, briefly
  kintsugi verify --transport mpi
      every rank as a process
  kintsugi verify --transport nccl --steps 2
      GPUs that communicate by NCCL; the ranks share a GPU if there are more of them
  kintsugi verify --inject missing-average
      injects a fault: gradients are summed instead of averaged; this must fail";

fn fault_parser() -> impl TypedValueParser<Value = Fault> {
    let values = Fault::ALL.map(|(name, fault)| PossibleValue::new(name).help(fault.mistake()));
    PossibleValuesParser::new(values).map(|chosen| {
        let named = Fault::ALL.iter().find(|(name, _)| *name == chosen);
        named.expect("the parser lets only these names through").1
    })
}

fn transport_parser() -> impl TypedValueParser<Value = Transport> {
    PossibleValuesParser::new(["threads", "mpi", "nccl"]).map(|chosen| match chosen.as_str() {
        "mpi" => Transport::Mpi,
        "nccl" => Transport::Nccl,
        _ => Transport::Threads,
    })
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let given = arguments.config.plan()?;
    let transport = arguments.transport.unwrap_or(given.run.transport);
    let kind = if given.run.device.is_gpu() { given.run.device } else { host::gpus().0 };
    let gpus = (transport == Transport::Nccl).then_some(kind);
    let base = Base::new(&arguments.config, arguments.steps, gpus)?;
    let plans: Vec<_> = chosen_layouts(arguments, transport, base.has_demo_model)?
        .into_iter()
        .map(|layout| (base.plan(&layout), layout.name))
        .collect();
    base::check_fit(plans.iter().filter_map(|(plan, name)| Some((name.as_str(), plan.as_ref().ok()?))))?;
    let starts_processes = matches!(transport, Transport::Mpi | Transport::Nccl);
    if starts_processes && launched().is_none_or(|launched| launched.size == 1) {
        let ranks = plans.iter().filter_map(|(plan, _)| Some(plan.as_ref().ok()?.mesh.ranks())).max();
        let launch = match transport {
            Transport::Nccl => launch::this_command_without_mpi,
            _ => launch::this_command,
        };
        return launch(ranks.unwrap_or(1));
    }
    let options = ConnectOptions {
        transport: Some(transport),
        nccl: nccl_settings(&given),
        choice: DeviceChoice::Given(base.device),
        ranks: given.mesh.ranks(),
        limit: Duration::from_secs(given.run.communication_timeout),
    };
    let connection = processes::connect_by(options)?.connection;
    processes::agree_for(connection, arguments.config.plan(), |plan| plan, None)?;
    if connection.is_first() {
        run_first(arguments, connection, plans)
    } else {
        plans
            .iter()
            .filter_map(|(plan, _)| plan.as_ref().ok())
            .try_for_each(|plan| run_other(plan, connection, arguments))
    }
}

/// The layouts that the arguments choose.
fn chosen_layouts(
    arguments: &Arguments,
    transport: Transport,
    all_families: bool,
) -> Result<Vec<Layout>, Failure> {
    let words = &arguments.layouts;
    let named = |layout: &Layout| words.is_empty() || words.iter().any(|word| layout.name.contains(word));
    let all = match transport {
        Transport::Nccl if words.is_empty() => nccl_layouts(),
        _ => layouts(all_families),
    };
    let chosen: Vec<Layout> = all.into_iter().filter(named).collect();
    if chosen.is_empty() {
        return Err(Failure::mistake(format!("--layouts {}: no layout has such a name", words.join(","))));
    }
    Ok(chosen)
}

/// Compares the layouts in the process of rank 0.
fn run_first(
    arguments: &Arguments,
    connection: Connection,
    plans: Vec<(Result<Plan, ConfigError>, String)>,
) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let mut reference = LatestReference::default();
    let mut tally = Tally::default();
    output.text(&tally::header())?;
    let progress = Progress::new("layouts", plans.len() as u64);
    for (plan, name) in plans {
        let verdict = match plan {
            Ok(plan) if !fits(&plan, connection) => {
                Verdict::Skipped(format!("it needs {} processes", plan.mesh.ranks()))
            }
            Ok(plan) => check(&plan, reference.of(&plan)?, connection, arguments.inject)?,
            Err(error) => Verdict::Skipped(error.to_string()),
        };
        let row = tally.add(name, verdict);
        progress.suspend(|| output.text(&row))?;
        progress.add(1);
    }
    drop(progress);
    output.text(&tally.conclusion(arguments.inject.is_some()))?;
    output.result(&tally.answer())?;
    // The other processes have ended their work, and know nothing of it.
    if tally.any_failed() { Err(Failure::Agreed(Box::new(Failure::Shown))) } else { Ok(()) }
}

/// Runs this process's rank of a layout, if it has one there.
fn run_other(plan: &Plan, connection: Connection, arguments: &Arguments) -> Result<(), Failure> {
    if fits(plan, connection) {
        record(plan, base::memory(plan, connection), connection, arguments.inject)?;
    }
    Ok(())
}

/// Whether there are enough processes for a layout.
fn fits(plan: &Plan, connection: Connection) -> bool {
    connection.processes().is_none_or(|processes| plan.mesh.ranks() <= processes)
}

/// Runs a layout and compares it with one rank.
fn check(
    plan: &Plan,
    reference: &Reference,
    connection: Connection,
    fault: Option<Fault>,
) -> Result<Verdict, Failure> {
    match (record(plan, base::memory(plan, connection), connection, fault), connection) {
        (Ok(recording), _) => {
            let recording = recording.expect("the recording comes to rank 0");
            Ok(Verdict::compared(plan, compare(reference, &recording)))
        }
        (Err(error), Connection::Threads) => Ok(Verdict::Broken(error.to_string())),
        // The other processes still wait in this layout.
        (Err(error), Connection::Mpi(_) | Connection::Nccl(_)) => Err(error.into()),
    }
}

/// The one-rank run of the latest model. Layouts of a model follow each other, so one is enough.
#[derive(Default)]
struct LatestReference(Option<(Plan, Reference)>);

impl LatestReference {
    /// The one-rank run of a layout's model. An error there ends the whole check.
    fn of(&mut self, layout: &Plan) -> Result<&Reference, Failure> {
        let plan = base::on_one_rank(layout);
        let (_, reference) = match self.0.take() {
            Some(known) if known.0 == plan => self.0.insert(known),
            _ => {
                let reference = record_reference(&plan, base::memory(&plan, Connection::Threads))?;
                self.0.insert((plan, reference))
            }
        };
        Ok(reference)
    }
}

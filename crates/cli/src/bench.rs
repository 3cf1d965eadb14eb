//! `kintsugi bench comm`: how long transfers between ranks take, beside what is predicted.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kintsugi_calibrate::{Arrangement, TransferKind, TransferTime, time_transfers};
use kintsugi_comm::Collective;
use kintsugi_engine::nccl_settings;
use kintsugi_plan::{Group, Plan};
use kintsugi_simulate::{collective_seconds, message_seconds};
use kintsugi_spec::{Cause, Level, units};
use serde::Serialize;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::files;
use crate::output::Output;
use crate::processes::{self, DeviceChoice};
use crate::table::Table;

/// Measures parts of a run by themselves.
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Comm(CommArguments),
}

/// Times collectives and messages between ranks, beside the prediction.
///
/// The groups are the axes of the configuration's mesh: tp, dp and pp, all groups of an axis at once, as in training.
/// Ranks are threads, or processes under `kintsugi launch`, mpirun or srun. The prediction is that of the
/// configuration's cluster.
///
/// For every size, the table shows the median time of a transfer and its bandwidth: the bytes that each rank sends (a
/// message there and back) over that time. With MPI, the library's own all-reduce is timed in turns with ours. With
/// NCCL, the time that the host takes to enqueue a transfer is shown, too.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
struct CommArguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Bytes of every rank's buffer, as in --sizes 4KiB,1MiB
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = size, default_value = DEFAULT_SIZES)]
    sizes: Vec<usize>,
    /// Writes start-up time, latency and bandwidth of the links as a profile for `plan --profile`
    #[arg(long, value_name = "FILE.toml")]
    out: Option<PathBuf>,
    /// Prints the times as JSON
    #[arg(long)]
    json: bool,
}

const DEFAULT_SIZES: &str = "64,4KiB,64KiB,1MiB,16MiB";

const EXAMPLES: &str = "\
Examples:
  kintsugi bench comm --set parallel.tp=2 --set parallel.pp=1 --set parallel.dp=1
      two ranks as threads of this machine
  kintsugi launch --ranks 2 bench comm --set parallel.tp=2 --set parallel.pp=1 \\
      --set parallel.dp=1 --sizes 1MiB,64MiB
      two processes, beside the MPI library's own sum
  srun -N 2 --ntasks-per-node 8 kintsugi bench comm run.toml --out links.toml
      the groups of a run on two nodes, and their links as a profile";

fn size(text: &str) -> Result<usize, Cause> {
    let bytes = units::parse_bytes(text).and_then(|bytes| usize::try_from(bytes).ok());
    let bytes = bytes.filter(|bytes| (4..=1 << 32).contains(bytes));
    bytes.ok_or_else(|| Cause::new("must be from 4 B to 4 GiB, as in 64KiB"))
}

/// Runs the command.
pub fn run(Arguments { what: What::Comm(arguments) }: &Arguments) -> Result<(), Failure> {
    let requested = arguments.config.read().and_then(|source| {
        let plan = source.plan()?;
        let device = DeviceChoice::of(&source, &plan)?;
        Ok((plan, device))
    });
    let connection =
        processes::connect(requested.as_ref().ok().map(|(plan, device)| (plan, *device)))?.connection;
    let (plan, _) = processes::agree(connection, requested, |(plan, _)| plan)?;
    if plan.mesh.ranks() == 1 {
        return Err(Failure::mistake(
            "bench comm needs at least two ranks, and the configuration has one: set parallel.tp, pp or dp",
        ));
    }
    let out = arguments.out.as_deref().filter(|_| connection.is_first());
    out.map(files::check_writable).transpose()?;
    let output = Output { json: arguments.json };
    let (mesh, nccl) = (plan.mesh, nccl_settings(&plan));
    let (topology, links) = (plan.cluster.topology, plan.cluster.emulated);
    let arrangement = Arrangement { mesh, topology, connection, links, nccl };
    let mut times = Vec::new();
    let timed = time_transfers(arrangement, &arguments.sizes, |time| times.push(time));
    timed.map_err(Failure::run)?;
    if !connection.is_first() {
        return Ok(());
    }
    output.text(&table(&plan, &times))?;
    if let Some(path) = &arguments.out {
        files::write_whole(path, profile(&plan, &times).as_bytes())?;
        output.text(&format!("links    written to {}\n", path.display()))?;
    }
    output.result(&times.iter().map(|time| Row::new(&plan, time)).collect::<Vec<_>>())
}

#[derive(Serialize)]
struct Row {
    group: String,
    ranks: usize,
    operation: &'static str,
    bytes: usize,
    seconds: f64,
    /// What the host takes to enqueue it, if it runs on the device alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    enqueue_s: Option<f64>,
    bytes_per_s: f64,
    predicted_s: Option<f64>,
}

impl Row {
    fn new(plan: &Plan, time: &TransferTime) -> Self {
        let bytes = time.bytes as f64;
        let (operation, predicted_s) = match time.kind {
            TransferKind::Collective(collective) => {
                (collective.operation().name(), Some(collective_seconds(plan, time.group, collective, bytes)))
            }
            TransferKind::LibraryAllReduce => ("all_reduce (library)", None),
            TransferKind::PingPong => {
                ("send and back", (time.group == Group::PIPELINE).then(|| 2.0 * message_seconds(plan, bytes)))
            }
        };
        Row {
            group: time.group.to_string(),
            ranks: time.ranks,
            operation,
            bytes: time.bytes,
            seconds: time.seconds,
            enqueue_s: time.enqueue,
            bytes_per_s: time.bandwidth(),
            predicted_s,
        }
    }
}

fn table(plan: &Plan, times: &[TransferTime]) -> String {
    let mut table =
        Table::new(["group", "operation", "size", "time", "to enqueue", "bandwidth", "predicted"]);
    for time in times {
        let row = Row::new(plan, time);
        table.row([
            format!("{} ({} ranks)", row.group, row.ranks),
            row.operation.to_owned(),
            units::bytes(row.bytes as u64),
            units::seconds(row.seconds),
            row.enqueue_s.map_or_else(|| "–".to_owned(), units::seconds),
            format!("{}/s", units::bytes(row.bytes_per_s as u64)),
            row.predicted_s.map_or_else(|| "–".to_owned(), units::seconds),
        ]);
    }
    format!("{table}")
}

/// The links of every level that a group crosses, in the form of a cluster's profile.
fn profile(plan: &Plan, times: &[TransferTime]) -> String {
    let mut text = String::from("# Measured by kintsugi bench comm.\n");
    let level = |group: Group| {
        let members = plan.mesh.group(group, plan.mesh.coordinate(0), plan.cluster.topology);
        members.iter().map(|&rank| plan.cluster.places().level(0, rank)).max().unwrap_or(Level::Package)
    };
    for wanted in Level::ALL {
        // The largest group that does not leave the level says most about it.
        let groups = times.iter().filter(|time| level(time.group) == wanted);
        let Some(group) = groups.max_by_key(|time| time.ranks).map(|time| time.group) else { continue };
        let of =
            |kind: TransferKind| times.iter().filter(move |time| time.group == group && time.kind == kind);
        let reduces = || of(TransferKind::Collective(Collective::AllReduce));
        let (Some(small), Some(large), Some(message)) = (
            reduces().min_by_key(|time| time.bytes),
            reduces().max_by_key(|time| time.bytes),
            of(TransferKind::PingPong).min_by_key(|time| time.bytes),
        ) else {
            continue;
        };
        let hops = 2.0 * (small.ranks - 1) as f64;
        let latency = (message.seconds / 2.0).min(small.seconds / hops);
        let start = small.seconds - hops * latency;
        let sent = large.bandwidth() * large.seconds;
        // Noise may make a small transfer the slower one.
        let bandwidth = if large.seconds > small.seconds {
            sent / (large.seconds - small.seconds)
        } else {
            large.bandwidth()
        };
        let table = [("bandwidth", bandwidth), ("efficiency", 1.0), ("latency", latency), ("start", start)];
        let keys = table.map(|(key, value)| format!("{key} = {value:e}\n")).concat();
        text = format!("{text}\n[cluster.links.{}]\n{keys}", wanted.name());
    }
    text
}

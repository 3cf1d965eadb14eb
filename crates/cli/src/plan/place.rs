//! `plan --place`: chooses nodes, and the order of ranks on them.

use std::path::{Path, PathBuf};

use kintsugi_draw::chart::{Axis, Chart, Series, Style, Unit, svg};
use kintsugi_placement::{Found, How, describe, host_file, place, read_table};
use kintsugi_plan::Plan;
use kintsugi_simulate::{Coverage, predict};
use kintsugi_spec::{Level, Placement, units};
use serde::Serialize;

use crate::config::ConfigArguments;
use crate::describe::{self, CommBytes, fact};
use crate::failure::{ErrorContext, Failure};
use crate::files::{check_writable, read_text, write_whole};
use crate::host::planned_device;
use crate::output::Output;
use crate::table::Table;

/// What `plan --place --json` prints.
#[derive(Serialize)]
struct Answer {
    nodes: Vec<String>,
    pods: Vec<String>,
    exact: bool,
    orders: usize,
    step_s: f64,
    bound_s: f64,
    by_name_step_s: f64,
    random_step_s: f64,
    comm: CommBytes,
    by_name_comm: CommBytes,
}

/// A plan on chosen nodes.
pub struct PlacedPlan {
    /// What was found.
    pub found: Found,
    /// The plan with that placement.
    pub plan: Plan,
}

/// The placement of a plan on the free nodes of a table.
pub fn placed(plan: &Plan, table: &Path) -> Result<PlacedPlan, Failure> {
    let name = || table.display().to_string();
    let free =
        read_table(&read_text(table)?).map_err(|error| Failure::mistake(ErrorContext::new(name(), error)))?;
    let found = place(plan, &free).map_err(|error| Failure::mistake(ErrorContext::new(name(), error)))?;
    let plan = on(plan, &found.placement);
    Ok(PlacedPlan { found, plan })
}

fn on(plan: &Plan, placement: &Placement) -> Plan {
    let mut placed = plan.clone();
    placed.cluster = plan.cluster.placed(placement.clone());
    placed
}

/// The file that `--placement` takes.
pub fn placement_file(placement: &Placement) -> String {
    let list = |names: &[String]| {
        let names: Vec<String> =
            names.iter().map(|name| toml::Value::from(name.as_str()).to_string()).collect();
        names.join(", ")
    };
    format!(
        "# Written by kintsugi: nodes in the order of ranks. Give it to --placement.\n\
         [cluster.placement]\nnodes = [{}]\npods = [{}]\n",
        list(&placement.nodes),
        list(&placement.pods)
    )
}

/// The host file beside a placement's file.
pub fn hosts_path(placement: &Path) -> PathBuf {
    placement.with_extension("hosts")
}

/// Writes a placement and its host file.
pub fn write(plan: &Plan, placement: &Placement, path: &Path) -> Result<(), Failure> {
    let per_node = plan.cluster.topology.per_node.unwrap_or(plan.mesh.ranks());
    write_whole(path, placement_file(placement).as_bytes())?;
    write_whole(&hosts_path(path), host_file(placement, plan.mesh.ranks(), per_node).as_bytes())
}

fn bytes_over(comm: &CommBytes, level: Level) -> u64 {
    comm.get(level.name()).map_or(0, |operations| operations.values().sum())
}

/// The step of a placement beside that of others.
fn chart(plan: &Plan, found: &Found, between_pods: [u64; 2]) -> Chart {
    let [placed, by_name] = between_pods.map(units::bytes);
    let names = [format!("placed: {placed}"), format!("by name: {by_name}"), "random".to_owned()];
    let steps = [found.step_s, found.by_name_s, found.random_s];
    let points = steps.into_iter().enumerate().map(|(i, step)| (i as f64, Some(step)));
    Chart {
        title: format!("{} on {}: the same plan on other nodes", plan.model.name, plan.cluster.name),
        question: "What does a bad placement cost?".to_owned(),
        caption: kintsugi_report::plan::layout(plan),
        x: Axis::of_categories("nodes and order of ranks: bytes between pods", names.to_vec()),
        y: Axis::from_zero("step", Unit::Seconds),
        series: vec![
            Series::new("predicted step", Style::Bars, 0).points(points),
            Series::guide("no placement is faster", 1, [-0.5, 2.5], found.bound_s),
        ],
        ..Chart::default()
    }
}

/// Runs the command.
pub fn run(
    config: &ConfigArguments,
    table: &Path,
    [out, plot]: [Option<&Path>; 2],
    output: Output,
) -> Result<(), Failure> {
    let hosts = out.map(hosts_path);
    for path in [out, hosts.as_deref(), plot].into_iter().flatten() {
        check_writable(path)?;
    }
    let plan = config.plan()?;
    let PlacedPlan { found, plan: placed } = placed(&plan, table)?;
    let figures = |plan: &Plan| {
        let device = planned_device(plan, plan.mesh.ranks());
        predict(plan, device, Coverage::quick(plan)).figures().comm_bytes
    };
    let (comm, by_name_comm) = (figures(&placed), figures(&on(&plan, &found.by_name)));
    let per_node = plan.cluster.topology.per_node.unwrap_or(plan.mesh.ranks());
    let mut facts = describe::plan(&plan);
    let (exact, orders) = match found.how {
        How::Exact { orders } => (true, orders),
        How::Heuristic { orders } => (false, orders),
    };
    let how = if exact {
        format!("the fastest of all {orders} orders of pods")
    } else {
        let over = 100.0 * (found.step_s / found.bound_s - 1.0);
        format!(
            "the fastest of {orders} orders, at most {over:.1} % over the bound of {}",
            units::seconds(found.bound_s)
        )
    };
    facts.push(fact("placed", how));
    facts.extend(
        describe(&found.placement, plan.mesh.ranks(), per_node).into_iter().map(|line| fact("", line)),
    );
    let mut text = describe::lines(&facts);
    let mut lines = Table::new(["", "step", "the placement gains", "pods", "in pods", "between pods"]);
    let pods = |placement: &Placement| {
        let mut pods: Vec<&String> = placement.pods.iter().collect();
        pods.sort_unstable();
        pods.dedup();
        pods.len().to_string()
    };
    let over = |comm: &CommBytes, level: Level| units::bytes(bytes_over(comm, level));
    let gain = |step: f64| format!("{:.1} %", 100.0 * (step / found.step_s - 1.0));
    let row = |name: &str, step: f64, placement: &Placement, comm: &CommBytes| {
        [
            name.to_owned(),
            units::seconds(step),
            if name == "placed" { "–".to_owned() } else { gain(step) },
            pods(placement),
            over(comm, Level::Pod),
            over(comm, Level::Cluster),
        ]
    };
    lines.row(row("placed", found.step_s, &found.placement, &comm));
    lines.row(row("by name, as Slurm does", found.by_name_s, &found.by_name, &by_name_comm));
    let dash = || "–".to_owned();
    let random = units::seconds(found.random_s);
    lines.row(["random, mean of 3".to_owned(), random, gain(found.random_s), dash(), dash(), dash()]);
    text = format!("{text}\n{lines}");
    output.text(&text)?;
    if let Some(out) = out {
        write(&plan, &found.placement, out)?;
        output.text(&format!("written  {}, {}\n", out.display(), hosts_path(out).display()))?;
    }
    if let Some(plot) = plot {
        let chart = chart(&plan, &found, [&comm, &by_name_comm].map(|comm| bytes_over(comm, Level::Cluster)));
        write_whole(plot, svg(&chart).as_bytes())?;
        output.text(&format!("plot     {}\n", plot.display()))?;
    }
    output.result(&Answer {
        nodes: found.placement.nodes,
        pods: found.placement.pods,
        exact,
        orders,
        step_s: found.step_s,
        bound_s: found.bound_s,
        by_name_step_s: found.by_name_s,
        random_step_s: found.random_s,
        comm,
        by_name_comm,
    })
}

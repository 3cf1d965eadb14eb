//! The prediction as text.

use kintsugi_plan::{DeviceKind, Plan, Unit};
use kintsugi_rank::RankMemory;
use kintsugi_simulate::Prediction;
use kintsugi_spec::units;

use super::speed::Speed;
use crate::describe::{self, Fact, fact};
use crate::table::Table;

/// The whole report below its heading.
pub fn tables(plan: &Plan, prediction: &Prediction) -> String {
    format!("{}\n{}", stages(plan, prediction), describe::traffic_table(&prediction.figures().comm_bytes))
}

/// A description of the plan and its step, a line each. `fits` says whether the plan fits.
pub fn heading(
    plan: &Plan,
    prediction: &Prediction,
    speed: Option<&Speed>,
    bubble: f64,
    fits: &str,
) -> Vec<Fact> {
    let flops = plan.flops();
    let unit_costs = if speed.is_some() { "" } else { ", with unit costs" };
    let (model, hardware) = (units::count(flops.model), units::count(flops.hardware));
    let mut facts = describe::plan(plan);
    facts.push(fact("FLOPs", format!("model {model}, hardware {hardware} per step")));
    facts.push(fact("bubble", format!("{:.1} % of the time{unit_costs}", 100.0 * bubble)));
    facts.extend(speed.map_or_else(|| vec![unknown_speed(plan)], |speed| speed.facts(plan)));
    facts.extend(describe::copies(plan, prediction.replication.as_ref()));
    facts.push(fact("fits", fits));
    facts
}

/// Why no time is predicted, and what to do.
fn unknown_speed(plan: &Plan) -> Fact {
    let (device, how) = match plan.run.device {
        DeviceKind::Cpu => ("CPU", "kintsugi calibrate"),
        DeviceKind::Cuda => ("GPU", "kintsugi calibrate --set run.device=cuda"),
        DeviceKind::Hip => ("GPU", "kintsugi calibrate --set run.device=hip"),
    };
    let text = format!(
        "unknown, so no time is predicted: {how} measures this machine's {device} into profile.toml, and --profile \
         profile.toml predicts with it"
    );
    fact("speed", text)
}

/// A stage as a row of the table.
#[derive(PartialEq)]
struct Stage {
    layers: usize,
    parameters: usize,
    memory: RankMemory,
}

/// Parameters and memory of one rank of each stage.
fn stages(plan: &Plan, prediction: &Prediction) -> Table {
    let stages: Vec<Stage> = prediction
        .stages
        .iter()
        .enumerate()
        .map(|(stage, &memory)| describe_stage(plan, stage, memory))
        .collect();
    let categories = RankMemory::default().categories().map(|(name, _)| name);
    let transport = prediction.stages.iter().any(|memory| memory.transport > 0);
    let last = ["total", "reserved"].into_iter().chain(transport.then_some("transport"));
    let mut table = Table::new(["stage", "layers", "parameters"].into_iter().chain(categories).chain(last));
    let rows = group(&stages);
    let largest = rows.iter().map(|(_, stage)| stage.memory.reserved).max();
    for (i, (name, stage)) in rows.iter().enumerate() {
        let shown = i < SHOWN || i + SHOWN >= rows.len() || Some(stage.memory.reserved) == largest;
        match (shown, i) {
            (true, _) => table.row(cells(name, stage)),
            (false, SHOWN) => table.row(["… (--json has every stage)"]),
            (false, _) => {}
        }
    }
    table
}

/// Rows at the top and at the bottom that are shown if there are many.
const SHOWN: usize = 6;

/// Groups equal adjacent rows, with their names.
fn group(stages: &[Stage]) -> Vec<(String, &Stage)> {
    let mut first = 0;
    let mut name = |equal: &[Stage]| {
        let last = first + equal.len() - 1;
        let name = if first == last { first.to_string() } else { format!("{first} – {last}") };
        first = last + 1;
        name
    };
    stages.chunk_by(|a, b| a == b).map(|equal| (name(equal), &equal[0])).collect()
}

fn cells(name: &str, Stage { layers, parameters, memory }: &Stage) -> Vec<String> {
    let mut cells = vec![name.to_owned(), layers.to_string(), units::count(*parameters as f64)];
    cells.extend(memory.categories().iter().map(|&(_, bytes)| units::bytes(bytes)));
    cells.extend([memory.total, memory.reserved].map(units::bytes));
    // A column that is there only if the transport has memory of its own.
    cells.extend((memory.transport > 0).then(|| units::bytes(memory.transport)));
    cells
}

fn describe_stage(plan: &Plan, stage: usize, memory: RankMemory) -> Stage {
    let units = plan.stage_units(stage);
    let layers = units.iter().filter(|unit| matches!(unit, Unit::Layer(_))).count();
    let placed = units.into_iter().flat_map(|unit| plan.layout(unit).placed);
    Stage { layers, parameters: placed.map(|placed| placed.range.len()).sum(), memory }
}

//! The prediction as people read it.

use kintsugi_plan::Plan;
use kintsugi_rank::RankMemory;
use kintsugi_simulate::{Misfit, Prediction};
use kintsugi_spec::units;

use crate::describe;
use crate::table::Table;

/// The whole report.
pub fn text(plan: &Plan, prediction: &Prediction, bubble: f64, misfit: Option<&Misfit>) -> String {
    let flops = plan.flops();
    let fits = match misfit {
        None => "yes".to_owned(),
        Some(misfit) => format!("no: {misfit}"),
    };
    format!(
        "{}{}\
         FLOPs    model {}, hardware {} per step\n\
         bubble   {:.1} % of the time, with unit costs\n\
         fits     {fits}\n\n{}\n{}",
        describe::model(plan),
        describe::layout(plan),
        units::count(flops.model),
        units::count(flops.hardware),
        100.0 * bubble,
        stages(plan, prediction),
        describe::traffic_table(&prediction.figures().comm_bytes),
    )
}

/// A stage as a row: ranks of equal neighbours share one.
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
    let last = ["total", "reserved"];
    let mut table =
        Table::new(["a rank of stage", "layers", "parameters"].into_iter().chain(categories).chain(last));
    let mut first = 0;
    for equal in stages.chunk_by(|a, b| a == b) {
        let name = match equal.len() {
            1 => first.to_string(),
            n => format!("{first} – {}", first + n - 1),
        };
        first += equal.len();
        let Stage { layers, parameters, memory } = &equal[0];
        let mut row = vec![name, layers.to_string(), units::count(*parameters as f64)];
        row.extend(memory.categories().iter().map(|&(_, bytes)| units::bytes(bytes)));
        row.extend([memory.total, memory.reserved].map(units::bytes));
        table.row(row);
    }
    table
}

fn describe_stage(plan: &Plan, stage: usize, memory: RankMemory) -> Stage {
    let units = plan.stage_units(stage);
    let layers = units.iter().filter(|unit| matches!(unit, kintsugi_plan::Unit::Layer(_))).count();
    let placed = units.into_iter().flat_map(|unit| plan.layout(unit).placed);
    Stage { layers, parameters: placed.map(|placed| placed.range.len()).sum(), memory }
}

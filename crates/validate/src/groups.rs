//! Groups of measured layouts of one job, with what the planner says of each: tables on which a search by trials is judged.

use std::collections::BTreeMap;

use kintsugi_simulate::{Coverage, memory_by_stage, predict, time};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::constants::Constants;
use super::description::Kind;
use super::device;
use super::run::Run;

/// The layouts of one job, among which a user would choose.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayoutGroup {
    /// Its name.
    pub name: String,
    /// Its layouts.
    pub layouts: Vec<Layout>,
}

/// A layout that was measured once or more.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Layout {
    /// Its keys and values.
    pub values: BTreeMap<String, String>,
    /// Predicted seconds of a step; `None` if the engine refuses the layout.
    pub predicted_s: Option<f64>,
    /// Predicted memory of the fullest rank, as a share of what the planner lets it take.
    pub memory_share: Option<f64>,
    /// Measured seconds of a step; `None` for each run that failed.
    pub measured_s: Vec<Option<f64>>,
}

/// The keys that differ inside a group.
const KEYS: [&str; 5] = ["parallel.tp", "parallel.pp", "parallel.dp", "batch.micro", "sharding.zero"];

/// The runs of each layout, by its keys and values.
type ByValues<'a> = BTreeMap<BTreeMap<String, String>, Vec<&'a Run>>;

/// The groups of some runs with one global batch, each predicted with these constants.
pub fn layout_groups(runs: &[Run], constants: &Constants, global_batch: usize) -> Vec<LayoutGroup> {
    let batch = format!("batch.global={global_batch}");
    let mut groups: BTreeMap<&str, ByValues> = BTreeMap::new();
    for run in runs.iter().filter(|run| run.kind == Kind::Step && !run.group.is_empty()) {
        if run.settings.contains(&batch) {
            groups.entry(&run.group).or_default().entry(values(run)).or_default().push(run);
        }
    }
    let group = |(name, layouts): (&str, ByValues)| {
        let layouts: Vec<_> = layouts.into_iter().collect();
        let layouts = layouts.into_par_iter().map(|(values, runs)| layout(values, &runs, constants));
        LayoutGroup { name: name.to_owned(), layouts: layouts.collect() }
    };
    groups.into_iter().map(group).collect()
}

fn values(run: &Run) -> BTreeMap<String, String> {
    let pair =
        |setting: &String| setting.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    run.settings.iter().filter_map(pair).filter(|(key, _)| KEYS.contains(&key.as_str())).collect()
}

fn layout(values: BTreeMap<String, String>, runs: &[&Run], constants: &Constants) -> Layout {
    let run = runs[0];
    let plan = run.plan(constants, &[]).ok();
    let memory = run.memory_plan(constants, &[]).ok().and_then(|plan| {
        let stages = memory_by_stage(&plan, &predict(&plan, device(&plan), Coverage::ShortStep));
        Some(stages.into_iter().fold(0.0, f64::max) / plan.cluster.device.planned_memory()? as f64)
    });
    Layout {
        predicted_s: plan.as_ref().and_then(time).map(|timing| timing.step_s),
        memory_share: memory,
        measured_s: runs.iter().map(|run| plan.as_ref().and_then(|plan| run.seconds(plan))).collect(),
        values,
    }
}

//! nanotron's runs on H100: thousands of layouts of three models, whose repeats differ by 5 to 25 %.
//!
//! So the comparison is about the order of the layouts, the quality of the predicted best one, and which layouts fit.

use std::collections::BTreeMap;

use kintsugi_plan::Plan;
use kintsugi_simulate::{Coverage, memory_by_stage, predict};
use rayon::prelude::*;

use super::score::{Figure, MeasuredRun, Report, errors, spearman};
use super::table::Row;
use super::{device, plan, predicted};

/// The table.
pub const FILE: &str = "nanotron_h100.csv";

struct Run {
    model: String,
    nodes: String,
    name: String,
    ranks: usize,
    /// Tokens of a step for each rank.
    tokens: f64,
    fits: bool,
    /// Tokens per second and rank.
    predicted: f64,
    measured: Option<f64>,
    /// Memory of the first stage, which contains the rank that writes the table.
    memory: f64,
    measured_memory: Option<f64>,
}

/// One report for each model.
pub fn reports(rows: &[Row], over: &[String]) -> Vec<Report> {
    let runs: Vec<Option<Run>> = rows.par_iter().map(|row| run(row, over)).collect();
    let left_out = runs.iter().filter(|run| run.is_none()).count();
    let mut models: BTreeMap<String, Vec<Run>> = BTreeMap::new();
    for run in runs.into_iter().flatten() {
        models.entry(run.model.clone()).or_default().push(run);
    }
    models.into_iter().map(|(model, runs)| report(&model, &runs, left_out)).collect()
}

fn report(model: &str, runs: &[Run], left_out: usize) -> Report {
    let worked: Vec<&Run> = runs.iter().filter(|run| run.measured.is_some()).collect();
    let pairs: Vec<(f64, f64)> =
        worked.iter().map(|run| (run.predicted, run.measured.unwrap_or(0.0))).collect();
    let memories: Vec<(f64, f64)> =
        worked.iter().filter_map(|run| Some((run.memory, run.measured_memory?))).collect();
    let fitting = worked.iter().filter(|run| run.fits).count() as f64 / worked.len() as f64;
    let agreed =
        runs.iter().filter(|run| run.fits == run.measured.is_some()).count() as f64 / runs.len() as f64;
    Report {
        set: format!("nanotron {model}"),
        rows: runs.len(),
        left_out,
        fitted_on: "a handful of 8B layouts; memory and the links of replicas on all rows".to_owned(),
        figures: vec![
            Figure::at_least("rank correlation", spearman(&pairs), Some(0.85)),
            Figure::at_least("pick, share of the best", pick(&worked), Some(0.95)),
            Figure::at_least("working runs predicted to fit", fitting, Some(0.98)),
            Figure::at_least("fit agreement", agreed, None),
            Figure::at_most("memory, mean error %", errors(&memories).0, Some(8.0)),
            Figure::at_most("time, mean error %", errors(&pairs).0, None),
        ],
        runs: worked
            .iter()
            .map(|run| MeasuredRun {
                name: run.name.clone(),
                ranks: run.ranks,
                predicted_s: run.tokens / run.predicted,
                measured_s: run.tokens / run.measured.unwrap_or(f64::NAN),
            })
            .collect(),
    }
}

/// The measured speed of the predicted best layout, as a share of the best: the mean over the numbers of nodes.
fn pick(worked: &[&Run]) -> f64 {
    let mut nodes: BTreeMap<&str, Vec<&&Run>> = BTreeMap::new();
    for run in worked {
        nodes.entry(&run.nodes).or_default().push(run);
    }
    let share = |runs: &Vec<&&Run>| {
        let measured = |run: &&&Run| run.measured.unwrap_or(0.0);
        let best = runs.iter().map(measured).fold(0.0, f64::max);
        let picked = runs
            .iter()
            .max_by(|a, b| a.predicted.total_cmp(&b.predicted))
            .map_or(0.0, |run| run.measured.unwrap_or(0.0));
        picked / best
    };
    nodes.values().map(share).sum::<f64>() / nodes.len() as f64
}

fn run(row: &Row, over: &[String]) -> Option<Run> {
    let plan = row_plan(row, over, &[])?;
    let dealt = row_plan(row, over, &layers_per_stage(row))?;
    let memory = memory_by_stage(&dealt, &predict(&dealt, device(&dealt), Coverage::ShortStep));
    let fullest = memory.iter().copied().fold(0.0, f64::max);
    let worked = row.text("status") == "ok";
    let tokens = plan.tokens_per_step() as f64 / plan.mesh.ranks() as f64;
    Some(Run {
        model: row.text("model").to_owned(),
        nodes: row.text("nodes").to_owned(),
        name: ["nodes", "tp", "pp", "dp", "zero", "micro_batch", "grad_accum"].map(|c| row.text(c)).join(" "),
        ranks: plan.mesh.ranks(),
        tokens,
        fits: plan.cluster.device.planned_memory().is_none_or(|most| fullest <= most as f64),
        predicted: if worked { tokens / predicted(&plan) } else { 0.0 },
        measured: row.number("tokens_per_s_per_gpu").filter(|_| worked),
        memory: memory[0],
        measured_memory: row.number("peak_mem_gb").filter(|_| worked).map(|gb| gb * GB),
    })
}

const GB: f64 = 1_073_741_824.0;

fn row_plan(row: &Row, over: &[String], layers_per_stage: &[usize]) -> Option<Plan> {
    let keys = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab"];
    let mut sets = vec!["model.family=llama".to_owned()];
    sets.extend(keys.map(|key| format!("model.{key}={}", row.count(key))));
    sets.push(format!("model.tied={}", row.text("tied_embeddings").to_lowercase()));
    sets.push(format!("batch.sequence={}", row.count("seq_len")));
    sets.extend(["tp", "pp", "dp"].map(|key| format!("parallel.{key}={}", row.count(key))));
    sets.push(format!("batch.micro={}", row.count("micro_batch")));
    sets.push(format!("batch.global={}", row.count("global_batch")));
    sets.push(format!("sharding.zero={}", row.number("zero").unwrap_or(0.0)));
    sets.extend(["cluster.preset=h100", "framework.preset=nanotron"].map(str::to_owned));
    if !layers_per_stage.is_empty() {
        sets.push(format!("parallel.layers_per_stage={layers_per_stage:?}"));
    }
    plan(&sets, over)
}

/// How nanotron assigns layers to stages (its `build_model`): a stage takes blocks until their cost exceeds its share of the
/// total, where the cost of a layer and of the head is that of their products. That may leave the last stages without a
/// layer. Our stages need one each, which is taken from the stages before them.
fn layers_per_stage(row: &Row) -> Vec<usize> {
    let layer = 4 * row.count("hidden") + 3 * row.count("ffn");
    deal(row.count("layers"), row.count("pp"), layer, row.count("vocab"))
}

fn deal(layers: usize, stages: usize, layer: usize, head: usize) -> Vec<usize> {
    let all = layers * layer + head;
    let mut dealt = vec![0_usize; stages];
    let mut stage = 0;
    for so_far in 1..=layers {
        dealt[stage] += 1;
        if so_far * layer * stages > all * (stage + 1) {
            stage = (stage + 1).min(stages - 1);
        }
    }
    for empty in (1..stages).rev().filter(|&stage| dealt[stage] == 0).collect::<Vec<_>>() {
        if let Some(giver) = (0..empty).rev().find(|&giver| dealt[giver] > 1) {
            dealt[giver] -= 1;
            dealt[empty] += 1;
        }
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_stages_have_more_layers_where_the_head_is_heavy() {
        // 1B: the head costs as much as four layers.
        let one_b = |stages| deal(16, stages, 4 * 2048 + 3 * 8192, 131_072);
        assert_eq!(one_b(1), [16]);
        assert_eq!(one_b(2), [11, 5]);
        // nanotron's own are 6, 5, 5 and the head alone.
        assert_eq!(one_b(4), [6, 5, 4, 1]);
        assert_eq!(one_b(8).iter().sum::<usize>(), 16);
        assert_eq!(one_b(16), [1; 16]);
    }
}

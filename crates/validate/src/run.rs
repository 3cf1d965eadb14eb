//! A row with the standard columns, as a configuration with its measurement.

use kintsugi_plan::Plan;
use kintsugi_plan::config::{ConfigError, ConfigSource};

use super::constants::Constants;
use super::description::{Description, Kind, MemoryOf, Stages};
use super::table::Row;

/// The standard columns. An empty cell is the default of its key.
pub const COLUMNS: &[&str] = &[
    "name",
    "set",
    "source",
    "group",
    "model",
    "family",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "vocab_multiple",
    "tied",
    "sequence",
    "tp",
    "pp",
    "dp",
    "virtual_stages",
    "micro_batch",
    "global_batch",
    "zero",
    "recompute",
    "sequence_parallel",
    "device",
    "framework",
    "settings",
    "status",
    "time_s",
    "tokens_per_s_per_gpu",
    "hardware_tflops",
    "mfu",
    "memory_gib",
    "efficiency",
];

/// The keys that columns set.
const KEYS: &[(&str, &str)] = &[
    ("model", "model.preset"),
    ("family", "model.family"),
    ("layers", "model.layers"),
    ("hidden", "model.hidden"),
    ("heads", "model.heads"),
    ("kv_heads", "model.kv_heads"),
    ("ffn", "model.ffn"),
    ("vocab", "model.vocab"),
    ("vocab_multiple", "model.vocab_multiple"),
    ("tied", "model.tied"),
    ("sequence", "batch.sequence"),
    ("tp", "parallel.tp"),
    ("pp", "parallel.pp"),
    ("dp", "parallel.dp"),
    ("micro_batch", "batch.micro"),
    ("global_batch", "batch.global"),
    ("zero", "sharding.zero"),
    ("recompute", "memory.recompute"),
    ("sequence_parallel", "parallel.sequence_parallel"),
    ("device", "cluster.preset"),
    ("framework", "framework.preset"),
];

/// A measured run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its set.
    pub set: String,
    /// The origin of the measurement.
    pub source: String,
    /// Its name in its set.
    pub name: String,
    /// Layouts of the same job, among which a user would choose.
    pub group: String,
    /// What is measured.
    pub kind: Kind,
    /// Whether the run worked, instead of running out of memory.
    pub worked: bool,
    /// Whether a slot took over twice as long as that of the same layout elsewhere.
    pub is_outlier: bool,
    /// The row with the standard columns.
    pub row: Row,
    /// The configuration as `--set` takes it.
    pub settings: Vec<String>,
    /// The stage whose memory was measured.
    pub memory_of: MemoryOf,
    /// How layers are assigned to stages.
    pub stages: Stages,
    /// The set that contains the same rows.
    pub part_of: Option<String>,
}

impl Run {
    /// The run of a row of a table, if it belongs to the described set.
    pub fn new(description: &Description, row: &Row, number: usize) -> Option<Self> {
        let row = description.standard(row)?;
        let text = |column: &str| row.text(column).to_owned();
        let or = |text: String, other: &str| if text.is_empty() { other.to_owned() } else { text };
        let set = or(text("set"), "rows");
        let status = row.text("status").to_lowercase();
        Some(Run {
            source: or(text("source"), &set),
            name: or(text("name"), &format!("row {number}")),
            group: text("group"),
            kind: description.kind,
            worked: status.is_empty() || status == "ok",
            is_outlier: false,
            settings: settings(&row),
            memory_of: description.memory_of,
            stages: description.stages,
            part_of: description.part_of.clone(),
            set,
            row,
        })
    }

    /// The framework's preset; empty for this engine.
    pub fn framework(&self) -> &str {
        self.last("framework.preset")
    }

    /// The cluster's preset.
    pub fn device(&self) -> &str {
        self.last("cluster.preset")
    }

    fn last(&self, key: &str) -> &str {
        let found = self.settings.iter().rev().find_map(|set| set.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_default()
    }

    /// The plan of the run, or why the engine does not support its layout.
    pub fn plan(&self, constants: &Constants, over: &[String]) -> Result<Plan, ConfigError> {
        self.plan_with(constants, over, &[])
    }

    /// The plan for memory, with the layers of each stage as the framework assigns them.
    pub fn memory_plan(&self, constants: &Constants, over: &[String]) -> Result<Plan, ConfigError> {
        match self.stages {
            Stages::Even => self.plan(constants, over),
            Stages::ByCost => {
                let layers = format!("parallel.layers_per_stage={:?}", self.layers_by_cost());
                self.plan_with(constants, over, &[layers])
            }
        }
    }

    fn plan_with(&self, constants: &Constants, over: &[String], own: &[String]) -> Result<Plan, ConfigError> {
        let fitted = constants.settings(self.device(), self.framework());
        // The constants of a preset come before the settings of the row, which may change them.
        let (presets, others): (Vec<&String>, Vec<&String>) =
            self.settings.iter().partition(|set| set.contains(".preset="));
        let source = ConfigSource::text("").sets(presets).sets(&fitted).sets(others).sets(own).sets(over);
        source.plan()
    }

    /// Measured seconds of a step of the plan.
    pub fn seconds(&self, plan: &Plan) -> Option<f64> {
        let number = |column| self.row.number(column).filter(|&x| self.worked && x > 0.0);
        let ranks = plan.mesh.ranks() as f64;
        number("time_s")
            .or_else(|| Some(plan.tokens_per_step() as f64 / (number("tokens_per_s_per_gpu")? * ranks)))
            .or_else(|| Some(plan.flops().hardware / (number("hardware_tflops")? * 1e12 * ranks)))
            .or_else(|| Some(plan.flops().model / (number("mfu")? * plan.cluster.device.peak_16bit? * ranks)))
    }

    /// Measured bytes.
    pub fn memory(&self) -> Option<f64> {
        self.row.number("memory_gib").filter(|_| self.worked).map(|gib| gib * GIB)
    }

    /// The job and what decides the time of a slot: everything but the replicas, the batch and the sharding.
    pub fn slot_key(&self) -> String {
        let varies = ["parallel.dp=", "batch.global=", "sharding.zero="];
        let same = |set: &&String| !varies.iter().any(|key| set.starts_with(key));
        format!("{} {:?}", self.set, self.settings.iter().filter(same).collect::<Vec<_>>())
    }

    fn count(&self, column: &str) -> usize {
        self.row.number(column).map_or(1, |x| x as usize)
    }

    /// How nanotron assigns layers to stages (its `build_model`): a stage takes blocks until their cost exceeds its share of
    /// the total, where the cost of a layer and of the head is that of their products. That may leave the last stages
    /// without a layer. Our stages need one each, which is taken from the stages before them.
    fn layers_by_cost(&self) -> Vec<usize> {
        let layer = 4 * self.count("hidden") + 3 * self.count("ffn");
        deal(self.count("layers"), self.count("pp").clamp(1, 1 << 12), layer, self.count("vocab"))
    }
}

const GIB: f64 = 1_073_741_824.0;

fn settings(row: &Row) -> Vec<String> {
    let mut settings = Vec::new();
    for (column, key) in KEYS {
        let cell = row.text(column);
        let cell = if matches!(cell, "True" | "False") { cell.to_lowercase() } else { cell.to_owned() };
        if !cell.is_empty() {
            settings.push(format!("{key}={cell}"));
        }
    }
    if let Some(chunks) = row.number("virtual_stages").filter(|&chunks| chunks > 1.0) {
        settings.push("parallel.schedule=interleaved".to_owned());
        settings.push(format!("parallel.virtual_stages={chunks}"));
    }
    settings.extend(row.text("settings").split_whitespace().map(str::to_owned));
    settings
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

//! The plan of a run as stored in a manifest of version 2.
//!
//! These definitions are the format. They repeat the plan's fields, and the compiler compares the two, so renaming a key of
//! the configuration or a field of the plan cannot change the format by accident. If a field of the plan is renamed, it keeps
//! its old name here with `#[serde(rename)]`. A new field gets `#[serde(default)]`. The cluster and the framework are not
//! stored, because the contents of a checkpoint do not depend on them.

use std::path::PathBuf;

use kintsugi_plan::config::{ConfigError, ConfigSource};
use kintsugi_plan::{
    AttentionKind, Axis, Batch, Compute, Data, DataSource, DeviceKind, GradientType, LogFormat, LossScale,
    MAX_PARTS, MemoryOptions, Mesh, Optimizer, Part, Pipeline, Plan, Precision, Quantized, RateSchedule,
    Recompute, Resume, Run, ScheduleKind, Sharding, Span, TokenData, Transport, When,
};
use kintsugi_spec::{Activation, DEFAULT_INIT_STD, Family, ModelSpec, RotaryScaling, presets};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The name of the stored plan in error messages.
const NAME: &str = "its plan";

/// The most ranks of a mesh, as in a configuration.
const MAX_RANKS: usize = 1 << 20;

/// The most quantised numbers that share a scale, as in a configuration.
const MAX_BLOCK: usize = 4096;

/// For `#[serde(with)]`.
pub(crate) fn serialize<S: Serializer>(plan: &Plan, serializer: S) -> Result<S::Ok, S::Error> {
    PlanRecord::of(plan).serialize(serializer)
}

/// For `#[serde(with)]`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Plan, D::Error> {
    PlanRecord::deserialize(deserializer)?.into_plan().map_err(D::Error::custom)
}

#[derive(Serialize, Deserialize)]
struct PlanRecord {
    #[serde(with = "ModelRecord")]
    model: ModelSpec,
    init: Option<String>,
    #[serde(with = "BatchRecord")]
    batch: Batch,
    mesh: Mesh,
    #[serde(with = "PipelineRecord")]
    pipeline: Pipeline,
    sequence_parallel: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    overlap_tp: bool,
    sharding: ShardingRecord,
    #[serde(with = "PrecisionRecord")]
    precision: Precision,
    #[serde(with = "MemoryRecord")]
    memory: MemoryOptions,
    #[serde(with = "OptimizerRecord")]
    optimizer: Optimizer,
    #[serde(with = "DataRecord")]
    data: Data,
    #[serde(with = "RunRecord")]
    run: Run,
}

impl PlanRecord {
    fn of(plan: &Plan) -> Self {
        PlanRecord {
            model: plan.model.clone(),
            init: plan.init.as_ref().map(|folder| folder.display().to_string()),
            batch: plan.batch,
            mesh: plan.mesh,
            pipeline: plan.pipeline.clone(),
            sequence_parallel: plan.sequence_parallel,
            overlap_tp: plan.overlap_tp,
            sharding: ShardingRecord::of(plan),
            precision: plan.precision,
            memory: plan.memory,
            optimizer: plan.optimizer,
            data: plan.data.clone(),
            run: plan.run.clone(),
        }
    }

    /// The plan. All its numbers are checked by the rules of a configuration, or here if a configuration does not have them.
    fn into_plan(self) -> Result<Plan, String> {
        // Checks that all integers fit into TOML.
        toml::Value::try_from(&self).map_err(|error| format!("{NAME} is not readable: {error}"))?;
        let defaults = self.defaults().map_err(|error| error.to_string())?;
        self.check_layout()?;
        let mut model = self.model;
        if presets::model(&model.name).is_err() {
            model.name.clone_from(&defaults.model.name);
        }
        let plan = Plan {
            model,
            init: self.init.map(PathBuf::from),
            batch: self.batch,
            mesh: self.mesh,
            pipeline: self.pipeline,
            sequence_parallel: self.sequence_parallel,
            overlap_tp: self.overlap_tp,
            sharding: self.sharding.into_sharding(self.mesh),
            precision: self.precision,
            memory: self.memory,
            optimizer: self.optimizer,
            data: self.data,
            run: Run { out: defaults.run.out, resume: defaults.run.resume, ..self.run },
            cluster: defaults.cluster,
            framework: defaults.framework,
        };
        check_as_configuration(&plan).map_err(|error| format!("{NAME}: {error}"))?;
        Ok(plan)
    }

    /// Checks the mesh and its sharding. Sharding has ranks here, and levels of a cluster in a configuration.
    fn check_layout(&self) -> Result<(), String> {
        let (sizes, dp) = (Axis::ALL.map(|axis| self.mesh.size(axis)), self.mesh.dp());
        let ranks = sizes.into_iter().try_fold(1_usize, usize::checked_mul);
        if !ranks.is_some_and(|ranks| (1..=MAX_RANKS).contains(&ranks)) {
            let product = sizes.map(|size| size.to_string()).join(" · ");
            return Err(format!("{NAME} has a mesh of {product} ranks, which is not from 1 to {MAX_RANKS}"));
        }
        let ShardingRecord { weights, gradients, states, secondary, quantized, parts, .. } = &self.sharding;
        let divides = |size: &usize| *size > 0 && dp.is_multiple_of(*size);
        let of_parts = parts.iter().try_fold(1_usize, |product, part| product.checked_mul(part.ranks));
        if ![*weights, *gradients, *states, *secondary].iter().all(divides)
            || parts.len() > MAX_PARTS
            || !(parts.is_empty() || of_parts == Some(dp))
        {
            return Err(format!("{NAME} has a sharding that does not divide its {dp} replicas"));
        }
        match quantized.iter().find(|codes| !codes.block.is_power_of_two() || codes.block > MAX_BLOCK) {
            Some(codes) => Err(format!("{NAME} has quantised blocks of {} numbers", codes.block)),
            None => Ok(()),
        }
    }

    /// A plan of the same model with defaults for everything else. Uses token files, since the demo corpus rejects a small
    /// vocabulary.
    fn defaults(&self) -> Result<Plan, ConfigError> {
        let text = format!("batch.sequence = {}\ndata.source = \"tokens\"", self.batch.sequence);
        ConfigSource::text(text).named(NAME).with_init_model(&self.model)?.plan()
    }
}

/// Checks a plan by the rules of a configuration, except for its sharding and its cluster, which is not stored.
fn check_as_configuration(plan: &Plan) -> Result<(), ConfigError> {
    let source = ConfigSource::text(plan.to_toml()).without(&["sharding", "cluster", "framework"]);
    let source = match plan.data {
        // The demo corpus rejects a small vocabulary, which converted weights may have.
        Data::Demo => source.without(&["data"]).set("data.source=tokens"),
        Data::Tokens(_) => source,
    };
    source.plan().map(drop)
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "ModelSpec")]
struct ModelRecord {
    name: String,
    family: Family,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    vocab_multiple: usize,
    positions: usize,
    tied: bool,
    parallel_residual: bool,
    activation: Activation,
    norm_eps: f64,
    rotary_base: f64,
    rotary_fraction: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rotary_scaling: Option<RotaryScaling>,
    #[serde(default = "default_init_std", skip_serializing_if = "is_default_init_std")]
    init_std: f64,
}

/// Manifests from before the key have no other, and one with the default stays as it was.
fn default_init_std() -> f64 {
    DEFAULT_INIT_STD
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default_init_std(given: &f64) -> bool {
    *given == DEFAULT_INIT_STD
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Batch")]
struct BatchRecord {
    sequence: usize,
    micro: usize,
    global: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Pipeline")]
struct PipelineRecord {
    schedule: ScheduleKind,
    virtual_stages: usize,
    layers: Vec<usize>,
    prefetch: usize,
    overlap: bool,
}

#[derive(Serialize, Deserialize)]
struct ShardingRecord {
    weights: usize,
    gradients: usize,
    states: usize,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    secondary: usize,
    gather: When,
    reduce: When,
    #[serde(default, skip_serializing_if = "is_exact")]
    quantized: Quantized,
    /// Empty if the data-parallel axis is not divided.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    parts: Vec<Part>,
}

impl ShardingRecord {
    fn of(plan: &Plan) -> Self {
        let Sharding { weights, gradients, states, secondary, gather, reduce, quantized, .. } = plan.sharding;
        let parts: Vec<Part> = plan.sharding.parts().filter(|part| part.span != Span::All).collect();
        ShardingRecord { weights, gradients, states, secondary, gather, reduce, quantized, parts }
    }

    fn into_sharding(self, mesh: Mesh) -> Sharding {
        let ShardingRecord { weights, gradients, states, secondary, gather, reduce, quantized, mut parts } =
            self;
        if parts.is_empty() && mesh.dp() > 1 {
            parts.push(Part { span: Span::All, ranks: mesh.dp() });
        }
        let mut parts = parts.into_iter();
        let parts = std::array::from_fn(|_| parts.next());
        let multiple = Sharding::multiple_for(quantized);
        Sharding { weights, gradients, states, secondary, gather, reduce, quantized, multiple, parts }
    }
}

fn one() -> usize {
    1
}

fn is_exact(quantized: &Quantized) -> bool {
    *quantized == Quantized::NONE
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(number: &usize) -> bool {
    *number == 1
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Precision")]
struct PrecisionRecord {
    compute: Compute,
    gradients: GradientType,
    states: Compute,
    #[serde(with = "LossScaleRecord")]
    loss_scale: LossScale,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "LossScale", rename_all = "lowercase")]
enum LossScaleRecord {
    Dynamic,
    Fixed(f64),
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "MemoryOptions")]
struct MemoryRecord {
    recompute: Recompute,
    attention: AttentionKind,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Optimizer")]
struct OptimizerRecord {
    lr: f64,
    min_lr: f64,
    warmup: u64,
    schedule: RateSchedule,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    decay_steps: Option<u64>,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    clip: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Data", rename_all = "lowercase")]
enum DataRecord {
    Demo,
    Tokens(#[serde(with = "TokenDataRecord")] TokenData),
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "TokenData")]
struct TokenDataRecord {
    #[serde(with = "sources")]
    sources: Vec<DataSource>,
    tokenizer: Option<String>,
    allow_other_tokenizer: bool,
    end_of_document: Option<u32>,
    #[serde(with = "sources")]
    validation: Vec<DataSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    split: Option<f64>,
    mask_documents: bool,
}

/// Does not store the output folder, the resume option, and how often and in which formats steps are logged, since the reader has its own.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Run")]
struct RunRecord {
    steps: u64,
    seed: u64,
    #[serde(skip)]
    out: PathBuf,
    #[serde(skip, default = "no_resume")]
    resume: Resume,
    checkpoint_every: u64,
    keep: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    keep_best: u64,
    #[serde(skip)]
    log_every: Option<u64>,
    #[serde(skip)]
    log: Vec<LogFormat>,
    eval_every: u64,
    eval_tokens: u64,
    max_skipped: u64,
    communication_timeout: u64,
    deterministic: bool,
    graph: bool,
    device: DeviceKind,
    transport: Transport,
    #[serde(skip)]
    nccl_channels: Option<u64>,
    #[serde(skip)]
    nccl_buffer: Option<u64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(given: &u64) -> bool {
    *given == 0
}

fn no_resume() -> Resume {
    Resume::No
}

/// Paths as text, since JSON cannot represent paths that are not UTF-8.
mod sources {
    use super::{DataSource, Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Source {
        path: String,
        weight: f64,
    }

    pub fn serialize<S: Serializer>(sources: &[DataSource], serializer: S) -> Result<S::Ok, S::Error> {
        let source =
            |source: &DataSource| Source { path: source.path.display().to_string(), weight: source.weight };
        serializer.collect_seq(sources.iter().map(source))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<DataSource>, D::Error> {
        let sources = Vec::<Source>::deserialize(deserializer)?;
        Ok(sources
            .into_iter()
            .map(|source| DataSource { path: source.path.into(), weight: source.weight })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The format: manifests that were written with it must be read for good. What was added since has a default.
    const FORMAT: &str = r#"{
        "model": {
            "name": "custom", "family": "llama", "layers": 2, "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 2,
            "ffn": 12, "vocab": 100, "vocab_multiple": 1, "positions": 32, "tied": false, "parallel_residual": false,
            "activation": "swiglu", "norm_eps": 1e-6, "rotary_base": 10000.0, "rotary_fraction": 0.30000000000000004
        },
        "init": "/weights",
        "batch": { "sequence": 16, "micro": 2, "global": 8 },
        "mesh": { "pp": 1, "dp": 2, "tp": 2 },
        "pipeline": { "schedule": "1f1b", "virtual_stages": 1, "layers": [2], "prefetch": 1, "overlap": true },
        "sequence_parallel": true,
        "sharding": { "weights": 1, "gradients": 2, "states": 2, "gather": "micro-batch", "reduce": "step" },
        "precision": { "compute": "fp16", "gradients": "compute", "states": "bf16", "loss_scale": { "fixed": 1024.0 } },
        "memory": { "recompute": "selective", "attention": "plain" },
        "optimizer": {
            "lr": 0.001, "min_lr": 0.0001, "warmup": 10, "schedule": "cosine", "betas": [0.9, 0.95], "eps": 1e-8,
            "weight_decay": 0.1, "clip": 1.0
        },
        "data": {
            "tokens": {
                "sources": [{ "path": "/data/a", "weight": 3.0 }, { "path": "/data/b", "weight": 1.0 }],
                "tokenizer": "bytes", "allow_other_tokenizer": false, "end_of_document": 0, "validation": [],
                "split": 0.05, "mask_documents": true
            }
        },
        "run": {
            "steps": 100, "seed": 7, "checkpoint_every": 10, "keep": 3, "eval_every": 5, "eval_tokens": 4096,
            "max_skipped": 20, "communication_timeout": 600, "deterministic": true, "graph": true, "device": "cpu",
            "transport": "threads"
        }
    }"#;

    fn read(text: &str) -> Result<Plan, serde_json::Error> {
        deserialize(&mut serde_json::Deserializer::from_str(text))
    }

    #[test]
    fn the_format_stays() {
        let plan = read(FORMAT).expect("a plan");
        let written = serialize(&plan, serde_json::value::Serializer).expect("JSON");
        assert_eq!(written, serde_json::from_str::<serde_json::Value>(FORMAT).expect("JSON"));
    }

    /// The words that a manifest has in common with the configuration.
    #[test]
    fn the_words_stay() {
        fn check<T: for<'de> Deserialize<'de> + Serialize>(words: &[&str]) {
            for word in words {
                let value = serde_json::from_value::<T>((*word).into()).expect(word);
                assert_eq!(serde_json::to_value(value).expect("a word"), *word);
            }
        }
        check::<Family>(&["gpt", "neox", "llama"]);
        check::<Activation>(&["gelu", "gelu-exact", "swiglu"]);
        check::<ScheduleKind>(&["gpipe", "1f1b", "interleaved", "zero-bubble"]);
        check::<When>(&["micro-batch", "step"]);
        check::<Compute>(&["fp32", "bf16", "fp16"]);
        check::<GradientType>(&["fp32", "compute"]);
        check::<Recompute>(&["none", "selective", "full"]);
        check::<AttentionKind>(&["flash", "plain"]);
        check::<RateSchedule>(&["cosine", "constant", "linear", "inverse-sqrt", "wsd"]);
        check::<DeviceKind>(&["cpu", "cuda"]);
        check::<Transport>(&["auto", "threads", "mpi", "nccl"]);
        assert_eq!(DataRecord::deserialize(serde_json::json!("demo")).expect("a word"), Data::Demo);
        let scale = LossScaleRecord::deserialize(serde_json::json!("dynamic")).expect("a word");
        assert_eq!(scale, LossScale::Dynamic);
    }

    #[test]
    fn a_plan_is_the_one_that_was_written() {
        let sets = [
            "parallel.dp=4",
            "sharding.zero=3",
            "run.seed=3",
            "run.keep_best=2",
            "model.norm_eps=0.1234567890123456789",
        ];
        let plan = ConfigSource::demo().sets(sets).plan().expect("a legal config");
        let written = serialize(&plan, serde_json::value::Serializer).expect("JSON").to_string();
        assert_eq!(read(&written).expect("a plan"), plan);
    }

    #[test]
    fn a_preset_that_is_gone_leaves_a_custom_model() {
        let plan = read(&FORMAT.replace("\"custom\"", "\"of-old\"")).expect("a plan");
        assert_eq!(plan.model.name, "custom");
    }
}

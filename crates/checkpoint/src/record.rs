//! The plan of a run as stored in a manifest of version 2.
//!
//! The plan is stored as the keys of its configuration, so that reading it applies the rules of a configuration. A key keeps its name
//! and meaning for good, and a key that a manifest does not have has its default. Version 2 stores some keys at places of their own
//! ([`MOVED`]), and the sharding by numbers of ranks instead of levels of links. The cluster and the framework are not stored,
//! because the contents of a checkpoint do not depend on them.

use kintsugi_plan::config::{ConfigSource, Key, keys};
use kintsugi_plan::{
    Axis, Data, LossScale, MAX_PARTS, Mesh, Part, Plan, Quantized, SecondaryUse, Sharding, Span, When,
};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

/// The name of the stored plan in error messages.
const NAME: &str = "its plan";

/// The most ranks of a mesh, as in a configuration.
const MAX_RANKS: usize = 1 << 20;

/// The most quantised numbers that share a scale, as in a configuration.
const MAX_BLOCK: usize = 4096;

/// What is not stored, or not as keys. A reader has an output folder and a machine of its own, and logs as it likes.
const NOT_STORED: [&str; 14] = [
    "model.preset",
    "sharding",
    "data",
    "cluster",
    "framework",
    "run.out",
    "run.resume",
    "run.log_every",
    "run.log",
    "run.hang_factor",
    "run.checksum_every",
    "run.replicate_every",
    "run.nccl_channels",
    "run.nccl_buffer",
];

/// The keys that are stored at another place, beside the sizes of the mesh.
const MOVED: [(&str, &str); 8] = [
    ("model.init", "init"),
    ("parallel.schedule", "pipeline.schedule"),
    ("parallel.virtual_stages", "pipeline.virtual_stages"),
    ("parallel.layers_per_stage", "pipeline.layers"),
    ("parallel.prefetch", "pipeline.prefetch"),
    ("parallel.overlap", "pipeline.overlap"),
    ("parallel.sequence_parallel", "sequence_parallel"),
    ("parallel.overlap_tp", "overlap_tp"),
];

/// For `#[serde(with)]`.
pub(crate) fn serialize<S: Serializer>(plan: &Plan, serializer: S) -> Result<S::Ok, S::Error> {
    record_of(plan).serialize(serializer)
}

/// For `#[serde(with)]`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Plan, D::Error> {
    plan_of(Value::deserialize(deserializer)?).map_err(D::Error::custom)
}

/// The plan as it is stored.
fn record_of(plan: &Plan) -> Value {
    let config = plan.to_table();
    let data = config["data"].clone();
    let mut record = serde_json::to_value(config).expect("a configuration has string keys");
    for path in NOT_STORED {
        take(&mut record, path);
    }
    for axis in Axis::ALL {
        take(&mut record, &format!("parallel.{}", axis.name()));
    }
    for (key, place) in MOVED {
        if let Some(value) = take(&mut record, key) {
            put(&mut record, place, value);
        }
    }
    put(&mut record, "mesh", json!(plan.mesh));
    put(&mut record, "model.name", json!(plan.model.name));
    put(&mut record, "sharding", json!(ShardingRecord::of(plan)));
    if let LossScale::Fixed(scale) = plan.precision.loss_scale {
        put(&mut record, "precision.loss_scale", json!({ "fixed": scale }));
    }
    match plan.data {
        Data::Demo => put(&mut record, "data", json!("demo")),
        Data::Tokens(_) => {
            put(&mut record, "data.tokens", json!(data));
            let sources = take(&mut record, "data.tokens.source").unwrap_or_default();
            put(&mut record, "data.tokens.sources", sources);
            if take(&mut record.clone(), "data.tokens.validation").is_none() {
                put(&mut record, "data.tokens.validation", json!([]));
            }
        }
    }
    record
}

/// The plan that is stored. Its numbers are checked by the rules of a configuration, or here if a configuration does not have them.
fn plan_of(mut record: Value) -> Result<Plan, String> {
    let damaged = |error: &dyn std::fmt::Display| format!("{NAME} is not readable: {error}");
    let sharding: ShardingRecord = serde_json::from_value(take(&mut record, "sharding").unwrap_or_default())
        .map_err(|error| damaged(&error))?;
    let mesh: Mesh = serde_json::from_value(take(&mut record, "mesh").unwrap_or_default())
        .map_err(|error| damaged(&error))?;
    sharding.check(mesh)?;
    for axis in Axis::ALL {
        put(&mut record, &format!("parallel.{}", axis.name()), json!(mesh.size(axis)));
    }
    let is_demo = record.get("data") == Some(&json!("demo"));
    if let Some(scale) = take(&mut record, "precision.loss_scale.fixed") {
        put(&mut record, "precision.loss_scale", scale);
    }
    for (key, place) in MOVED {
        if let Some(value) = take(&mut record, place) {
            put(&mut record, key, value);
        }
    }
    // The demo corpus refuses a small vocabulary, which converted weights may have.
    let data = take(&mut record, "data.tokens").unwrap_or_else(|| json!({ "sources": "tokens" }));
    put(&mut record, "data", data);
    if let Some(sources) = take(&mut record, "data.sources") {
        put(&mut record, "data.source", sources);
    }
    let name = take(&mut record, "model.name");
    keep_keys(&mut record);
    let text = toml::to_string(&record).map_err(|error| damaged(&error))?;
    let mut plan = ConfigSource::text(text).named(NAME).plan().map_err(|error| format!("{NAME}: {error}"))?;
    plan.sharding = sharding.into_sharding(mesh);
    if is_demo {
        plan.data = Data::Demo;
    }
    if let Some(name) = name.as_ref().and_then(Value::as_str) {
        name.clone_into(&mut plan.model.name);
    }
    Ok(plan)
}

/// Removes what is not a key of the configuration, and values that are `null`. A later version may have written both.
fn keep_keys(config: &mut Value) {
    let declared: Vec<String> = keys().iter().map(Key::path).collect();
    let is_key = |path: &str| {
        let begins = |key: &String| {
            key.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        declared.iter().any(begins)
    };
    let Value::Object(tables) = config else { return };
    tables.retain(|table, entries| entries.is_object() && is_key(table));
    for (table, entries) in tables {
        let Value::Object(entries) = entries else { continue };
        entries.retain(|key, value| !value.is_null() && is_key(&format!("{table}.{key}")));
    }
}

/// Takes the value of a path out, and the table that it leaves empty.
fn take(value: &mut Value, path: &str) -> Option<Value> {
    let table = value.as_object_mut()?;
    let Some((first, rest)) = path.split_once('.') else { return table.remove(path) };
    let inner = table.get_mut(first)?;
    let taken = take(inner, rest);
    if inner.as_object().is_some_and(Map::is_empty) {
        table.remove(first);
    }
    taken
}

/// Puts a value at a path, and makes the tables on the way.
fn put(value: &mut Value, path: &str, new: Value) {
    let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
    match rest {
        Some(rest) if value[first].is_object() => put(&mut value[first], rest, new),
        Some(rest) => {
            value[first] = json!({});
            put(&mut value[first], rest, new);
        }
        None => value[first] = new,
    }
}

#[derive(Serialize, Deserialize)]
struct ShardingRecord {
    weights: usize,
    gradients: usize,
    states: usize,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    secondary: usize,
    #[serde(default, skip_serializing_if = "is_all")]
    secondary_use: SecondaryUse,
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
        let Sharding {
            weights, gradients, states, secondary, secondary_use, gather, reduce, quantized, ..
        } = plan.sharding;
        let parts: Vec<Part> = plan.sharding.parts().filter(|part| part.span != Span::All).collect();
        ShardingRecord {
            weights,
            gradients,
            states,
            secondary,
            secondary_use,
            gather,
            reduce,
            quantized,
            parts,
        }
    }

    /// Checks the mesh and its sharding. Sharding has ranks here, and levels of a cluster in a configuration.
    fn check(&self, mesh: Mesh) -> Result<(), String> {
        let sizes = Axis::ALL.map(|axis| mesh.size(axis));
        let ranks = sizes.into_iter().try_fold(1_usize, usize::checked_mul);
        if !ranks.is_some_and(|ranks| (1..=MAX_RANKS).contains(&ranks)) {
            let product = sizes.map(|size| size.to_string()).join(" · ");
            return Err(format!("{NAME} has a mesh of {product} ranks, which is not from 1 to {MAX_RANKS}"));
        }
        let replicas = mesh.replicas();
        let ShardingRecord { weights, gradients, states, secondary, quantized, parts, .. } = self;
        let divides = |size: &usize| *size > 0 && replicas.is_multiple_of(*size);
        let of_parts = parts.iter().try_fold(1_usize, |product, part| product.checked_mul(part.ranks));
        if ![*weights, *gradients, *states, *secondary].iter().all(divides)
            || parts.len() > MAX_PARTS
            || !(parts.is_empty() || of_parts == Some(replicas))
        {
            return Err(format!("{NAME} has a sharding that does not divide its {replicas} replicas"));
        }
        match quantized.iter().find(|codes| !codes.block.is_power_of_two() || codes.block > MAX_BLOCK) {
            Some(codes) => Err(format!("{NAME} has quantised blocks of {} numbers", codes.block)),
            None => Ok(()),
        }
    }

    fn into_sharding(self, mesh: Mesh) -> Sharding {
        let ShardingRecord {
            weights,
            gradients,
            states,
            secondary,
            secondary_use,
            gather,
            reduce,
            quantized,
            mut parts,
        } = self;
        if parts.is_empty() && mesh.replicas() > 1 {
            parts.push(Part { span: Span::All, ranks: mesh.replicas() });
        }
        let mut parts = parts.into_iter();
        let parts = std::array::from_fn(|_| parts.next());
        let multiple = Sharding::multiple_for(quantized);
        Sharding {
            weights,
            gradients,
            states,
            secondary,
            secondary_use,
            gather,
            reduce,
            quantized,
            multiple,
            parts,
        }
    }
}

fn one() -> usize {
    1
}

fn is_exact(quantized: &Quantized) -> bool {
    *quantized == Quantized::NONE
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_all(secondary_use: &SecondaryUse) -> bool {
    *secondary_use == SecondaryUse::All
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(number: &usize) -> bool {
    *number == 1
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::{
        AttentionKind, Compute, DeviceKind, GradientType, RateSchedule, Recompute, ScheduleKind, Transport,
    };
    use kintsugi_spec::{Activation, Family};

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

    /// Whether everything in `part` is in `whole`, which may have more keys.
    fn has(whole: &Value, part: &Value) -> bool {
        match (whole, part) {
            (Value::Object(whole), Value::Object(part)) => {
                part.iter().all(|(key, part)| whole.get(key).is_some_and(|whole| has(whole, part)))
            }
            _ => whole == part,
        }
    }

    #[test]
    fn the_format_stays() {
        let plan = read(FORMAT).expect("a plan");
        let written = serialize(&plan, serde_json::value::Serializer).expect("JSON");
        let format = serde_json::from_str(FORMAT).expect("JSON");
        assert!(has(&written, &format), "{written:#}");
        assert_eq!(written["sharding"], format["sharding"]);
    }

    #[test]
    fn what_a_later_version_adds_is_left_out() {
        let later = FORMAT
            .replace("\"min_lr\"", "\"later\": 1, \"min_lr\"")
            .replace("\"init\"", "\"later\": {}, \"init\"");
        assert_eq!(read(&later).expect("a plan"), read(FORMAT).expect("a plan"));
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
        check::<Family>(&[
            "gpt",
            "neox",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "smollm3",
            "phi3",
            "starcoder2",
        ]);
        check::<Activation>(&["gelu", "gelu-exact", "swiglu"]);
        check::<ScheduleKind>(&["gpipe", "1f1b", "interleaved", "zero-bubble"]);
        check::<When>(&["micro-batch", "step"]);
        check::<Compute>(&["fp32", "bf16", "fp16"]);
        check::<GradientType>(&["fp32", "compute"]);
        check::<Recompute>(&["none", "selective", "full"]);
        check::<AttentionKind>(&["flash", "plain"]);
        check::<RateSchedule>(&["cosine", "constant", "linear", "inverse-sqrt", "wsd", "sqrt", "wsd-sqrt"]);
        check::<DeviceKind>(&["cpu", "cuda", "hip"]);
        check::<Transport>(&["auto", "threads", "mpi", "nccl"]);
        let loss_scale = |text: &str| read(text).expect("a plan").precision.loss_scale;
        assert_eq!(loss_scale(FORMAT), LossScale::Fixed(1024.0));
        assert_eq!(loss_scale(&FORMAT.replace("{ \"fixed\": 1024.0 }", "\"dynamic\"")), LossScale::Dynamic);
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
    fn a_name_need_not_be_that_of_a_preset() {
        let plan = read(&FORMAT.replace("\"custom\"", "\"of-old\"")).expect("a plan");
        assert_eq!(plan.model.name, "of-old");
        let plan = ConfigSource::demo().set("model.name=my model").plan().expect("a legal config");
        let written = serialize(&plan, serde_json::value::Serializer).expect("JSON").to_string();
        assert_eq!(read(&written).expect("a plan"), plan);
    }
}

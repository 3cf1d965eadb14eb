//! Resolves TOML text into a checked [`Plan`].
//!
//! A [`ConfigSource`] holds the user's settings. Later settings override earlier ones: defaults, the presets of
//! `model.preset` and `cluster.preset`, the file, `--set`. Every error is one sentence with the field, its value and
//! what is allowed.

mod chosen;
mod cluster;
mod declare;
mod demo;
mod deserialize;
pub(crate) mod error;
mod framework;
mod init;
mod key_list;
pub(crate) mod keys;
mod layers;
mod mesh;
mod model;
mod quantized;
mod resolved;
mod sharding;
mod source;
mod strategy;
mod unavailable;
pub(crate) mod words;
mod write;

pub use error::ConfigError;
pub use key_list::{Key, keys};
pub use resolved::ResolvedValue;
pub use source::{ConfigSource, ProfilePlace, VocabSource};
pub use strategy::{LayerSplit, ShardingChoice, Strategy};

use crate::context;
use crate::data::resolve as data;
use crate::{
    Batch, FrozenUnits, MemoryOptions, Mesh, Optimizer, Pipeline, Plan, Precision, Run, optimizer,
    replication,
};
use error::invalid;
use keys::{RawParallel, RawSharding};
use layers::Layers;
use words::Replicas;

/// The base of a search: the plan on a single rank, and the number of ranks of the strategies. Its sharding has the codes that the
/// configuration asks for, and nothing else of `[sharding]`, which a strategy decides.
fn search_base(mut layers: Layers) -> Result<(Plan, usize), ConfigError> {
    let (cluster, asked) = (cluster::resolve(&layers)?, layers.given.cluster.nodes);
    check_searched(&layers.given.sharding)?;
    let raw = &mut layers.merged;
    let codes = quantized::requested(&raw.sharding)?;
    let ranks = match (asked, cluster.topology.per_node) {
        (Some(nodes), Some(per_node)) => nodes * per_node,
        _ => mesh::resolve(&raw.parallel, &cluster, None)?.ranks(),
    };
    if raw.batch.global.is_none() {
        let hint = "give the samples of one step: strategies are compared at the same batch".to_owned();
        return Err(ConfigError::Missing { field: "batch.global", hint });
    }
    raw.batch.micro = Some(1);
    raw.parallel = RawParallel {
        tp: None,
        cp: None,
        pp: None,
        dp: Some(Replicas::Count(1)),
        schedule: None,
        virtual_stages: None,
        layers_per_stage: None,
        sequence_parallel: None,
        ..raw.parallel.clone()
    };
    raw.sharding = RawSharding::default();
    // One rank has no neighbour node.
    let replicate_every = std::mem::take(&mut raw.run.replicate_every);
    let mut base = plan(&layers)?;
    base.sharding.quantized = codes;
    base.run.replicate_every = replicate_every.unwrap_or(0);
    Ok((base, ranks))
}

/// A search decides `[sharding]`. Keys that no strategy has would be lost, so they are refused.
fn check_searched(given: &RawSharding) -> Result<(), ConfigError> {
    let given = toml::Table::try_from(given).expect("a table of numbers and words");
    for key in ["collectives", "secondary_use", "quantize_refresh"] {
        if let Some(value) = given.get(key).and_then(toml::Value::as_str) {
            let rule = "is not searched over, and a search decides [sharding]: remove the key";
            return Err(invalid(&format!("sharding.{key}"), value, rule));
        }
    }
    Ok(())
}

fn plan(layers: &Layers) -> Result<Plan, ConfigError> {
    let raw = &layers.merged;
    let cluster = cluster::resolve(layers)?;
    let mesh = mesh::resolve(&raw.parallel, &cluster, layers.given.cluster.nodes)?;
    // A missing model is reported first, and a missing sequence right after it.
    let model = model::resolve(&raw.model, raw.batch.sequence.unwrap_or_default())?;
    let batch = Batch::resolve(&raw.batch, mesh.dp())?;
    model::check_split(&model, mesh.tp())?;
    let memory = MemoryOptions::resolve(&raw.memory)?;
    context::check(&model, mesh, raw.parallel.cp_attention(), batch, memory)?;
    let framework = framework::resolve(&raw.framework)?;
    let precision = Precision::resolve(&raw.precision)?;
    let run = Run::resolve(&raw.run, batch, cluster.device.kind)?;
    let overlap_tp = raw.parallel.overlap_tp();
    precision.check_products(&model, mesh, batch, overlap_tp && mesh.tp() > 1, run.device)?;
    let mut plan = Plan {
        pipeline: Pipeline::resolve(&raw.parallel, mesh, model.layers, batch)?,
        cp_attention: raw.parallel.cp_attention(),
        sequence_parallel: sequence_parallel(&raw.parallel, mesh, batch)?,
        overlap_tp,
        sharding: sharding::resolve(&raw.sharding, mesh, &cluster, &framework)?,
        precision,
        memory,
        optimizer: Optimizer::resolve(&raw.optimizer)?,
        frozen: FrozenUnits::default(),
        data: data(&raw.data, model.vocab)?,
        run,
        framework,
        init: raw.model.init.as_ref().map(Into::into),
        model,
        batch,
        mesh,
        cluster,
    };
    optimizer::check_names(&plan)?;
    plan.frozen = FrozenUnits::resolve(&plan.optimizer, &plan)?;
    replication::check(&plan)?;
    Ok(plan)
}

fn sequence_parallel(raw: &RawParallel, mesh: Mesh, batch: Batch) -> Result<bool, ConfigError> {
    let (tp, cp) = (mesh.tp(), mesh.cp());
    let wanted = raw.sequence_parallel() && tp > 1;
    let rows = batch.micro * batch.sequence / cp;
    if wanted && !rows.is_multiple_of(tp) {
        if cp > 1 {
            let rule = format!(
                "needs batch.micro · batch.sequence / parallel.cp = {} · {} / {cp} to be a multiple of parallel.tp = {tp}",
                batch.micro, batch.sequence
            );
            return Err(invalid("parallel.sequence_parallel", true, rule));
        }
        let rule = format!(
            "needs batch.micro · batch.sequence = {} · {} to be a multiple of parallel.tp = {tp}",
            batch.micro, batch.sequence
        );
        return Err(invalid("parallel.sequence_parallel", true, rule));
    }
    Ok(wanted)
}

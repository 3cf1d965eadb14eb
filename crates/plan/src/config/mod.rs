//! Resolves TOML text into a checked [`Plan`].
//!
//! A [`ConfigSource`] holds the user's settings. Later settings override earlier ones: defaults, the presets of
//! `model.preset` and `cluster.preset`, the file, `--set`. Every error is one sentence with the field, its value and
//! what is allowed.

mod chosen;
mod cluster;
mod data;
mod demo;
mod deserialize;
mod error;
mod framework;
mod init;
mod keys;
mod layers;
mod mesh;
mod model;
mod pipeline;
mod quantized;
mod raw;
mod resolved;
mod sharding;
mod source;
mod strategy;
mod training;
mod unavailable;
mod words;
mod write;

pub use data::DEMO_VOCAB;
pub use error::ConfigError;
pub use keys::{Key, keys};
pub use resolved::ResolvedValue;
pub use source::{ConfigSource, ProfilePlace, VocabSource};
pub use strategy::{ShardingChoice, Strategy};

use crate::{Batch, Plan};
use error::{ConfigError as Error, invalid, within};
use layers::Layers;
use raw::{RawBatch, RawParallel, RawSharding};
use words::Replicas;

/// The base of a search: the plan on a single rank, and the number of ranks of the strategies.
fn search_base(mut layers: Layers) -> Result<(Plan, usize), ConfigError> {
    let (cluster, asked) = (cluster::resolve(&layers)?, layers.given.cluster.nodes);
    let raw = &mut layers.merged;
    let ranks = match (asked, cluster.topology.per_node) {
        (Some(nodes), Some(per_node)) => nodes * per_node,
        _ => mesh::resolve(&raw.parallel, &cluster, None)?.ranks(),
    };
    if raw.batch.global.is_none() {
        let hint = "give the samples of one step: strategies are compared at the same batch".to_owned();
        return Err(Error::Missing { field: "batch.global", hint });
    }
    raw.batch.micro = Some(1);
    raw.parallel = RawParallel {
        dp: Some(Replicas::Count(1)),
        prefetch: raw.parallel.prefetch,
        overlap: raw.parallel.overlap,
        overlap_tp: raw.parallel.overlap_tp,
        ..RawParallel::default()
    };
    raw.sharding = RawSharding::default();
    Ok((plan(&layers)?, ranks))
}

fn plan(layers: &Layers) -> Result<Plan, ConfigError> {
    let raw = &layers.merged;
    let cluster = cluster::resolve(layers)?;
    let mesh = mesh::resolve(&raw.parallel, &cluster, layers.given.cluster.nodes)?;
    // A missing model is reported first, and a missing sequence right after it.
    let model = model::resolve(&raw.model, raw.batch.sequence.unwrap_or_default())?;
    let batch = batch(&raw.batch, mesh.dp())?;
    model::check_split(&model, mesh.tp())?;
    let framework = framework::resolve(&raw.framework)?;
    Ok(Plan {
        pipeline: pipeline::resolve(&raw.parallel, mesh, model.layers, batch)?,
        sequence_parallel: sequence_parallel(&raw.parallel, mesh.tp(), batch)?,
        overlap_tp: raw.parallel.overlap_tp.unwrap_or(false),
        sharding: sharding::resolve(&raw.sharding, mesh, &cluster, &framework)?,
        precision: training::precision(&raw.precision)?,
        memory: training::memory(&raw.memory),
        optimizer: training::optimizer(&raw.optimizer)?,
        data: data::resolve(&raw.data, model.vocab)?,
        run: training::run(&raw.run, cluster.device.kind)?,
        framework,
        init: raw.model.init.as_ref().map(Into::into),
        model,
        batch,
        mesh,
        cluster,
    })
}

fn batch(raw: &RawBatch, dp: usize) -> Result<Batch, Error> {
    let sequence = raw.sequence.ok_or_else(|| Error::Missing {
        field: "batch.sequence",
        hint: "give the tokens of one sample, or a model.preset".to_owned(),
    })?;
    let sequence = within("batch.sequence", sequence, 1..=1 << 20)?;
    let micro = within("batch.micro", raw.micro.unwrap_or(1), 1..=1 << 20)?;
    within("batch.micro · batch.sequence", micro * sequence, 1..=1 << 26)?;
    let per_pass = micro * dp;
    let global = within("batch.global", raw.global.unwrap_or(per_pass), 1..=1 << 32)?;
    if !global.is_multiple_of(per_pass) {
        let below = global - global % per_pass;
        let nearest =
            if below == 0 { per_pass.to_string() } else { format!("{below} or {}", below + per_pass) };
        let rule = format!("is not a multiple of batch.micro · dp = {micro} · {dp}; use {nearest}");
        return Err(invalid("batch.global", global, rule));
    }
    within("batch.global / (batch.micro · dp)", global / per_pass, 1..=1 << 20)?;
    Ok(Batch { sequence, micro, global })
}

fn sequence_parallel(raw: &RawParallel, tp: usize, batch: Batch) -> Result<bool, Error> {
    let wanted = raw.sequence_parallel.unwrap_or(false) && tp > 1;
    let rows = batch.micro * batch.sequence;
    if wanted && !rows.is_multiple_of(tp) {
        let rule = format!(
            "needs batch.micro · batch.sequence = {} · {} to be a multiple of parallel.tp = {tp}",
            batch.micro, batch.sequence
        );
        return Err(invalid("parallel.sequence_parallel", true, rule));
    }
    Ok(wanted)
}

//! The pipeline of a configuration: the schedule, and which layers each chunk holds.

use super::error::{ConfigError, invalid, within};
use super::raw::RawParallel;
use crate::{Batch, Mesh, Pipeline, ScheduleKind};

/// The pipeline of a model with `layers` layers.
pub(super) fn resolve(
    raw: &RawParallel,
    mesh: Mesh,
    layers: usize,
    batch: Batch,
) -> Result<Pipeline, ConfigError> {
    let schedule = raw.schedule.unwrap_or(ScheduleKind::OneForwardOneBackward);
    let virtual_stages = virtual_stages(raw, schedule, mesh, batch)?;
    let pipeline = Pipeline {
        schedule,
        virtual_stages,
        layers: chunks(raw, mesh.pp(), virtual_stages, layers)?,
        prefetch: within("parallel.prefetch", raw.prefetch.unwrap_or(1), 0..=1 << 14)?,
        overlap: raw.overlap.unwrap_or(true),
    };
    check_length(&pipeline, mesh, batch)?;
    Ok(pipeline)
}

fn virtual_stages(
    raw: &RawParallel,
    schedule: ScheduleKind,
    mesh: Mesh,
    batch: Batch,
) -> Result<usize, ConfigError> {
    if schedule != ScheduleKind::Interleaved {
        let stages = raw.virtual_stages.unwrap_or(1);
        let rule = "needs parallel.schedule = \"interleaved\"; the other schedules have 1";
        return if stages == 1 { Ok(1) } else { Err(invalid("parallel.virtual_stages", stages, rule)) };
    }
    let refuse = |rule: String| Err(invalid("parallel.schedule", "\"interleaved\"", rule));
    let pp = mesh.pp();
    let micro_batches = batch.global / (batch.micro * mesh.dp());
    let stages = raw.virtual_stages.unwrap_or(2);
    if pp < 2 {
        return refuse(format!("needs at least 2 stages, and parallel.pp = {pp}"));
    }
    if stages < 2 {
        return refuse(format!("needs at least 2 chunks per stage, and parallel.virtual_stages = {stages}"));
    }
    if !micro_batches.is_multiple_of(pp) {
        return refuse(format!(
            "needs a multiple of parallel.pp = {pp} micro-batches; batch.global / (batch.micro · dp) = {micro_batches}"
        ));
    }
    within("parallel.virtual_stages", stages, 2..=1 << 14)
}

/// The most ops, over all stages, that a prediction may generate at once: about a gigabyte and ten seconds.
const MAX_OPS: usize = 1 << 24;

/// Refuses a pipeline whose prediction would take too long.
fn check_length(pipeline: &Pipeline, mesh: Mesh, batch: Batch) -> Result<(), ConfigError> {
    let micro_batches = batch.global / (batch.micro * mesh.dp());
    let ops = pipeline.laid_out_ops(micro_batches);
    if ops <= MAX_OPS {
        return Ok(());
    }
    let rule = format!(
        "needs {ops} ops to be laid out, more than the {MAX_OPS} that a prediction may take; use fewer stages, or \
         fewer micro-batches by a larger batch.micro or a smaller batch.global"
    );
    Err(invalid("parallel.pp · micro-batches", format!("{} · {micro_batches}", mesh.pp()), rule))
}

/// The layers of every chunk: as given, or as even as possible, with one more in the first chunks.
fn chunks(
    raw: &RawParallel,
    pp: usize,
    virtual_stages: usize,
    layers: usize,
) -> Result<Vec<usize>, ConfigError> {
    let count = pp * virtual_stages;
    if count > layers {
        let (field, part) = match virtual_stages {
            1 => ("parallel.pp", "stage"),
            _ => ("parallel.pp · virtual_stages", "chunk"),
        };
        let rule = format!("is more than model.layers = {layers}; each {part} needs a layer");
        return Err(invalid(field, count, rule));
    }
    let Some(given) = &raw.layers_per_stage else {
        return Ok((0..count).map(|chunk| layers / count + usize::from(chunk < layers % count)).collect());
    };
    let refuse = |rule| Err(invalid("parallel.layers_per_stage", format!("{given:?}"), rule));
    if given.len() != count {
        return refuse(format!(
            "has {} entries; it needs one for each of the pp · virtual_stages = {count} chunks",
            given.len()
        ));
    }
    if given.contains(&0) {
        return refuse("has a chunk without layers; each needs at least 1".to_owned());
    }
    let sum: u128 = given.iter().map(|&n| n as u128).sum();
    if sum != layers as u128 {
        return refuse(format!("adds up to {sum}, not to model.layers = {layers}"));
    }
    Ok(given.clone())
}

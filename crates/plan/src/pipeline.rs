//! The pipeline: the schedule, and which layers each chunk holds.

use serde::{Deserialize, Serialize};

use crate::config::ConfigError;
use crate::config::error::{invalid, within};
use crate::config::keys::RawParallel;
use crate::{Batch, Mesh};

/// How layers are divided into stages and chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pipeline {
    /// The schedule.
    pub schedule: ScheduleKind,
    /// Chunks per stage.
    pub virtual_stages: usize,
    /// Layers of every chunk, in model order. Chunk `c` is on stage `c mod pp`.
    pub layers: Vec<usize>,
    /// Prefetch depth: how many blocks ahead weights are gathered.
    pub prefetch: usize,
    /// Whether transfers overlap with computation.
    pub overlap: bool,
}

impl Pipeline {
    /// What the keys of `[parallel]` say of the pipeline of a model with `layers` layers.
    pub(crate) fn resolve(
        raw: &RawParallel,
        mesh: Mesh,
        layers: usize,
        batch: Batch,
    ) -> Result<Self, ConfigError> {
        let schedule = raw.schedule();
        let virtual_stages = virtual_stages(raw, schedule, mesh, batch)?;
        let pipeline = Pipeline {
            schedule,
            virtual_stages,
            layers: chunks(raw, mesh.pp(), virtual_stages, layers)?,
            prefetch: raw.prefetch()?,
            overlap: raw.overlap(),
        };
        check_length(&pipeline, mesh, batch)?;
        Ok(pipeline)
    }

    /// About how many ops, over all stages, a prediction has to generate. It generates enough micro-batches to fill and
    /// drain the pipeline, or all of them if there are fewer. GPipe needs all.
    pub fn laid_out_ops(&self, micro_batches: usize) -> usize {
        let (chunks, layers) = (self.layers.len(), self.layers.iter().sum::<usize>());
        let laid_out = match self.schedule {
            ScheduleKind::GPipe => micro_batches,
            _ => micro_batches.min(2 * chunks + 2 * chunks / self.virtual_stages),
        };
        // A layer has a forward and a backward. A chunk sends and receives an activation and a gradient, with a start and a
        // wait each.
        laid_out * (2 * layers + 8 * chunks)
    }
}

/// Pipeline schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (arXiv 1811.06965).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward (arXiv 2104.04473).
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B over several chunks per stage (arXiv 2104.04473).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// ZB-H1: the backward is split, and weight parts fill the bubble (arXiv 2401.10241).
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
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

//! A strategy: everything that a search may choose for a given model, batch and cluster.
//!
//! A search evaluates thousands of strategies. They pass the checks of a configuration, without its text.

use kintsugi_spec::Level;

use super::error::ConfigError;
use super::keys::{RawBatch, RawParallel, RawSharding};
use super::words::{Replicas, ShardLevel};
use super::{mesh, model, quantized, sequence_parallel, sharding, write};
use crate::context;
use crate::{Batch, MemoryOptions, Mesh, Pipeline, Plan, Quantized, Recompute, ScheduleKind, Sharding, When};

/// The keys of `[parallel]` that a strategy decides.
pub(super) const DECIDED: [&str; 8] =
    ["tp", "cp", "pp", "dp", "schedule", "virtual_stages", "layers_per_stage", "sequence_parallel"];

/// How a model is run: one point of the search space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strategy {
    /// The grid of ranks.
    pub mesh: Mesh,
    /// Samples per micro-batch.
    pub micro: usize,
    /// The schedule.
    pub schedule: ScheduleKind,
    /// Chunks per stage.
    pub virtual_stages: usize,
    /// How the layers are divided into chunks.
    pub split: LayerSplit,
    /// Whether rows are split over tp between the tensor-parallel regions.
    pub sequence_parallel: bool,
    /// What is sharded.
    pub sharding: ShardingChoice,
    /// Recomputation.
    pub recompute: Recompute,
}

/// How the layers of a model are divided into the chunks of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerSplit {
    /// As evenly as possible. If the layers do not divide, the first chunks have one more.
    Even,
    /// As evenly as possible. If the layers do not divide, the last chunk has one less, then the first, the second and so
    /// on: the last has the head, and the first has the embedding and starts the pipeline.
    LighterEnds,
    /// The last chunk, which has the head, has so many; the others share the rest evenly.
    Last(usize),
}

impl LayerSplit {
    /// The layers of every chunk; `None` if the default is meant. An invalid split is left to the configuration's checks.
    pub fn layers(self, layers: usize, chunks: usize) -> Option<Vec<usize>> {
        match self {
            LayerSplit::Even => None,
            LayerSplit::LighterEnds => {
                let most = layers.div_ceil(chunks);
                let missing = chunks * most - layers;
                let is_lighter = |chunk: usize| chunk + 1 < missing || (missing > 0 && chunk + 1 == chunks);
                Some((0..chunks).map(|chunk| most - usize::from(is_lighter(chunk))).collect())
            }
            LayerSplit::Last(last) => {
                let (others, rest) = (chunks - 1, layers.saturating_sub(last));
                let share = |chunk: usize| rest / others + usize::from(chunk < rest % others);
                Some((0..others).map(share).chain([last]).collect())
            }
        }
    }
}

/// The levels over which weights, gradients and states are sharded (`None` for no sharding), and when they are gathered
/// and reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardingChoice {
    /// The level of the weights.
    pub weights: Option<Level>,
    /// The level of the gradients.
    pub gradients: Option<Level>,
    /// The level of the states.
    pub states: Option<Level>,
    /// The level of a secondary shard of the weights.
    pub secondary: Option<Level>,
    /// When sharded weights are gathered.
    pub gather: When,
    /// When gradients are reduced.
    pub reduce: When,
    /// The transfers that carry codes, if the sharding has them. All have the same block.
    pub quantized: Quantized,
}

impl ShardingChoice {
    /// Each rank holds everything.
    pub const NONE: ShardingChoice = ShardingChoice {
        weights: None,
        gradients: None,
        states: None,
        secondary: None,
        gather: When::MicroBatch,
        reduce: When::Step,
        quantized: Quantized::NONE,
    };
}

impl Plan {
    /// This plan with another strategy, or the reason why it is not allowed. Model, global batch, precision, cluster
    /// and everything else that a strategy does not decide stay the same.
    pub fn with_strategy(&self, strategy: &Strategy) -> Result<Plan, ConfigError> {
        let (layers, chunks) = (self.model.layers, strategy.mesh.pp() * strategy.virtual_stages);
        let parallel = RawParallel {
            tp: Some(strategy.mesh.tp()),
            cp: Some(strategy.mesh.cp()),
            pp: Some(strategy.mesh.pp()),
            dp: Some(Replicas::Count(strategy.mesh.dp())),
            schedule: Some(strategy.schedule),
            virtual_stages: Some(strategy.virtual_stages),
            layers_per_stage: strategy.split.layers(layers, chunks),
            sequence_parallel: Some(strategy.sequence_parallel),
            ..write::parallel(self)
        };
        let raw_batch = RawBatch {
            sequence: Some(self.batch.sequence),
            micro: Some(strategy.micro),
            global: Some(self.batch.global),
        };
        let mesh = mesh::resolve(&parallel, &self.cluster, None)?;
        let batch = Batch::resolve(&raw_batch, mesh.dp())?;
        model::check_split(&self.model, mesh.tp())?;
        context::check(&self.model, mesh, self.cp_attention, batch, self.memory)?;
        Ok(Plan {
            pipeline: Pipeline::resolve(&parallel, mesh, self.model.layers, batch)?,
            sequence_parallel: sequence_parallel(&parallel, mesh, batch)?,
            sharding: self.resolve_sharding(mesh, strategy.sharding)?,
            memory: MemoryOptions { recompute: strategy.recompute, ..self.memory },
            batch,
            mesh,
            ..self.clone()
        })
    }

    /// The sharding of a choice on a mesh of this plan's cluster, or the reason why it is not allowed.
    pub fn resolve_sharding(&self, mesh: Mesh, choice: ShardingChoice) -> Result<Sharding, ConfigError> {
        let level = |level: Option<Level>| Some(level.map_or(ShardLevel::None, ShardLevel::from));
        let raw = RawSharding {
            weights: level(choice.weights),
            gradients: level(choice.gradients),
            states: level(choice.states),
            secondary: level(choice.secondary),
            gather: Some(choice.gather),
            reduce: Some(choice.reduce),
            ..quantized::keys(choice.quantized)
        };
        sharding::resolve(&raw, mesh, &self.cluster, &self.framework)
    }
}

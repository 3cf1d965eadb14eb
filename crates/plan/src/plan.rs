//! The plan: a checked and resolved configuration. Later stages read only the plan, not the configuration.

use std::path::PathBuf;

use kintsugi_spec::{ClusterSpec, FrameworkSpec, ModelSpec};
use serde::{Deserialize, Serialize};

use crate::{Axis, Block, Group, Mesh, Phase, PhaseKind, Run, Sharding, Unit};

/// A validated training plan: model, batch, mesh, placement, schedule and precision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The model.
    pub model: ModelSpec,
    /// The folder of initial weights. Without one they are random.
    pub init: Option<PathBuf>,
    /// Batch sizes.
    pub batch: Batch,
    /// The grid of ranks.
    pub mesh: Mesh,
    /// How layers are divided into stages, and the schedule.
    pub pipeline: Pipeline,
    /// Whether rows between tensor-parallel regions are split over tp (arXiv 2205.05198).
    pub sequence_parallel: bool,
    /// Whether tensor-parallel products are cut into chunks of rows, whose transfers run beside the next chunk's product.
    pub overlap_tp: bool,
    /// How weights, gradients and states are sharded over dp.
    pub sharding: Sharding,
    /// Element types.
    pub precision: Precision,
    /// Which activations are saved and which are recomputed.
    pub memory: MemoryOptions,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The data.
    pub data: Data,
    /// The machine.
    pub cluster: ClusterSpec,
    /// The framework that runs the plan, and its overheads.
    pub framework: FrameworkSpec,
    /// The run.
    pub run: Run,
}

/// The reductions of a unit's gradient, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientReductions {
    /// Over tp, under sequence parallelism.
    pub tensor: Option<Phase>,
    /// Over dp to the gradient's shard, for every micro-batch or once a step.
    pub inner: Vec<Phase>,
    /// Over the rest of dp, once a step.
    pub outer: Vec<Phase>,
    /// Between the copies of a tied table, at the end of the step.
    pub tied: Option<Phase>,
}

impl GradientReductions {
    /// The first reduction, if there is any.
    pub fn first(&self) -> Option<Phase> {
        let data = self.inner.first().or(self.outer.first()).copied();
        self.tensor.or(data).or(self.tied)
    }
}

/// Batch sizes, in samples and tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Batch {
    /// Tokens per sample.
    pub sequence: usize,
    /// Samples per micro-batch.
    pub micro: usize,
    /// Samples per step over all replicas.
    pub global: usize,
}

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

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Precision {
    /// Type of weights and activations.
    pub compute: Compute,
    /// Type of gradients.
    pub gradients: GradientType,
    /// Type of the optimizer's moments: fp32 or bf16.
    pub states: Compute,
    /// Loss scaling (fp16).
    pub loss_scale: LossScale,
}

/// A floating-point type of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// 32 bits.
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    Fp16,
}

impl Compute {
    /// Whether a number is finite after rounding to this type.
    pub fn holds(self, number: f32) -> bool {
        // The smallest magnitude that rounds to infinity. The comparison is false for NaN.
        let limit = match self {
            Compute::Fp32 => f32::INFINITY,
            Compute::Bf16 => f32::from_bits(0x7F7F_8000),
            Compute::Fp16 => 65520.0,
        };
        number.abs() < limit
    }
}

/// The type in which gradients are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientType {
    /// 32 bits.
    Fp32,
    /// The compute type.
    Compute,
}

/// The factor that keeps fp16 gradients from vanishing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// Halved on overflow, doubled after many steps without one.
    Dynamic,
    /// Constant.
    Fixed(f64),
}

/// What is saved for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryOptions {
    /// Recomputation.
    pub recompute: Recompute,
    /// Attention.
    pub attention: AttentionKind,
}

/// Activation recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Save everything.
    None,
    /// Save the results of matrix products and attention; recompute norms and activation functions.
    Selective,
    /// Save only each layer's input.
    Full,
}

/// Attention algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKind {
    /// Tiled; saves only the log-sum-exp (arXiv 2205.14135).
    Flash,
    /// Saves the probabilities.
    Plain,
}

/// `AdamW` and its learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Optimizer {
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the end.
    pub min_lr: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Schedule after the warm-up.
    pub schedule: RateSchedule,
    /// Steps of the decay, where they were given; see [`Optimizer::decay`].
    pub decay_steps: Option<u64>,
    /// β₁, β₂.
    pub betas: (f64, f64),
    /// ε.
    pub eps: f64,
    /// Weight decay, not applied to norms and biases.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 for none.
    pub clip: f64,
}

/// The learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateSchedule {
    /// Cosine from `lr` to `min_lr`.
    Cosine,
    /// `lr` throughout.
    Constant,
    /// A straight line from `lr` to `min_lr`.
    Linear,
    /// `lr` · √(`warmup` / step), at least `min_lr` (arXiv 1706.03762).
    InverseSqrt,
    /// `lr`, then a straight line to `min_lr` over the last steps (warmup, stable, decay: arXiv 2404.06395).
    Wsd,
}

/// When the learning rate falls from `lr` to `min_lr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateDecay {
    /// The last step that has `lr`, from 0.
    pub start: u64,
    /// Steps from there to the first one that has `min_lr`; at least 1.
    pub steps: u64,
}

impl Optimizer {
    /// The decay in a run of `steps` steps. Without `decay_steps` the last step of the run has `min_lr`, and the decay
    /// starts with the warm-up's end, or for [`RateSchedule::Wsd`] a tenth of the run before its end.
    pub fn decay(&self, steps: u64) -> RateDecay {
        let first_at_peak = self.warmup.saturating_sub(1);
        let left = steps.saturating_sub(first_at_peak + 1).max(1);
        match self.schedule {
            RateSchedule::Wsd => {
                let decay = self.decay_steps.unwrap_or(steps.div_ceil(10)).clamp(1, left);
                RateDecay { start: first_at_peak + left - decay, steps: decay }
            }
            _ => RateDecay { start: first_at_peak, steps: self.decay_steps.unwrap_or(left) },
        }
    }
}

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Data {
    /// The built-in generated corpus.
    Demo,
    /// Token files.
    Tokens(TokenData),
}

/// A blend of token files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenData {
    /// The files.
    pub sources: Vec<DataSource>,
    /// The tokenizer of the files, if it is configured: a file, a folder or `bytes`.
    pub tokenizer: Option<String>,
    /// Whether the tokenizers of the files, of `tokenizer` and of the weights may differ.
    pub allow_other_tokenizer: bool,
    /// The token that ends a document, if it is known.
    pub end_of_document: Option<u32>,
    /// Files for validation only. If there are none, a share of every source is used.
    pub validation: Vec<DataSource>,
    /// The share of the tokens, at the end of every source, that is reserved for validation. `None`: the documents that
    /// `prepare` has drawn for it, or a default share if it has drawn none.
    pub split: Option<f64>,
    /// Whether a token attends only to tokens of its own document.
    pub mask_documents: bool,
}

/// Token files and their weight in the blend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataSource {
    /// The prefix of the `.bin` and the `.idx`.
    pub path: PathBuf,
    /// The weight among all sources.
    pub weight: f64,
}

impl Plan {
    /// Micro-batches that each replica runs per step.
    pub fn micro_batches(&self) -> usize {
        self.batch.global / (self.batch.micro * self.mesh.dp())
    }

    /// The layers of every stage.
    pub fn stage_layers(&self) -> Vec<usize> {
        let mut layers = vec![0; self.mesh.pp()];
        for (chunk, count) in self.pipeline.layers.iter().enumerate() {
            layers[self.stage_of_chunk(chunk)] += count;
        }
        layers
    }

    /// The layers of the last chunk, which has the head.
    pub fn last_layers(&self) -> usize {
        self.pipeline.layers.last().copied().unwrap_or(0)
    }

    /// The period of the schedule's steady state, in micro-batches.
    pub fn period(&self) -> usize {
        // The interleaved schedule processes micro-batches in groups of pp.
        if self.pipeline.schedule == ScheduleKind::Interleaved { self.mesh.pp() } else { 1 }
    }

    /// The same plan with another number of micro-batches per replica and step.
    #[must_use]
    pub fn with_micro_batches(&self, micro_batches: usize) -> Plan {
        let global = micro_batches * self.batch.micro * self.mesh.dp();
        Plan { batch: Batch { global, ..self.batch }, ..self.clone() }
    }

    /// Tokens of one micro-batch.
    pub fn rows(&self) -> usize {
        self.batch.micro * self.batch.sequence
    }

    /// Tokens of one step over all replicas.
    pub fn tokens_per_step(&self) -> usize {
        self.batch.global * self.batch.sequence
    }

    /// Samples of the validation split that an evaluation in training reads.
    pub fn evaluation_samples(&self) -> u64 {
        self.run.eval_tokens.div_ceil(self.batch.sequence as u64)
    }

    /// The token that ends a document, if it is known.
    pub fn end_of_document(&self) -> Option<u32> {
        match &self.data {
            Data::Demo => None,
            Data::Tokens(tokens) => tokens.end_of_document,
        }
    }

    /// Whether a token attends only to tokens of its own document. Every layer then needs the document starts.
    pub fn masks_documents(&self) -> bool {
        matches!(&self.data, Data::Tokens(tokens) if tokens.mask_documents)
    }

    /// Number of chunks of the whole pipeline.
    pub fn chunks(&self) -> usize {
        self.mesh.pp() * self.pipeline.virtual_stages
    }

    /// The stage that holds a chunk.
    pub fn stage_of_chunk(&self, chunk: usize) -> usize {
        chunk % self.mesh.pp()
    }

    /// The blocks of a chunk (0 is the first of the model), in order.
    pub fn chunk_blocks(&self, chunk: usize) -> Vec<Block> {
        let first: usize = self.pipeline.layers[..chunk].iter().sum();
        let mut blocks: Vec<Block> = (first..first + self.pipeline.layers[chunk]).map(Block::Layer).collect();
        if chunk == 0 {
            blocks.insert(0, Block::Embedding);
        }
        if chunk + 1 == self.chunks() {
            blocks.push(Block::Head);
        }
        blocks
    }

    /// The blocks of a stage, in model order.
    pub fn stage_blocks(&self, stage: usize) -> Vec<Block> {
        (0..self.chunks())
            .filter(|&chunk| self.stage_of_chunk(chunk) == stage)
            .flat_map(|chunk| self.chunk_blocks(chunk))
            .collect()
    }

    /// The first and the last layer of a stage, in model order. Every stage has at least one layer.
    pub fn outer_layers(&self, stage: usize) -> [Block; 2] {
        let blocks = self.stage_blocks(stage);
        let mut layers = blocks.into_iter().filter(|block| matches!(block, Block::Layer(_)));
        let first = layers.next().expect("every chunk has a layer");
        [first, layers.next_back().unwrap_or(first)]
    }

    /// The units whose weights a block uses.
    pub fn block_units(&self, block: Block) -> Vec<Unit> {
        self.units_of(block).collect()
    }

    /// The same as an iterator, without an allocation: programs call it for every computation.
    pub(crate) fn units_of(&self, block: Block) -> impl Iterator<Item = Unit> + use<> {
        let gpt = self.model.family == kintsugi_spec::Family::Gpt;
        let units = match block {
            Block::Embedding => [Some(Unit::Table), gpt.then_some(Unit::Positions)],
            Block::Layer(i) => [Some(Unit::Layer(i)), None],
            Block::Head => [self.model.tied.then_some(Unit::Table), Some(Unit::Head)],
        };
        units.into_iter().flatten()
    }

    /// The units that a stage holds, each once, in model order.
    pub fn stage_units(&self, stage: usize) -> Vec<Unit> {
        let mut units = Vec::new();
        for unit in self.stage_blocks(stage).into_iter().flat_map(|block| self.block_units(block)) {
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
        units
    }

    /// Whether this stage's token table is one of two copies, on the first and the last stage.
    pub fn holds_tied_copy(&self, stage: usize) -> bool {
        self.model.tied && self.mesh.pp() > 1 && (stage == 0 || stage + 1 == self.mesh.pp())
    }

    /// The reductions of a unit's gradient on a stage. `has_replicated` returns whether the unit has parameters that are
    /// replicated over tp.
    pub fn gradient_reductions(
        &self,
        stage: usize,
        unit: Unit,
        has_replicated: impl FnOnce() -> bool,
    ) -> GradientReductions {
        let tensor = self.sequence_parallel && self.mesh.tp() > 1 && has_replicated();
        let tied = unit == Unit::Table && self.holds_tied_copy(stage);
        let sum = |over| Phase::plain(over, PhaseKind::Sum);
        GradientReductions {
            tensor: tensor.then_some(sum(Group::TENSOR)),
            inner: self.sharding.inner_reductions(),
            outer: self.sharding.outer_reductions(),
            tied: tied.then_some(sum(Group::Tied)),
        }
    }

    /// The units that a stage owns: it counts their gradients in the global norm and writes them to checkpoints. A tied table
    /// belongs to the first stage only.
    pub fn owned_units(&self, stage: usize) -> Vec<Unit> {
        let second_copy = self.holds_tied_copy(stage) && stage > 0;
        self.stage_units(stage).into_iter().filter(|&unit| !(second_copy && unit == Unit::Table)).collect()
    }

    /// The axes over which the gradient norm is summed, in order.
    pub fn norm_axes(&self) -> Vec<Axis> {
        Axis::ALL.into_iter().rev().filter(|&axis| self.mesh.size(axis) > 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decay_ends_with_the_run_unless_its_steps_are_given() {
        use RateSchedule::{Cosine, Linear, Wsd};
        let optimizer = crate::config::ConfigSource::demo().plan().expect("the demo").optimizer;
        let decay = |schedule, warmup, decay_steps, steps| {
            let decay = Optimizer { warmup, schedule, decay_steps, ..optimizer }.decay(steps);
            (decay.start, decay.steps)
        };
        for schedule in [Cosine, Linear] {
            assert_eq!(decay(schedule, 30, None, 500), (29, 470));
            assert_eq!(decay(schedule, 0, None, 500), (0, 499));
            assert_eq!(decay(schedule, 30, Some(1000), 500), (29, 1000));
            assert_eq!(decay(schedule, 30, None, 10), (29, 1));
        }
        assert_eq!(decay(Wsd, 30, None, 500), (449, 50));
        assert_eq!(decay(Wsd, 30, Some(100), 500), (399, 100));
        assert_eq!(decay(Wsd, 30, Some(1000), 500), (29, 470));
        assert_eq!(decay(Wsd, 0, None, 1), (0, 1));
    }

    #[test]
    fn a_type_holds_what_it_does_not_round_to_infinity() {
        let just_below = |number: f32| f32::from_bits(number.to_bits() - 1);
        // Half of a step beyond the largest number: 65504 + 16, and (2 - 2^-7 + 2^-8) * 2^127.
        let largest_bf16 = (2.0 - 2_f32.powi(-7)) * 2_f32.powi(127);
        let limit = largest_bf16 + 2_f32.powi(119);
        for (compute, limit) in [(Compute::Fp16, 65520.0), (Compute::Bf16, limit)] {
            assert!(compute.holds(-just_below(limit)) && !compute.holds(-limit));
        }
        assert!(Compute::Fp32.holds(f32::MAX));
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!Compute::Fp32.holds(number) && !Compute::Fp16.holds(number));
        }
    }
}

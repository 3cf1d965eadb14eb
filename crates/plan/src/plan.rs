//! The plan: a checked and resolved configuration. Later stages read only the plan, not the configuration.

use std::ops::Range;
use std::path::PathBuf;

use kintsugi_spec::{ClusterSpec, FrameworkSpec, ModelSpec};
use serde::Serialize;

use crate::{
    Axis, Batch, Block, ContextAttention, Data, FrozenUnits, Group, MemoryOptions, Mesh, Optimizer, Phase,
    PhaseKind, Pipeline, Precision, Run, ScheduleKind, Sharding, Unit,
};

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
    /// How attention reaches the keys and values of other context-parallel ranks.
    pub cp_attention: ContextAttention,
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
    /// The units that it does not change. They follow from its groups.
    #[serde(skip)]
    pub frozen: FrozenUnits,
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

    /// The layers of the first and of the last chunk.
    pub fn outer_chunks(&self) -> [usize; 2] {
        let layers = &self.pipeline.layers;
        [layers.first(), layers.last()].map(|chunk| chunk.copied().unwrap_or(0))
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

    /// Tokens of a sample that a rank has: two slices of it, if sequences are divided over cp.
    pub fn own_sequence(&self) -> usize {
        self.batch.sequence / self.mesh.cp()
    }

    /// Tokens of one micro-batch that a rank has.
    pub fn rows(&self) -> usize {
        self.batch.micro * self.own_sequence()
    }

    /// Whether ranks of cp need the starts of whole samples, because they attend to these.
    pub fn loads_whole_starts(&self) -> bool {
        self.mesh.cp() > 1 && self.cp_attention == ContextAttention::AllToAll
    }

    /// The window of a layer, if it is shorter than a sample.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.model.window(layer).filter(|&window| window < self.batch.sequence)
    }

    /// The window of the layers that have one.
    pub fn any_window(&self) -> Option<usize> {
        (0..self.model.layers).find_map(|layer| self.window(layer))
    }

    /// The same plan with this window in every layer, or in none.
    #[must_use]
    pub fn with_uniform_window(mut self, window: Option<usize>) -> Plan {
        self.model.sliding_window = window;
        (self.model.full_attention_every, self.model.full_attention_first) = (None, None);
        self
    }

    /// The share of layers with a window.
    pub fn window_share(&self) -> f64 {
        let windows = (0..self.model.layers).filter(|&layer| self.window(layer).is_some()).count();
        windows as f64 / self.model.layers as f64
    }

    /// Whether some attention of the plan may run on a library's kernel: neither masked, nor with a window, nor capped.
    pub fn may_use_attention_library(&self) -> bool {
        !self.masks_documents() && self.model.score_soft_cap.is_none() && self.window_share() < 1.0
    }

    /// The numbers of a micro-batch that a rank loads to mask attention: for every token, the first one that it attends to. If
    /// documents are masked, this is a list of document starts. If layers have a window, it is another list for these.
    pub fn starts_len(&self) -> usize {
        let lists = usize::from(self.masks_documents()) + usize::from(self.any_window().is_some());
        lists * self.starts_list_len()
    }

    fn starts_list_len(&self) -> usize {
        self.batch.micro * if self.loads_whole_starts() { self.batch.sequence } else { self.own_sequence() }
    }

    /// Which of these numbers a layer reads; `None` if its tokens attend to all tokens before them.
    pub fn starts_of(&self, layer: usize) -> Option<Range<usize>> {
        let list = match (self.window(layer), self.masks_documents()) {
            (None, false) => return None,
            (None, true) => 0,
            (Some(_), masks) => usize::from(masks),
        };
        let len = self.starts_list_len();
        Some(list * len..(list + 1) * len)
    }

    /// Whether any layer is masked by more than causality. Ranks then load the first token that each token attends to.
    pub fn loads_starts(&self) -> bool {
        self.starts_len() > 0
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

    /// Whether a token attends only to tokens of its own document.
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

    /// The layers of a stage with the last backward, if any has one, and with the last forward.
    pub fn last_layers(&self, stage: usize) -> (Option<Block>, Block) {
        let mut layers = self.stage_blocks(stage);
        layers.retain(|block| matches!(block, Block::Layer(_)));
        let &last = layers.last().expect("every chunk has a layer");
        let first = self.first_backward();
        (layers.into_iter().find(|&layer| layer >= first), last)
    }

    /// The units whose weights a block uses.
    pub fn block_units(&self, block: Block) -> Vec<Unit> {
        self.units_of(block).collect()
    }

    /// The same as an iterator, without an allocation: programs call it for every computation.
    pub(crate) fn units_of(&self, block: Block) -> impl Iterator<Item = Unit> + use<> {
        let learned = self.model.has_learned_positions();
        let units = match block {
            Block::Embedding => [Some(Unit::Table), learned.then_some(Unit::Positions)],
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

    /// The reductions of a unit's gradient on a stage. `summed_over_tp` returns the number of elements of
    /// [`UnitLayout::summed_over_tp`](crate::parameters::UnitLayout::summed_over_tp).
    pub fn gradient_reductions(
        &self,
        stage: usize,
        unit: Unit,
        summed_over_tp: impl FnOnce() -> usize,
    ) -> GradientReductions {
        let tensor = self.mesh.tp() > 1 && summed_over_tp() > 0;
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

    /// The axes over which the gradient norm is summed, in order. The sum over dp is that over all ranks with the same
    /// parameters, so it includes cp.
    pub fn norm_axes(&self) -> Vec<Axis> {
        let ranks = |axis| match axis {
            Axis::Data => self.mesh.replicas(),
            Axis::Context => 1,
            Axis::Pipeline | Axis::Tensor => self.mesh.size(axis),
        };
        Axis::ALL.into_iter().rev().filter(|&axis| ranks(axis) > 1).collect()
    }
}

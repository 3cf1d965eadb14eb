//! The keys of caches: which of a plan's choices decide a result.
//!
//! A key that forgets a field gives a plan the result of another one. So every key takes the choices and their parts apart without
//! `..`: a new field of a plan does not compile until somebody decides to which keys it belongs. What is bound to `_` does not
//! change the result.

use kintsugi_plan::{
    Batch, MAX_PARTS, MemoryOptions, Mesh, Pipeline, Plan, Quantized, Recompute, ScheduleKind, SecondaryUse,
    Sharding, Span, When,
};

use crate::graph::short_step;

/// What the plans of one search may differ in.
struct Choices {
    mesh: Mesh,
    micro: usize,
    /// The number of micro-batches.
    batches: usize,
    chunks: Chunks,
    sequence_parallel: bool,
    sharding: Sharding,
    recompute: Recompute,
}

/// The schedule, and how layers are divided into chunks. No two divisions of a search have as many chunks, and as many layers
/// in the first and in the last of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Chunks {
    schedule: ScheduleKind,
    virtual_stages: usize,
    /// Layers of the first and of the last chunk.
    ends: [usize; 2],
}

impl Choices {
    fn of(plan: &Plan) -> Self {
        let Plan {
            mesh,
            batch: Batch { micro, global: _, sequence: _ },
            pipeline: Pipeline { schedule, virtual_stages, layers: _, prefetch: _, overlap: _ },
            sequence_parallel,
            sharding,
            memory: MemoryOptions { recompute, attention: _, head_rows: _ },
            // These and the other `_` are the same in all plans of a search. Only the global batch and the layers are not: they
            // follow from the number of micro-batches and from the chunks.
            model: _,
            init: _,
            cp_attention: _,
            overlap_tp: _,
            precision: _,
            optimizer: _,
            frozen: _,
            data: _,
            cluster: _,
            framework: _,
            run: _,
        } = *plan;
        let chunks = Chunks { schedule, virtual_stages, ends: plan.outer_chunks() };
        let batches = plan.micro_batches();
        Choices { mesh, micro, batches, chunks, sequence_parallel, sharding, recompute }
    }
}

impl Chunks {
    /// Whether the backward is split into two parts.
    fn splits_backward(self) -> bool {
        let Chunks { schedule, virtual_stages: _, ends: _ } = self;
        schedule == ScheduleKind::ZeroBubble
    }
}

/// Whether a micro-batch accumulates into the gradients of the previous one.
fn accumulates(batches: usize) -> bool {
    batches > 1
}

/// Everything that decides the costs of blocks.
#[derive(PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "a key, not a state")]
pub(crate) struct BlockCostKey {
    ranks: usize,
    cp: usize,
    tp: usize,
    one_stage: bool,
    /// Number of stages, if they share cores.
    sharing: Option<usize>,
    micro: usize,
    sequence_parallel: bool,
    recompute: Recompute,
    split: bool,
    accumulates: bool,
    /// What shards of all replicas and parameters are padded to, if every micro-batch overwrites the gradients and clears their
    /// padding.
    fresh: Option<[usize; 2]>,
}

impl BlockCostKey {
    pub(crate) fn of(plan: &Plan) -> Self {
        let Choices { mesh, micro, batches, chunks, sequence_parallel, sharding, recompute } =
            Choices::of(plan);
        let [pp, dp, cp, tp] = mesh.sizes();
        let Sharding {
            weights: _,
            gradients,
            states: _,
            secondary: _,
            secondary_use: _,
            gather: _,
            reduce,
            quantized,
            multiple,
            parts: _,
        } = sharding;
        let anew = gradients > 1 && (reduce == When::MicroBatch || !accumulates(batches));
        BlockCostKey {
            ranks: mesh.ranks(),
            cp,
            tp,
            one_stage: pp == 1,
            sharing: plan.cluster.cores.map(|_| pp),
            micro,
            sequence_parallel,
            recompute,
            split: chunks.splits_backward(),
            accumulates: accumulates(batches),
            fresh: anew.then_some([dp * cp * multiple, quantized.block()]),
        }
    }
}

/// Everything that decides the costs of units.
#[derive(PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "a key, not a state")]
pub(crate) struct UnitCostKey {
    mesh: Mesh,
    /// Per stage: all, and those that are trained.
    layers: Vec<[usize; 2]>,
    sharding: Sharding,
    sequence_parallel: bool,
    split: bool,
    accumulates: bool,
}

impl UnitCostKey {
    pub(crate) fn of(plan: &Plan) -> Self {
        let Choices { mesh, micro: _, batches, chunks, sequence_parallel, sharding, recompute: _ } =
            Choices::of(plan);
        let stages = plan.stage_layers().into_iter().enumerate();
        UnitCostKey {
            mesh,
            layers: stages.map(|(stage, all)| [all, plan.trained_layers(stage)]).collect(),
            sharding,
            sequence_parallel,
            split: chunks.splits_backward(),
            accumulates: accumulates(batches),
        }
    }
}

/// Everything that decides the costs of messages between stages.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct MessageCostKey {
    mesh: Mesh,
    micro: usize,
    sequence_parallel: bool,
}

impl MessageCostKey {
    pub(crate) fn of(plan: &Plan) -> Self {
        let Choices { mesh, micro, batches: _, chunks: _, sequence_parallel, sharding: _, recompute: _ } =
            Choices::of(plan);
        MessageCostKey { mesh, micro, sequence_parallel }
    }
}

/// Everything that decides the memory of ops on blocks.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct BlockMemoryKey {
    cp: usize,
    tp: usize,
    micro: usize,
    sequence_parallel: bool,
    recompute: Recompute,
    split: bool,
    stages: usize,
}

impl BlockMemoryKey {
    pub(crate) fn of(plan: &Plan) -> Self {
        let Choices { mesh, micro, batches: _, chunks, sequence_parallel, sharding: _, recompute } =
            Choices::of(plan);
        let [pp, _, cp, tp] = mesh.sizes();
        BlockMemoryKey {
            cp,
            tp,
            micro,
            sequence_parallel,
            recompute,
            split: chunks.splits_backward(),
            stages: pp.min(3),
        }
    }
}

/// Everything that decides the memory of ops on units.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct UnitMemoryKey {
    tp: usize,
    /// Ranks with the same parameters.
    replicas: usize,
    stages: usize,
    sequence_parallel: bool,
    split: bool,
    sharding: Sharding,
}

impl UnitMemoryKey {
    pub(crate) fn of(plan: &Plan) -> Self {
        let Choices { mesh, micro: _, batches: _, chunks, sequence_parallel, sharding, recompute: _ } =
            Choices::of(plan);
        let [pp, dp, cp, tp] = mesh.sizes();
        UnitMemoryKey {
            tp,
            replicas: dp * cp,
            stages: pp.min(3),
            sequence_parallel,
            split: chunks.splits_backward(),
            sharding,
        }
    }
}

/// Everything that decides the resident memory of a stage's ranks.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ResidentKey {
    stage: usize,
    mesh: Mesh,
    /// Decide, with the mesh, which layers a stage holds.
    virtual_stages: usize,
    ends: [usize; 2],
    /// Ranks over which weights, gradients and states are sharded.
    shards: [usize; 3],
    multiple: usize,
    block: usize,
    /// Weights that a refresh replaces by codes have master weights.
    quantized_refresh: bool,
}

impl ResidentKey {
    pub(crate) fn of(plan: &Plan, stage: usize) -> Self {
        let Choices { mesh, micro: _, batches: _, chunks, sequence_parallel: _, sharding, recompute: _ } =
            Choices::of(plan);
        let Chunks { schedule: _, virtual_stages, ends } = chunks;
        let Sharding {
            weights,
            gradients,
            states,
            secondary: _,
            secondary_use: _,
            gather: _,
            reduce: _,
            quantized,
            multiple,
            parts: _,
        } = sharding;
        let Quantized { weights: _, refresh, gradients: _ } = quantized;
        ResidentKey {
            stage,
            mesh,
            virtual_stages,
            ends,
            shards: [weights, gradients, states],
            multiple,
            block: quantized.block(),
            quantized_refresh: refresh.is_some(),
        }
    }
}

/// Everything that decides which stages may have the fullest rank.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct FullestKey {
    pp: usize,
    /// The number of micro-batches; all numbers that are larger than that of the stages are one.
    batches: usize,
    chunks: Chunks,
}

impl FullestKey {
    pub(crate) fn of(plan: &Plan) -> Self {
        let Choices { mesh, micro: _, batches, chunks, sequence_parallel: _, sharding: _, recompute: _ } =
            Choices::of(plan);
        FullestKey { pp: mesh.pp(), batches: batches.min(mesh.pp() + 2), chunks }
    }
}

/// Everything that decides a plan's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "a key, not a state")]
pub(crate) struct ProgramKey {
    pp: usize,
    chunks: Chunks,
    micro_batches: usize,
    replicas: bool,
    tensor_parallel: bool,
    sequence_parallel: bool,
    recompute: bool,
    gather: Option<When>,
    reduce: When,
    /// The parts of the data-parallel axis, and how many of them divide weights, secondary shards, gradients and states.
    spans: [Option<Span>; MAX_PARTS],
    weights: usize,
    secondary: usize,
    secondary_use: SecondaryUse,
    gradients: usize,
    states: usize,
    quantized: Quantized,
    /// The ranks that share the layers of a stage, if the optimizer needs whole matrices.
    owners: Option<usize>,
}

impl ProgramKey {
    /// The key of the short step that stands for `portion` micro-batches of a plan.
    pub(crate) fn short(plan: &Plan, portion: usize) -> Self {
        // Programs have no sizes, and only the micro-batches of the portion are in them.
        let Choices { mesh, micro: _, batches: _, chunks, sequence_parallel, sharding, recompute } =
            Choices::of(plan);
        // The transfers between the ranks of cp are inside blocks.
        let [pp, dp, cp, tp] = mesh.sizes();
        let Sharding {
            weights,
            gradients,
            states,
            secondary,
            secondary_use,
            gather,
            reduce,
            quantized,
            // Padding is no op.
            multiple: _,
            parts,
        } = sharding;
        ProgramKey {
            pp,
            chunks,
            micro_batches: short_step(plan, portion),
            replicas: dp * cp > 1,
            tensor_parallel: tp > 1,
            sequence_parallel,
            recompute: recompute == Recompute::Full,
            gather: (weights > 1).then_some(gather),
            reduce: if gradients > 1 { reduce } else { When::Step },
            spans: parts.map(|part| part.map(|part| part.span)),
            weights: sharding.depth(weights),
            secondary: sharding.depth(secondary),
            secondary_use,
            gradients: sharding.depth(gradients),
            states: sharding.depth(states),
            quantized,
            owners: plan.needs_whole_matrices().then(|| plan.owners()),
        }
    }

    /// The key without what cannot change the time of a step: sharding gradients that are reduced once a step does not
    /// change the ops.
    pub(crate) fn for_time(self) -> Self {
        let gradients = if self.reduce == When::Step { 0 } else { self.gradients };
        ProgramKey { gradients, ..self }
    }

    /// The key for memory. Sums over tensor-parallel ranks are made in place, so they do not matter.
    pub(crate) fn for_memory(self) -> Self {
        ProgramKey { tensor_parallel: false, sequence_parallel: false, ..self }
    }
}

//! The keys of the configuration: every key with its type, its default, what is allowed and what it means.
//!
//! Only names, types and ranges are checked here. What depends on several keys is checked where a plan is made of them. The keys
//! of `[framework]`, of a device and of `[model.rotary_scaling]` are declared in the same way in `kintsugi-spec`.

use kintsugi_spec::{
    Activation, DeclaredKey, DeviceSpec, Family, FrameworkSpec, RotaryScaling, ShortSpec, Wire, declared_key,
};
use serde::{Deserialize, Serialize};

use super::declare::table;
use super::words::{
    Collectives, DeviceName, OptimizerName, Quantize, Replicas, ShardLevel, ShardPreset, Sources,
};
use crate::{
    AttentionKind, Compute, ContextAttention, GradientType, HeadRows, LogFormat, LossScale, OnSpike,
    ParameterGroup, Products, RateAdjustment, RateSchedule, Recipe, Recompute, Resume, ScheduleKind,
    SecondaryUse, Transport, When,
};

/// Larger than any cluster, and small enough that products of sizes do not overflow.
pub(crate) const MAX_RANKS: usize = 1 << 20;

/// Step counters are `f32` on the device and stop counting beyond this.
pub const MAX_STEPS: u64 = 1 << 24;

/// A year.
const MAX_SECONDS: u64 = 365 * 24 * 3600;

/// Declares the whole configuration. A missing table is empty.
macro_rules! tables {
    ($($table:ident: $type:ty),+ $(,)?) => {
        /// The whole configuration as it is written: every key is optional.
        #[derive(Clone, Debug, Default, Deserialize, Serialize)]
        #[serde(deny_unknown_fields, default)]
        pub(crate) struct RawConfig { $(pub(crate) $table: $type),+ }

        impl RawConfig {
            pub(crate) const KEYS: &'static [DeclaredKey] = &[$(declared_key!($table: $type, [] [] [])),+];
        }
    };
}

tables! {
    model: RawModel,
    batch: RawBatch,
    parallel: RawParallel,
    sharding: RawSharding,
    precision: RawPrecision,
    memory: RawMemory,
    optimizer: RawOptimizer,
    data: RawData,
    cluster: RawCluster,
    framework: FrameworkSpec,
    run: RawRun,
}

// The ranges of sizes are larger than any model, and keep products of sizes from overflowing.
table! {
    RawModel in "model" {
        /// {model presets}
        preset: String, else "none";
        /// what plans, reports and pages call the model
        name: String, else "that of the preset, else `\"custom\"`";
        /// {families}: a [family](huggingface.md#families)
        family: Family, default Family::Gpt;
        /// transformer layers
        layers: usize, else "required unless a preset gives it", in 1..=1 << 14;
        /// width of the residual stream
        hidden: usize, else "required unless a preset gives it", in 1..=1 << 20;
        /// query heads
        heads: usize, else "required unless a preset gives it", in 1..=1 << 12;
        /// a divisor of `heads`
        kv_heads: usize, else "`heads`", in 1..=1 << 12;
        /// even with rotary positions
        head_dim: usize, else "`hidden / heads`";
        /// width of the MLP
        ffn: usize, else "4 · `hidden`; with a gate 8/3, rounded up to a multiple of 256";
        /// at least that of the data
        vocab: usize, else "required unless a preset or the data gives it", in 2..=1 << 24;
        /// the vocabulary is padded to a multiple of `vocab_multiple` · tp
        vocab_multiple: usize, default 1, in 1..=1 << 20;
        /// the longest sample that the model supports; learned positions cannot be exceeded
        positions: usize, else "`batch.sequence`", in 1..=1 << 24;
        /// whether the head uses the token table
        tied: bool, else "that of the [family](huggingface.md#families)";
        /// whether attention and MLP both start from the layer's input; true only for families that may do so
        parallel_residual: bool, else "that of the family";
        /// `"gelu"` (tanh form), `"gelu-exact"` (error function), `"swiglu"`, `"geglu"`: what the [family](huggingface.md#families)
        /// has
        activation: Activation, else "that of the family";
        /// above 0, at most 1
        norm_eps: f64, default 1e-5, in 1e-30..=1.0;
        /// 1 to 1e12
        rotary_base: f64, default 10000.0, in 1.0..=1e12;
        /// 0 to 1: the share of each head that is rotated; not for learned positions
        rotary_fraction: f64, else "that of the family", in 0.0..=1.0;
        rotary_scaling: RotaryScaling;
        /// families with such layers only, at least 1: layers whose number, from 1, is a multiple of this do not rotate
        no_rotary_every: usize, else "that of the family", in 1..=1 << 14;
        /// families with a [sliding window](huggingface.md#families) only, at least 1: a token attends to itself and to the
        /// `sliding_window` - 1 tokens before it
        sliding_window: usize, else "none", in 1..=1 << 24;
        /// the same families, at least 1: layers whose number, from 1, is a multiple of this have no window
        full_attention_every: usize, else "that of the family", in 1..=1 << 14;
        /// the same families: so many of the first layers have no window
        full_attention_first: usize, else "none", in 0..=1 << 14;
        /// gemma2 only: scores are divided by its root
        score_width: usize, else "`head_dim`", in 1..=1 << 16;
        /// gemma2 only: the [soft cap](huggingface.md#families) of scores
        score_soft_cap: f64, else "that of the family", in 1e-3..=1e6;
        /// gemma2 only: the soft cap of logits
        logit_soft_cap: f64, else "that of the family", in 1e-3..=1e6;
        /// a [Hugging Face folder](huggingface.md), a run or a checkpoint that the model comes from; other keys must agree with
        /// it
        init: String, else "random weights";
        /// standard deviation of initial weights; matrices that end in the residual stream have `init_std` / √(2 · `layers`)
        init_std: f64, default 0.02, in 0.0..=1e3;
    }
}

table! {
    RawBatch in "batch" {
        /// tokens of a sample; required if no preset or `model.init` gives it
        sequence: usize, else "that of the model", in 1..=1 << 20;
        /// samples of a micro-batch
        micro: usize, default 1, in 1..=1 << 20;
        /// samples of a step: a multiple of `micro` · dp
        global: usize, else "`micro` · dp";
    }
}

table! {
    RawParallel in "parallel" {
        /// a divisor of `heads`, `kv_heads` and `ffn`
        tp: usize, default 1, in 1..=MAX_RANKS;
        /// [context parallelism](context-parallelism.md): the ranks that share the tokens of a sample; `sequence` must be a
        /// multiple of 2 · cp
        cp: usize, default 1, in 1..=MAX_RANKS;
        /// `"gather"`, `"ring"`, `"all-to-all"`: how attention [reaches](context-parallelism.md#three-ways) the keys of other
        /// ranks of cp
        cp_attention: ContextAttention, default ContextAttention::Gather;
        /// at most `layers`
        pp: usize, default 1, in 1..=MAX_RANKS;
        /// a number; `"auto"` fills `cluster.nodes` if that is given, and is 1 otherwise
        dp: Replicas, default Replicas::Auto;
        /// `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zero-bubble"` ([schedules](schedules.md)). Interleaved needs pp of at least 2
        /// and a multiple of pp micro-batches
        schedule: ScheduleKind, default ScheduleKind::OneForwardOneBackward;
        /// chunks per stage; more than 1 only for interleaved
        virtual_stages: usize, else "2 for interleaved, else 1";
        /// the layers of each of the pp · `virtual_stages` chunks
        layers_per_stage: Vec<usize>, else "as even as possible";
        /// needs `micro` · `sequence` to be a multiple of tp
        sequence_parallel: bool, default false;
        /// how many block computations ahead sharded weights are gathered
        prefetch: usize, default 1, in 0..=1 << 14;
        /// whether transfers [overlap](overlap.md) with computation
        overlap: bool, default true;
        /// whether tensor-parallel products are cut into chunks whose transfers [overlap](overlap.md#paralleloverlap_tp) with the
        /// next product
        overlap_tp: bool, default false;
    }
}

table! {
    RawSharding in "sharding" {
        /// `"mics"`, `"zero++"`, `"three-level"`: a known [placement](partitioning.md), instead of `zero`. The last two quantise
        preset: ShardPreset, else "none";
        /// what is sharded over all replicas: 0 nothing, 1 states, 2 also gradients, 3 also weights
        zero: usize, default 0, in 0..=3;
        /// `"none"`, `"package"`, `"node"`, `"pod"`, `"cluster"`: the [level](partitioning.md) to shard weights over; not over
        /// more replicas than gradients
        weights: ShardLevel, else "what `preset` or `zero` means";
        /// the same for gradients; not over more replicas than states
        gradients: ShardLevel, else "what `preset` or `zero` means";
        /// the same for optimizer states
        states: ShardLevel, else "what `preset` or `zero` means";
        /// `"micro-batch"`; `"step"` gathers sharded weights once a step and keeps them
        gather: When, default When::MicroBatch;
        /// `"micro-batch"`, which needs sharded gradients, or `"step"`
        reduce: When, else "`\"micro-batch\"` if gradients are sharded, else `\"step\"`";
        /// `"none"`, `"int8"`: the type in which weights are gathered ([quantisation](quantisation.md))
        quantize_weights: Quantize, else "what `preset` means, else `\"none\"`";
        /// `"none"`, `"int8"`: the type in which updated weights are gathered
        quantize_refresh: Quantize, else "`quantize_weights` if that is given, else `\"none\"`";
        /// `"none"`, `"int8"`, `"int4"`: the type in which gradients are reduced
        quantize_gradients: Quantize, else "what `preset` means, else `\"none\"`";
        /// a power of two from 32 to 4096: quantised numbers that share a scale
        quantize_block: usize, default 256, in 32..=4096;
        /// the same for a secondary shard of the weights, which later gathers of a step start from
        secondary: ShardLevel, else "what `preset` means, else `\"none\"`";
        /// `"all"`, `"backward"`: which gathers start from the [secondary shard](partitioning.md#how-it-works)
        secondary_use: SecondaryUse, default SecondaryUse::All;
        /// `"ring"`: one ring over all replicas that share a tensor; `"hierarchical"`: level by level; `"auto"`: the faster one
        collectives: Collectives, default Collectives::Auto;
    }
}

table! {
    RawPrecision in "precision" {
        /// `"fp32"`, `"bf16"`, `"fp16"`: weights and activations. In 16 bits there are fp32 master weights
        compute: Compute, default Compute::Fp32;
        /// `"fp32"`, `"compute"`
        gradients: GradientType, default GradientType::Fp32;
        /// `"fp32"`, `"bf16"`: the states of the optimizer
        states: Compute, default Compute::Fp32;
        /// `"compute"`; `"fp8"`: the products of layers in 8 bits, with `compute = "bf16"` ([fp8](fp8.md))
        products: Products, default Products::Compute;
        /// `"tensor"`: a matrix in 8 bits has one scale
        recipe: Recipe, default Recipe::Tensor;
        /// a number, or `"dynamic"`; only fp16 uses it
        loss_scale: LossScale, default LossScale::Dynamic;
    }
}

table! {
    RawMemory in "memory" {
        /// `"none"`, `"selective"`, `"full"` ([memory](memory.md))
        recompute: Recompute, default Recompute::None;
        /// `"flash"`; `"plain"` keeps the probabilities
        attention: AttentionKind, default AttentionKind::Flash;
        /// `"all"`, a number, or `"auto"` (512 MiB): the tokens of a micro-batch whose [logits](memory.md#logits) are in memory
        /// at a time
        head_rows: HeadRows, default HeadRows::All;
    }
}

table! {
    RawOptimizer in "optimizer" {
        /// `"adamw"`, `"lion"`, `"muon"`, `"sgd"` ([optimizers](optimizers.md))
        name: OptimizerName, default OptimizerName::Adamw;
        /// above 0
        lr: f64, default 3e-4, in 1e-30..=1e6;
        /// 0 to `lr`
        min_lr: f64, else "`lr` / 10", in 0.0..=1e6;
        /// steps of linear warm-up; the last of them has `lr`
        warmup: u64, default 0, in 0..=MAX_STEPS;
        /// `"cosine"`, `"linear"`, `"sqrt"`, `"constant"`, `"inverse-sqrt"`, `"wsd"`, `"wsd-sqrt"`: the [learning
        /// rate](optimizers.md#learning-rate) after the warm-up
        schedule: RateSchedule, default RateSchedule::Cosine;
        /// steps in which the rate falls from `lr` to `min_lr`; not for constant and inverse-sqrt
        decay_steps: u64, else "to the end of the run; for wsd a tenth of it", in 1..=MAX_STEPS;
        /// from 0 to below 1; not for sgd. For muon those of AdamW
        betas: Vec<f64>, else "`[0.9, 0.95]`; lion `[0.9, 0.99]`";
        /// adamw and muon only
        eps: f64, else "1e-8", in 1e-30..=1.0;
        /// 0 to below 1; sgd and muon only
        momentum: f64, else "sgd 0.9, muon 0.95";
        /// sgd and muon only
        nesterov: bool, else "sgd false, muon true";
        /// muon only: `"match-rms-adamw"`, `"original"`, as PyTorch's `adjust_lr_fn`
        adjust_lr: RateAdjustment, else "`\"match-rms-adamw\"` for muon";
        /// not applied to norms and biases
        weight_decay: f64, default 0.1, in 0.0..=1e6;
        /// largest gradient norm; 0 for no clipping
        clip: f64, default 1.0;
        /// 0 to below 1: the factor of a [moving average](optimizers.md#moving-average) of the weights; 0 for none
        ema: f64, default 0.0, in 0.0..=0.999_999_9;
        /// coefficient of the [z-loss](optimizers.md#z-loss), which keeps logits small
        z_loss: f64, default 0.0, in 0.0..=1.0;
        /// [parameters](optimizers.md#groups) with a learning rate or a weight decay of their own, or that stay as they are:
        /// `{ parameters = "layer.*.*_bias", lr_factor = 1.0, weight_decay = 0.0, frozen = false }`
        groups: Vec<ParameterGroup>, else "none";
    }
}

table! {
    RawData in "data" {
        /// `"demo"`: stories in a generated language with a known entropy; or the prefix of [token files](data.md); or a list of
        /// `{ path = "prefix", weight = 1.0 }`. The keys below are for files only
        source: Sources, else "`\"demo\"`";
        /// the tokenizer of the files: a `tokenizer.json`, a folder, or `"bytes"`
        tokenizer: String, else "none";
        /// allows different tokenizers in `model.init`, the files and `tokenizer`
        allow_other_tokenizer: bool, default false;
        /// the token that ends every document: `generate` stops at it
        end_of_document: u32, else "from the files";
        /// token files for validation, in the form of `source`; all of `source` is then for training. `[]` is none
        validation: Sources, else "none";
        /// 0 to 0.5: the share of tokens at the end of every file that is for validation, instead of the documents that `prepare`
        /// has drawn
        split: f64, else "none";
        /// whether a token attends only to [tokens of its own document](data.md#documents)
        mask_documents: bool, default false;
    }
}

table! {
    RawCluster in "cluster" {
        /// {cluster presets}. `"local"` has as many ranks as the layout, in one node
        preset: String, else "`\"local\"`";
        /// a file with a `[cluster]` table that overrides the preset: your own [cluster](clusters.md), or what `calibrate`
        /// measured
        profile: String, else "none";
        /// nodes to use; the mesh must fit. Needs `per_node`
        nodes: usize, else "the preset's", in 1..=1 << 20;
        /// ranks that share a package
        per_package: usize, default 1, in 1..=1 << 10;
        /// ranks that share a node
        per_node: usize, else "all ranks", in 1..=1 << 10;
        /// nodes that share a [pod](clusters.md#pods). Needs `per_node`
        nodes_per_pod: usize, else "none", in 1..=1 << 20;
        /// cores of a node that its ranks share, or of the one machine that runs all nodes if links between them are emulated
        cores: usize, else "none", in 1..=1 << 16;
        /// price of one rank for one hour
        price: f64, else "none", in 0.0..=1e9;
        device: DeviceSpec;
        links: RawLinks;
        /// the wires inside a node of up to 16 ranks: a list of `{ a, b, bandwidth }`
        graph: Vec<Wire>, else "the preset's";
        emulated: RawEmulatedLinks;
        placement: RawPlacement;
    }
}

table! {
    RawPlacement in "cluster.placement" {
        /// the nodes of the run in the order of its ranks, as `plan --place` writes them ([placement](placement.md))
        nodes: Vec<String>, else "none";
        /// the pod of each
        pods: Vec<String>, else "none";
    }
}

table! {
    RawLinks in "cluster.links" {
        package: RawLink;
        node: RawLink;
        pod: RawLink;
        cluster: RawLink;
    }
}

table! {
    RawLink in "cluster.links" {
        /// bytes/s
        bandwidth: f64, else "20 GB/s in a node, 10 GB/s between";
        /// seconds from one rank to the next
        latency: f64, else "2 µs, 8 µs";
        /// of `cluster` only: seconds of a hop inside a node, in a ring that leaves the node
        inner_latency: f64, else "the node's `latency`";
        /// share that a long transfer reaches
        efficiency: f64, else "0.8";
        /// seconds to begin a transfer
        start: f64, else "10 µs, 20 µs";
        short: ShortSpec;
        /// how many rings the library lays over the wires of `graph`, at most
        rings: usize, else "1";
    }
}

table! {
    RawEmulatedLinks in "cluster.emulated" {
        package: RawEmulatedLink;
        node: RawEmulatedLink;
        pod: RawEmulatedLink;
        cluster: RawEmulatedLink;
    }
}

table! {
    RawEmulatedLink in "cluster.emulated" {
        /// bytes/s in one direction, for one rank
        bandwidth: f64, else "unlimited";
        /// seconds from one rank to the next
        latency: f64, else "0";
    }
}

table! {
    RawRun in "run" {
        /// optimizer steps; with 0 the checkpoint has the initial weights
        steps: u64, default 100, in 0..=MAX_STEPS;
        /// the length of the run in tokens, instead of `steps`
        tokens: u64, else "none", in 1..=1 << 60;
        /// the length of the run in passes over the token files, instead of `steps`. Only `train` reads them and knows the number
        /// of steps
        epochs: f64, else "none", in 1e-9..=1e9;
        /// seed of weights and data
        seed: u64, default 1;
        /// folder for `metrics.jsonl` and `summary.json`
        out: String, default "out".to_owned();
        /// true continues from the newest whole checkpoint in `out`; a path continues from that one. The same as `--resume`
        resume: Resume, else "false";
        /// steps between [checkpoints](checkpoints.md); with 0 only one at the end
        checkpoint_every: u64, default 0;
        /// steps between [copies of states](recovery.md#copies-in-memory) in the memory of a neighbour node; 0 for none. Needs
        /// several nodes (`cluster.per_node`) and `kintsugi launch`
        replicate_every: u64, default 0, in 0..=MAX_STEPS;
        /// how many of the newest checkpoints are kept; with 0 none is saved
        keep: u64, default 2;
        /// how many of the [best checkpoints](checkpoints.md#the-best-checkpoints) are kept besides the newest
        keep_best: u64, default 0;
        /// steps between lines of progress. On a terminal a progress bar takes their place, unless this is given
        log_every: u64, else "every 10 steps or 30 seconds", in 1..=MAX_STEPS;
        /// `["tensorboard"]`: [event files](report.md#tensorboard-and-weights--biases) in `out/tensorboard`
        log: Vec<LogFormat>, default Vec::new();
        /// steps between evaluations; 0 for none
        eval_every: u64, default 0;
        /// tokens of the validation split that an evaluation reads, rounded up to whole samples. The demo sets 8192
        eval_tokens: u64, default 65536, in 1..=1 << 50;
        /// how many consecutive steps may be skipped because gradients are not finite
        max_skipped: u64, default 20, in 1..=MAX_STEPS;
        /// `"continue"`, `"rollback"`: what the run does after a [spike](recovery.md#loss-spikes) of the loss. `"rollback"` needs
        /// `checkpoint_every` and `keep`
        on_spike: OnSpike, default OnSpike::Continue;
        /// at least 4: the steps before a step that decide whether it is a spike
        spike_window: usize, default 32, in 4..=1024;
        /// how many deviations above their median a spike is
        spike_limit: f64, default 10.0, in 1e-6..=1e6;
        /// how many batches are skipped after a spike, the last of them that of the spike
        spike_batches: u64, default 1, in 1..=MAX_STEPS;
        /// how often a run goes back; at the next spike it ends
        max_rollbacks: u64, default 10, in 0..=MAX_STEPS;
        /// seconds that a rank waits for another before the run fails
        communication_timeout: u64, default 600, in 1..=MAX_SECONDS;
        /// a rank has failed if none begins an op for so many times the longest op of the last steps ([the
        /// watchdog](recovery.md#the-watchdog)); 0 for `communication_timeout` alone
        hang_factor: u64, default 20, in 0..=1_000_000;
        /// steps between checks of weights and states for [silent corruption](recovery.md#silent-corruption); with 0 none
        checksum_every: u64, default 0, in 0..=MAX_STEPS;
        /// the same seed and layout give the same bits, which [costs time and memory](cuda.md#what-is-deterministic) on a GPU
        deterministic: bool, else "true on the CPU, false on GPUs";
        /// on a GPU with one rank, a step that repeats is [replayed as a CUDA graph](cuda.md#one-launch-per-step)
        graph: bool, else "true, false on AMD GPUs";
        /// `"cpu"`; `"cuda"`: NVIDIA GPUs; `"hip"`: AMD GPUs ([what was checked](amd.md)); `"auto"`: see [the device of a
        /// run](#the-device-of-a-run)
        device: DeviceName, default DeviceName::Auto;
        /// `"threads"`, `"mpi"`, `"nccl"`, `"auto"` ([transports](transports.md))
        transport: Transport, default Transport::Auto;
        /// from 1 to 64; 4 without it: channels of every communicator of NCCL. More are faster on NVLink and hold more memory
        nccl_channels: u64, else "none", in 1..=64;
        /// from 64 KiB to 1 GiB, in bytes; 1 MiB without it: the buffer of a channel for each neighbour (`NCCL_BUFFSIZE`, which
        /// has priority)
        nccl_buffer: u64, else "none", in 64 << 10..=1 << 30;
    }
}

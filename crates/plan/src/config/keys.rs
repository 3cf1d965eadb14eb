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
        /// `demo`, `gpt2-124m`, `gpt2-1558m`, `gpt-1.3b`, `gpt-1.4b`, `gpt-22b`, `gpt-175b`, `gpt-1t`, `neox-20b`,
        /// `llama2-7b`, `llama3-8b`, `llama3-70b`, `llama3.1-8b`, `llama3.1-405b`, `llama3.2-1b`, `llama3.2-3b`,
        /// `nemotron4-15b`, `nemotron4-340b`, `mistral-7b`, `qwen2.5-0.5b`, `qwen2.5-7b`, `qwen2.5-72b`,
        /// `qwen3-0.6b`, `qwen3-8b`, `qwen3-32b`, `smollm3-3b`, `phi-4`, `starcoder2-3b`,
        /// `gemma-2b`, `gemma-7b`, `gemma2-2b`, `gemma2-9b`, `gemma2-27b`, `olmo2-1b`, `olmo2-7b`, `olmo2-13b`,
        /// `olmo2-32b`
        preset: String, else "none";
        /// what plans, reports and pages call the model; not the name of another preset
        name: String, else "that of the preset, else `\"custom\"`";
        /// `"gpt"`, `"neox"`, `"llama"`, `"mistral"`, `"qwen2"`, `"qwen3"`, `"smollm3"`, `"phi3"`, `"starcoder2"`,
        /// `"gemma"`, `"gemma2"`, `"olmo2"`: a
        /// [family](huggingface.md#families)
        family: Family, default Family::Gpt;
        /// at least 1
        layers: usize, else "required unless a preset gives it", in 1..=1 << 14;
        /// at least 1: width of the residual stream
        hidden: usize, else "required unless a preset gives it", in 1..=1 << 20;
        /// at least 1: query heads
        heads: usize, else "required unless a preset gives it", in 1..=1 << 12;
        /// a divisor of `heads`
        kv_heads: usize, else "`heads`", in 1..=1 << 12;
        /// at least 1; even with rotary positions
        head_dim: usize, else "`hidden / heads`";
        /// at least 1
        ffn: usize, else "4 · `hidden`; with a gate 8/3 · `hidden`, rounded up to a multiple of 256";
        /// at least 2, and at least that of the data: 128 for the demo corpus
        vocab: usize, else "required unless a preset or the data gives it", in 2..=1 << 24;
        /// the vocabulary is padded to a multiple of `vocab_multiple` · tp
        vocab_multiple: usize, default 1, in 1..=1 << 20;
        /// the longest sample that the model supports; learned positions (gpt) cannot be exceeded
        positions: usize, else "`batch.sequence`", in 1..=1 << 24;
        /// whether the head uses the token table
        tied: bool, else "true for gpt, smollm3, starcoder2, gemma and gemma2, else false";
        /// whether attention and MLP both start from the layer's input; true only for neox
        parallel_residual: bool, else "true for neox, else false";
        /// `"gelu"` (tanh form), `"gelu-exact"` (error function), `"swiglu"`, `"geglu"`: what the [family](huggingface.md#families)
        /// has
        activation: Activation, else "that of the family";
        /// above 0, at most 1
        norm_eps: f64, default 1e-5, in 1e-30..=1.0;
        /// 1 to 1e12
        rotary_base: f64, default 10000.0, in 1.0..=1e12;
        /// 0 to 1; not for gpt
        rotary_fraction: f64, else "neox 0.25, else 1", in 0.0..=1.0;
        rotary_scaling: RotaryScaling;
        /// smollm3 only, at least 1: layers whose number, from 1, is a multiple of this do not rotate
        no_rotary_every: usize, else "4 for smollm3, else none", in 1..=1 << 14;
        /// families with a [sliding window](huggingface.md#families) only, at least 1: a token attends to itself and to the
        /// `sliding_window` - 1 tokens before it
        sliding_window: usize, else "none", in 1..=1 << 24;
        /// the same families, at least 1: layers whose number, from 1, is a multiple of this have no window
        full_attention_every: usize, else "2 for gemma2, else none", in 1..=1 << 14;
        /// the same families: so many of the first layers have no window
        full_attention_first: usize, else "none", in 0..=1 << 14;
        /// families with [soft caps](huggingface.md#families) only, at least 1: scores are divided by its root
        score_width: usize, else "`head_dim`", in 1..=1 << 16;
        /// the same families: scores are bounded by `score_soft_cap` · tanh(score / `score_soft_cap`)
        score_soft_cap: f64, else "that of the family", in 1e-3..=1e6;
        /// the same families: the same for logits
        logit_soft_cap: f64, else "that of the family", in 1e-3..=1e6;
        /// a [Hugging Face folder](huggingface.md) or a checkpoint: the model comes from it, and other keys of
        /// `[model]` must agree with it
        init: String, else "random weights";
        /// 0 to 1000: standard deviation of initial weights, as Megatron's `--init-method-std`; the matrices that end
        /// in the residual stream have `init_std` / √(2 · `layers`). No effect if weights are loaded
        init_std: f64, default 0.02, in 0.0..=1e3;
    }
}

table! {
    RawBatch in "batch" {
        /// tokens of a sample; the model is a preset, or the folder of `model.init`, whose longest sample it is.
        /// Required unless one of them gives it
        sequence: usize, else "that of the model", in 1..=1 << 20;
        /// samples of a micro-batch
        micro: usize, default 1, in 1..=1 << 20;
        /// samples of a step over all replicas: a multiple of `micro` · dp
        global: usize, else "`micro` · dp";
    }
}

table! {
    RawParallel in "parallel" {
        /// a divisor of `heads`, `kv_heads` and `ffn`
        tp: usize, default 1, in 1..=MAX_RANKS;
        /// context parallelism: the ranks that share the tokens of a sample, as [two slices](context-parallelism.md) of
        /// each; `sequence` must be a multiple of 2 · cp
        cp: usize, default 1, in 1..=MAX_RANKS;
        /// `"gather"`, `"ring"`, `"all-to-all"`: how attention [reaches](context-parallelism.md#three-ways) the keys and values of the other ranks of cp; has
        /// no effect if cp is 1
        cp_attention: ContextAttention, default ContextAttention::Gather;
        /// at most `layers`
        pp: usize, default 1, in 1..=MAX_RANKS;
        /// a number; `"auto"` fills `cluster.nodes` if that is given, and is 1 otherwise
        dp: Replicas, default Replicas::Auto;
        /// `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zero-bubble"`: see [schedules](schedules.md)
        schedule: ScheduleKind, default ScheduleKind::OneForwardOneBackward;
        /// chunks per stage; more than 1 only for interleaved
        virtual_stages: usize, else "2 for interleaved, else 1";
        /// a list with the layers of each of the pp · `virtual_stages` chunks
        layers_per_stage: Vec<usize>, else "as even as possible; the first chunks have one more";
        /// needs `micro` · `sequence` to be a multiple of tp; has no effect if tp is 1
        sequence_parallel: bool, default false;
        /// how many block computations ahead sharded weights are gathered
        prefetch: usize, default 1, in 0..=1 << 14;
        /// whether transfers start as early and are waited for as late as possible
        overlap: bool, default true;
        /// whether tensor-parallel products are cut into chunks of rows, whose transfers run beside the next product:
        /// see [overlap](overlap.md); has no effect if tp is 1
        overlap_tp: bool, default false;
    }
}

table! {
    RawSharding in "sharding" {
        /// `"mics"`, `"zero++"`, `"three-level"`: a known [placement](partitioning.md), instead of `zero`; `"zero++"`
        /// and `"three-level"` quantise
        preset: ShardPreset, else "none";
        /// what is sharded over all replicas: 0 nothing, 1 states, 2 also gradients, 3 also weights
        zero: usize, default 0, in 0..=3;
        /// `"none"`, `"package"`, `"node"`, `"pod"`, `"cluster"`: the level to shard weights over; not over more replicas than
        /// gradients
        weights: ShardLevel, else "what `preset` or `zero` means";
        /// `"none"`, `"package"`, `"node"`, `"pod"`, `"cluster"`: the level to shard gradients over; not over more replicas than
        /// states
        gradients: ShardLevel, else "what `preset` or `zero` means";
        /// `"none"`, `"package"`, `"node"`, `"pod"`, `"cluster"`: the level to shard optimizer states over
        states: ShardLevel, else "what `preset` or `zero` means";
        /// `"step"` gathers sharded weights once a step and keeps them
        gather: When, default When::MicroBatch;
        /// `"micro-batch"` needs sharded gradients
        reduce: When, else "`\"micro-batch\"` if gradients are sharded, else `\"step\"`";
        /// `"none"`, `"int8"`: the type in which weights are gathered ([quantisation](quantisation.md)). Gathers from
        /// a secondary shard are in the compute type
        quantize_weights: Quantize, else "`\"int8\"` with the presets `\"zero++\"` and `\"three-level\"`, else `\"none\"`";
        /// `"none"`, `"int8"`: the type in which updated weights are gathered after the optimizer's step
        quantize_refresh: Quantize, else "`quantize_weights` if that key is given, else `\"none\"`";
        /// `"none"`, `"int8"`, `"int4"`: the type in which gradients are reduced
        quantize_gradients: Quantize, else "`\"int4\"` with the presets `\"zero++\"` and `\"three-level\"`, else `\"none\"`";
        /// a power of two from 32 to 4096: quantised numbers that share a scale. Shards are whole blocks
        quantize_block: usize, default 256, in 32..=4096;
        /// `"none"`, `"package"`, `"node"`, `"pod"`, `"cluster"`: the level of a secondary shard of the weights, which later
        /// gathers of a step start from; needs sharded weights
        secondary: ShardLevel, else "what `preset` means, else `\"none\"`";
        /// `"all"`, `"backward"`: which gathers start from the secondary shard: all but the first of a step, or only those
        /// for a backward, [as ZeRO++ was published](partitioning.md#how-it-works)
        secondary_use: SecondaryUse, default SecondaryUse::All;
        /// `"ring"`: one ring over all replicas that share a tensor; `"hierarchical"`: level by level; `"auto"`: the
        /// faster one by the bandwidth of the links
        collectives: Collectives, default Collectives::Auto;
    }
}

table! {
    RawPrecision in "precision" {
        /// `"fp32"`, `"bf16"`, `"fp16"`: weights and activations. In 16 bits there are fp32 master weights
        compute: Compute, default Compute::Fp32;
        /// `"fp32"`, `"compute"`
        gradients: GradientType, default GradientType::Fp32;
        /// `"fp32"`, `"bf16"`: the states of the optimizer, such as Adam's moments
        states: Compute, default Compute::Fp32;
        /// `"compute"`; `"fp8"`: the products of layers in 8 bits, forward and backward, with `compute = "bf16"`. Every
        /// product's sizes must be multiples of 16. See [fp8](fp8.md)
        products: Products, default Products::Compute;
        /// `"tensor"`: a matrix in 8 bits has one scale, from its own largest number
        recipe: Recipe, default Recipe::Tensor;
        /// a number, or `"dynamic"`; only fp16 uses it
        loss_scale: LossScale, default LossScale::Dynamic;
    }
}

table! {
    RawMemory in "memory" {
        /// `"none"`, `"selective"`, `"full"`: see [memory](memory.md)
        recompute: Recompute, default Recompute::None;
        /// `"flash"`; `"plain"` keeps the probabilities
        attention: AttentionKind, default AttentionKind::Flash;
        /// `"all"`, `"auto"`, or a number, at least 1: the tokens of a micro-batch whose logits are in memory at a time.
        /// With fewer than all, the backward [computes the logits again](memory.md#logits). `"auto"` takes as many as
        /// 512 MiB have room for
        head_rows: HeadRows, default HeadRows::All;
    }
}

table! {
    RawOptimizer in "optimizer" {
        /// `"adamw"`, `"lion"`, `"muon"`, `"sgd"`: see [optimizers](optimizers.md)
        name: OptimizerName, default OptimizerName::Adamw;
        /// above 0
        lr: f64, default 3e-4, in 1e-30..=1e6;
        /// 0 to `lr`
        min_lr: f64, else "`lr` / 10", in 0.0..=1e6;
        /// steps of linear warm-up; the last of them has `lr`. `plan` and `train` print a note if the run is shorter
        warmup: u64, default 0, in 0..=MAX_STEPS;
        /// `"cosine"`, `"linear"`, `"sqrt"`, `"constant"`, `"inverse-sqrt"`, `"wsd"`, `"wsd-sqrt"`: the
        /// [learning rate](optimizers.md#learning-rate) after the warm-up
        schedule: RateSchedule, default RateSchedule::Cosine;
        /// at least 1: steps in which the rate falls from `lr` to `min_lr`; not for constant and inverse-sqrt
        decay_steps: u64, else "to the end of the run; wsd and wsd-sqrt: a tenth of `run.steps`", in 1..=MAX_STEPS;
        /// two numbers from 0 to below 1; not for sgd. For muon those of AdamW, which updates what is no matrix of a layer
        betas: Vec<f64>, else "`[0.9, 0.95]`; lion `[0.9, 0.99]`";
        /// above 0, at most 1; adamw and muon only
        eps: f64, else "1e-8", in 1e-30..=1.0;
        /// 0 to below 1; sgd and muon only
        momentum: f64, else "sgd 0.9, muon 0.95";
        /// whether the momentum is Nesterov's; sgd and muon only
        nesterov: bool, else "sgd false, muon true";
        /// `"match-rms-adamw"`, `"original"`: how the rate of a matrix follows from its shape, as PyTorch's `adjust_lr_fn`;
        /// muon only
        adjust_lr: RateAdjustment, else "`\"match-rms-adamw\"` for muon";
        /// 0 or above; not applied to norms and biases
        weight_decay: f64, default 0.1, in 0.0..=1e6;
        /// largest gradient norm; 0 for no clipping
        clip: f64, default 1.0;
        /// 0 to below 1: the factor of the last step's value in a [moving average](optimizers.md#moving-average) of the
        /// weights; 0 for none
        ema: f64, default 0.0, in 0.0..=0.999_999_9;
        /// 0 or above: coefficient z of `z · ln² Σ exp(logits)`, which keeps logits small: its gradient is added to that of
        /// the loss, and the losses of steps and evaluations do not contain it
        z_loss: f64, default 0.0, in 0.0..=1.0;
        /// parameters with a learning rate or a weight decay of their own: a list of `{ parameters = "layer.*.*_bias",
        /// lr_factor = 1.0, weight_decay = 0.0 }`, see [optimizers](optimizers.md#groups)
        groups: Vec<ParameterGroup>, else "none";
    }
}

table! {
    RawData in "data" {
        /// `"demo"`: stories in a generated language with a known entropy, so that a loss can be compared with the best
        /// possible one. Or the prefix of token files (`kintsugi prepare` makes them), or a list of `{ path = "prefix",
        /// weight = 1.0 }`: see [data](data.md)
        source: Sources, else "`\"demo\"`";
        /// the tokenizer of the token files: a `tokenizer.json`, a folder, or `"bytes"`; only for files. Its vocabulary
        /// must fit into `model.vocab`
        tokenizer: String, else "none";
        /// true allows different tokenizers in `model.init`, the files and `tokenizer`; otherwise the run is refused
        allow_other_tokenizer: bool, default false;
        /// the token that ends every document. `generate` stops at it, and an export names it as `eos_token_id`; only
        /// for files
        end_of_document: u32, else "from the files";
        /// token files for validation, in the form of `source`; only for files. All of `source` is then for training.
        /// `[]` is none
        validation: Sources, else "none";
        /// 0 to 0.5: the share of tokens at the end of every file that is for validation; without it the documents that
        /// `prepare` has drawn, or 0.01 if it has drawn none; only for files, and not together with `validation`
        split: f64, else "none";
        /// true: a token attends only to tokens of its own document, as in the `.idx`; only for files. See
        /// [data](data.md#documents)
        mask_documents: bool, default false;
    }
}

table! {
    RawCluster in "cluster" {
        /// `"local"` (as many ranks as the layout has, in one node), `"frontier"`, `"v100"`, `"a100"`, `"h100"`,
        /// `"h200"`, `"b200"`, `"mi300x"`, `"perlmutter"`, `"leonardo"`, `"alps"`, `"jupiter"`, `"dgx-h100-superpod"`,
        /// `"lumi"`, `"summit"`, `"supermuc-ng"`
        preset: String, else "`\"local\"`";
        /// a file with a `[cluster]` table that overrides the preset: your own cluster, or what `calibrate` measured.
        /// `--profile` does the same. See [clusters](clusters.md)
        profile: String, else "none";
        /// nodes to use; the mesh must fit. A note says if it leaves ranks idle. Needs `per_node`
        nodes: usize, else "the preset's", in 1..=1 << 20;
        /// ranks that share a package
        per_package: usize, default 1, in 1..=1 << 10;
        /// ranks that share a node
        per_node: usize, else "all ranks", in 1..=1 << 10;
        /// nodes that share a pod: a leaf switch, a rail group, a dragonfly group. Needs `per_node`. Keys that `links.pod` does not
        /// have are those of `links.cluster`
        nodes_per_pod: usize, else "none", in 1..=1 << 20;
        /// cores of a node that its ranks share, if ranks are threads, or of the one machine that runs all nodes if
        /// links between them are emulated; `calibrate` writes it
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
        /// the nodes of the run in the order of its ranks, as `plan --place` writes them. See [placement](placement.md)
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
        /// of `cluster` only: seconds of a hop inside a node, in a ring that leaves the node. The host posts a network
        /// operation for every hop of such a ring
        inner_latency: f64, else "the node's `latency`";
        /// share that a long transfer reaches
        efficiency: f64, else "0.8";
        /// seconds to begin a transfer
        start: f64, else "10 µs, 20 µs";
        short: ShortSpec;
        /// the number of rings that the library lays over the wires of `graph`, at most
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
        /// seconds from one rank to the next; the link is free for the next transfer meanwhile
        latency: f64, else "0";
    }
}

table! {
    RawRun in "run" {
        /// optimizer steps. With 0 nothing is trained, and the checkpoint has the initial weights
        steps: u64, default 100, in 0..=MAX_STEPS;
        /// at least 1: the length of the run in tokens, instead of `steps`: there are as many as `tokens` / (`batch.global`
        /// · `batch.sequence`), rounded up. `--set` of one replaces the others
        tokens: u64, else "none", in 1..=1 << 60;
        /// above 0: the length of the run in passes over the token files, instead of `steps`: until every source has been
        /// read as often. Only `train` reads the files and knows the number of steps
        epochs: f64, else "none", in 1e-9..=1e9;
        /// seed of weights and data
        seed: u64, default 1;
        /// folder for `metrics.jsonl` and `summary.json`
        out: String, default "out".to_owned();
        /// true continues from the newest whole checkpoint in `out`; a path continues from that checkpoint, or, as
        /// `"out/best"`, from the best one of a run. The same as `--resume`
        resume: Resume, else "false";
        /// steps between [checkpoints](checkpoints.md); with 0 only one at the end
        checkpoint_every: u64, default 0;
        /// how many checkpoints are kept, the newest; with 0 none is saved
        keep: u64, default 2;
        /// how many checkpoints are kept besides the newest: those with the lowest validation loss. Unless it is 0, a
        /// checkpoint is saved after every evaluation: see [the best checkpoints](checkpoints.md#the-best-checkpoints)
        keep_best: u64, default 0;
        /// at least 1: steps between lines with loss, gradient norm, rate, speed and time left. On a terminal a
        /// progress bar shows them, and lines appear only if this is given
        log_every: u64, else "every 10 steps or 30 seconds, whichever comes first", in 1..=MAX_STEPS;
        /// `["tensorboard"]`: event files for TensorBoard in `out/tensorboard`, beside `metrics.jsonl`. See
        /// [report](report.md#tensorboard-and-weights--biases)
        log: Vec<LogFormat>, default Vec::new();
        /// steps between evaluations; 0 for none
        eval_every: u64, default 0;
        /// tokens of the validation split that an evaluation reads, rounded up to whole samples of every source; the
        /// whole split if it has fewer. The demo sets 8192
        eval_tokens: u64, default 65536, in 1..=1 << 50;
        /// at least 1: how many consecutive steps may be skipped because gradients are not finite
        max_skipped: u64, default 20, in 1..=MAX_STEPS;
        /// `"continue"`: a spike of the loss or of the gradient norm changes nothing; `"rollback"`: after a spike, or after
        /// `max_skipped` steps that are not finite, the run goes back to its last good checkpoint and skips the batches of
        /// these steps. Needs `checkpoint_every` and `keep`. See [loss spikes](recovery.md#loss-spikes)
        on_spike: OnSpike, default OnSpike::Continue;
        /// at least 4: the steps before a step that decide whether it is a spike
        spike_window: usize, default 32, in 4..=1024;
        /// above 0: a step is a spike if its loss or its gradient norm is above the median of these steps by so many
        /// deviations
        spike_limit: f64, default 10.0, in 1e-6..=1e6;
        /// at least 1: how many batches are skipped after a spike, the last of them that of the spike; never those before
        /// the checkpoint
        spike_batches: u64, default 1, in 1..=MAX_STEPS;
        /// how often a run goes back; at the next spike it ends
        max_rollbacks: u64, default 10, in 0..=MAX_STEPS;
        /// at least 1: seconds that a rank waits for another before the run fails. The time in which the program is
        /// stopped (`SIGSTOP`, Ctrl-Z) does not count
        communication_timeout: u64, default 600, in 1..=MAX_SECONDS;
        /// after the first step, ranks that are processes wait so many times as long as the longest op of the last steps,
        /// at least 6 s and at most `communication_timeout`, while no rank begins an op; with 0 only
        /// `communication_timeout` counts. See [the watchdog](recovery.md#the-watchdog)
        hang_factor: u64, default 20, in 0..=1_000_000;
        /// steps between checks of weights and states by checksums, for errors of memory that nothing else shows; with 0
        /// none. See [silent corruption](recovery.md#silent-corruption)
        checksum_every: u64, default 0, in 0..=MAX_STEPS;
        /// the same seed and layout give the same bits. The CPU always does this; on a GPU it costs time and memory:
        /// see [the CUDA backend](cuda.md#what-is-deterministic)
        deterministic: bool, else "true on the CPU, false on GPUs";
        /// on a GPU with one rank, a step that repeats is captured as a graph and replayed; false enqueues every kernel
        /// of every step. The same kernels run either way: see [the CUDA backend](cuda.md#one-launch-per-step)
        graph: bool, else "true, false on AMD GPUs";
        /// `"cpu"`; `"cuda"`: an NVIDIA GPU, the first one if ranks are threads, which all of them share; `"hip"`: an
        /// AMD GPU ([what was checked](amd.md)); `"auto"`: see [the device of a run](#the-device-of-a-run)
        device: DeviceName, default DeviceName::Auto;
        /// `"threads"`: the ranks are threads of one process; `"mpi"`: every rank is a process; `"nccl"`: every rank is
        /// a process with a GPU, not with `device = "cpu"`; `"auto"`: if a launcher started several processes, `"nccl"`
        /// if each has a GPU of its own and NCCL is there, else `"mpi"`; `"threads"` otherwise
        /// ([transports](transports.md))
        transport: Transport, default Transport::Auto;
        /// from 1 to 64, 4 without it: channels of every communicator of NCCL. Each keeps one block of the GPU busy
        /// during a transfer and has buffers of its own. More are faster on NVLink and hold more memory
        nccl_channels: u64, else "none", in 1..=64;
        /// from 64 KiB to 1 GiB, in bytes; 1 MiB without it: the buffer of a channel for each neighbour
        /// (`NCCL_BUFFSIZE`). A variable of that name in the environment has priority
        nccl_buffer: u64, else "none", in 64 << 10..=1 << 30;
    }
}

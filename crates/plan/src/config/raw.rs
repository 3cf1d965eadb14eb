//! The configuration as written: every key is optional, and only names and types are checked.

use kintsugi_spec::{Activation, DeviceSpec, Family, FrameworkSpec, RotaryScaling, ShortSpec, Wire};
use serde::{Deserialize, Serialize};

use super::words::{
    Collectives, DeviceName, OptimizerName, Quantize, Replicas, ShardLevel, ShardPreset, Sources, Transport,
};
use crate::{
    AttentionKind, Compute, GradientType, LogFormat, LossScale, RateSchedule, Recompute, Resume,
    ScheduleKind, When,
};

/// Declares a table of the configuration: all keys optional, unknown ones refused.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($key:ident: $type:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, Deserialize, Serialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct $name { $(pub(super) $key: Option<$type>),+ }
    };
}

/// The whole configuration. A missing table is empty.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawConfig {
    pub(super) model: RawModel,
    pub(super) batch: RawBatch,
    pub(super) parallel: RawParallel,
    pub(super) sharding: RawSharding,
    pub(super) precision: RawPrecision,
    pub(super) memory: RawMemory,
    pub(super) optimizer: RawOptimizer,
    pub(super) data: RawData,
    pub(super) cluster: RawCluster,
    pub(super) framework: FrameworkSpec,
    pub(super) run: RawRun,
}

table!(RawModel {
    preset: String,
    family: Family,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    vocab_multiple: usize,
    positions: usize,
    tied: bool,
    parallel_residual: bool,
    activation: Activation,
    norm_eps: f64,
    rotary_base: f64,
    rotary_fraction: f64,
    rotary_scaling: RotaryScaling,
    init: String,
    init_std: f64,
});

table!(RawBatch { sequence: usize, micro: usize, global: usize });

table!(RawParallel {
    tp: usize,
    pp: usize,
    dp: Replicas,
    schedule: ScheduleKind,
    virtual_stages: usize,
    layers_per_stage: Vec<usize>,
    sequence_parallel: bool,
    prefetch: usize,
    overlap: bool,
    overlap_tp: bool,
});

table!(RawSharding {
    preset: ShardPreset,
    zero: usize,
    weights: ShardLevel,
    gradients: ShardLevel,
    states: ShardLevel,
    gather: When,
    reduce: When,
    quantize_weights: Quantize,
    quantize_refresh: Quantize,
    quantize_gradients: Quantize,
    quantize_block: usize,
    secondary: ShardLevel,
    collectives: Collectives,
});

table!(RawPrecision { compute: Compute, gradients: GradientType, states: Compute, loss_scale: LossScale });

table!(RawMemory { recompute: Recompute, attention: AttentionKind });

table!(RawOptimizer {
    name: OptimizerName,
    lr: f64,
    min_lr: f64,
    warmup: u64,
    schedule: RateSchedule,
    decay_steps: u64,
    betas: Vec<f64>,
    eps: f64,
    weight_decay: f64,
    clip: f64,
});

table!(RawData {
    source: Sources,
    tokenizer: String,
    allow_other_tokenizer: bool,
    end_of_document: u32,
    validation: Sources,
    split: f64,
    mask_documents: bool,
});

table!(RawCluster {
    preset: String,
    profile: String,
    nodes: usize,
    per_package: usize,
    per_node: usize,
    cores: usize,
    price: f64,
    device: DeviceSpec,
    links: RawLinks,
    graph: Vec<Wire>,
    emulated: RawEmulatedLinks,
});

table!(RawLinks { package: RawLink, node: RawLink, cluster: RawLink });

table!(RawLink {
    bandwidth: f64,
    latency: f64,
    inner_latency: f64,
    efficiency: f64,
    start: f64,
    short: ShortSpec,
    rings: usize
});

table!(RawEmulatedLinks { package: RawEmulatedLink, node: RawEmulatedLink, cluster: RawEmulatedLink });

table!(RawEmulatedLink { bandwidth: f64, latency: f64 });

table!(RawRun {
    steps: u64,
    seed: u64,
    out: String,
    resume: Resume,
    checkpoint_every: u64,
    keep: u64,
    keep_best: u64,
    log_every: u64,
    log: Vec<LogFormat>,
    eval_every: u64,
    eval_tokens: u64,
    max_skipped: u64,
    communication_timeout: u64,
    deterministic: bool,
    graph: bool,
    device: DeviceName,
    transport: Transport,
    nccl_channels: u64,
    nccl_buffer: u64,
});

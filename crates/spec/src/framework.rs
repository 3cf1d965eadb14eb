//! The overheads of a framework: what its kernels and its host add to the plan.
//!
//! A framework profile is a part of a configuration: keys that this engine supports too, and these scalars.

use serde::{Deserialize, Serialize};

use crate::kernels::KernelsSpec;

/// The overheads of a framework. The default adds nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools, reason = "choices that do not depend on each other")]
pub struct FrameworkSpec {
    /// The preset's name; `None` for this engine.
    pub preset: Option<String>,
    /// Seconds of every step in which no rank computes: data, host, logging.
    pub step: f64,
    /// How often the pipeline is filled and drained in a step: the micro-batches run in this many portions.
    pub fills: usize,
    /// CPU seconds to launch one of its kernels. A block takes at least the sum of its launch times.
    pub host: f64,
    /// CPU seconds of a tensor-parallel collective, for each rank of its group (multiplied by tp).
    pub host_collective: f64,
    /// The same, if the stages of a pipeline are on several nodes.
    pub host_staged: f64,
    /// Which kernels it runs where this engine runs one.
    pub kernels: KernelsSpec,
    /// The share of the device's rate that its matrix products reach.
    pub products: f64,
    /// Bytes that dropout moves for each element it is applied to (attention scores and both branches of a layer).
    pub dropout: f64,
    /// The share of the device's flash-attention rate that it reaches.
    pub attention: f64,
    /// How often the backward repeats the attention of the forward. It describes selective recomputation as in arXiv
    /// 2205.05198, with the scores in memory.
    pub attention_again: f64,
    /// The share of a layer's products that selective recomputation repeats: torchtitan's keeps every second product.
    pub products_again: f64,
    /// Whether full recomputation runs the whole layer again, including its last product and sum.
    pub recompute_whole: bool,
    /// Whether ranks that hold the same rows each send one part of a message (arXiv 2104.04473, section 4.1).
    pub scatter_messages: bool,
    /// The share of the links between nodes that a collective reaches if several ranks of a node take part.
    pub between_nodes: f64,
    /// The same for collectives of replicas, whose transfers are larger; `None` for the same share.
    pub replicas_between_nodes: Option<f64>,
    /// Whether every rank sums whole gradients, although it updates only a shard: ZeRO-1 without a reduce-scatter.
    pub whole_sums: bool,
    /// Whether it sums 16-bit gradients in fp32, which is twice the bytes.
    pub fp32_sums: bool,
    /// Bytes of gradients that it reduces at once; `None` for those of a whole layer. PyTorch's `DistributedDataParallel` has
    /// 25 MiB.
    pub bucket: Option<f64>,
    /// Into how many collectives it divides a gather of a layer's weights: DeepSpeed gathers module by module.
    pub gather_pieces: usize,
    /// Whether its library uses a tree if that is faster than a ring, as NCCL does. Our own transports use rings.
    pub trees: bool,
    /// How much slower kernels are while a collective runs beside them.
    pub interference: f64,
    /// Bytes of memory beside tensors that its allocator reserves, whatever the plan.
    pub reserve: f64,
    /// The memory that its allocator reserves beyond tensors, as a share of them.
    pub allocator: f64,
    /// Extra bytes per logit of this rank compared with Kintsugi, at the peak of the head.
    pub logit_bytes: f64,
    /// Whether every tensor-parallel rank has the logits of the whole vocabulary, and not only of its part.
    pub whole_logits: bool,
    /// Extra bytes per parameter of this rank compared with Kintsugi: 16-bit gradients beside the fp32 ones that they are
    /// added to.
    pub parameter_bytes: f64,
    /// Bytes per parameter of this rank in communication buffers, if there are replicas: buckets of gradients.
    pub bucket_bytes: f64,
    /// The activations that it keeps, as a multiple of ours.
    pub kept: f64,
    /// The same under tensor parallelism, whose collectives need buffers of other sizes; `None` for the same factor.
    pub kept_tp: Option<f64>,
    /// Tensors of all rows that each layer keeps under sequence parallelism. Our engine gathers them again instead.
    pub gathered: f64,
    /// Temporary bytes per element of the weight gradient of a layer's first MLP matrix, in addition to the gradient.
    pub temporary: f64,
    /// What it can run. A search proposes nothing else.
    pub supports: Vec<Support>,
}

/// The values of a key that a framework can run. Keys that are not listed are not restricted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Support {
    /// A key that a search varies.
    pub key: String,
    /// The values.
    pub values: Vec<String>,
    /// Why it runs no others.
    pub reason: String,
}

impl Default for FrameworkSpec {
    fn default() -> Self {
        FrameworkSpec {
            preset: None,
            step: 0.0,
            fills: 1,
            host: 0.0,
            host_collective: 0.0,
            host_staged: 0.0,
            kernels: KernelsSpec::default(),
            products: 1.0,
            dropout: 0.0,
            attention: 1.0,
            attention_again: 0.0,
            products_again: 0.0,
            recompute_whole: false,
            scatter_messages: false,
            between_nodes: 1.0,
            replicas_between_nodes: None,
            whole_sums: false,
            fp32_sums: false,
            bucket: None,
            gather_pieces: 1,
            trees: false,
            interference: 0.0,
            reserve: 0.0,
            allocator: 0.0,
            logit_bytes: 0.0,
            whole_logits: false,
            parameter_bytes: 0.0,
            bucket_bytes: 0.0,
            kept: 1.0,
            kept_tp: None,
            gathered: 0.0,
            temporary: 0.0,
            supports: Vec::new(),
        }
    }
}

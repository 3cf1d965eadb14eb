//! The overheads of a framework: what its kernels and its host add to the plan.
//!
//! A framework profile is a part of a configuration: keys that this engine supports too, and these scalars.

use serde::{Deserialize, Serialize};

use crate::keeps::KeepsSpec;
use crate::kernels::KernelsSpec;
use crate::key::spec_table;

spec_table! {
    /// The overheads of a framework. The default adds nothing.
    #[allow(clippy::struct_excessive_bools, reason = "choices that do not depend on each other")]
    pub struct FrameworkSpec {
        /// `"megatron-2021"`, `"megatron-2022"`, `"megatron-deepspeed"`, `"deepspeed-zero3"`, `"frontier-megatron"`,
        /// `"nanotron"`, `"llm-foundry"`, `"torchtitan"`, `"torchtitan-eager"`, `"aleph-alpha"`, `"megatron-core"`, `"nemo"`; for one
        /// that is not listed `"megatron"` (fused kernels) or `"eager"`
        preset: Option<String>, else "none";
        /// seconds of every step in which no rank computes
        step: f64, default 0.0;
        /// how often the pipeline is filled in a step
        fills: usize, default 1;
        /// seconds of the host for each kernel of the framework
        host: f64, default 0.0;
        /// the same for each collective of tp and rank
        host_collective: f64, default 0.0;
        /// the same with stages on several nodes
        host_staged: f64, default 0.0;
        /// Which kernels it runs where this engine runs one.
        kernels: KernelsSpec;
        /// share of the device's rate that matrix products reach
        products: f64, default 1.0;
        /// bytes for each attention score, and for each element of both branches of a layer
        dropout: f64, default 0.0;
        /// share of the device's flash-attention rate that is reached
        attention: f64, default 1.0;
        /// how much attention the backward repeats: selective recomputation as in arXiv 2205.05198
        attention_again: f64, default 0.0;
        /// share of a layer's products that selective recomputation repeats
        products_again: f64, default 0.0;
        /// whether full recomputation repeats the last product too
        recompute_whole: bool, default false;
        /// whether ranks that hold the same rows each send one part of a message (arXiv 2104.04473, section 4.1)
        scatter_messages: bool, default false;
        /// share of the links between nodes that collectives reach
        between_nodes: f64, default 1.0;
        /// the same for collectives of replicas
        replicas_between_nodes: Option<f64>, else "`between_nodes`";
        /// whether whole gradients are summed if a rank needs only a shard: ZeRO-1 without a reduce-scatter
        whole_sums: bool, default false;
        /// whether 16-bit gradients are summed in fp32
        fp32_sums: bool, default false;
        /// bytes of gradients that are reduced at once
        bucket: Option<f64>, else "a whole layer";
        /// into how many collectives a gather of a layer's weights is divided
        gather_pieces: usize, default 1;
        /// whether all-reduces use a tree if that is faster than a ring, as NCCL does
        trees: bool, default false, else "false (true in every preset)";
        /// how much slower kernels are during a collective
        interference: f64, default 0.0;
        /// bytes beside tensors, whatever the plan
        reserve: f64, default 0.0;
        /// memory that its allocator reserves beyond tensors, as a share of them
        allocator: f64, default 0.0;
        /// bytes for each logit, from the loss to its backward
        logit_bytes: f64, default 0.0;
        /// whether every tensor-parallel rank has all logits
        whole_logits: bool, default false;
        /// bytes for each parameter, such as a second copy of gradients
        parameter_bytes: f64, default 0.0;
        /// bytes of communication buffers for each parameter, if there are replicas
        bucket_bytes: f64, default 0.0;
        /// factor on activations
        kept: f64, default 1.0;
        /// the same if tp is more than 1
        kept_tp: Option<f64>, else "`kept`";
        /// What a layer keeps beyond ours, tensor by tensor.
        keeps: KeepsSpec;
        /// bytes that are always held for each weight of one layer: gradients that no kernel reads
        layer_gradients: f64, default 0.0;
        /// a list of `{ key, values, reason }`: the values of a key that the framework can run. A search proposes nothing else
        supports: Vec<Support>, default Vec::new();
    }
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

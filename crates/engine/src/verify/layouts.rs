//! The layouts that `verify` runs. Each is a list of settings that are applied to the given configuration.

use std::fmt;

/// A parallel layout, as settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its name in the output.
    pub name: String,
    /// The settings of the model, shared with the reference.
    pub model: Vec<String>,
    /// The settings of the layout.
    pub settings: Vec<String>,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A layout: name, `[tp, pp, dp]`, ZeRO stage, and further settings.
struct LayoutSpec(&'static str, [usize; 3], usize, &'static str);

/// The layouts of the given model's family. Most blocks of codes are short, because parameters of a model for tests are, too.
const COMMON: [LayoutSpec; 68] = [
    LayoutSpec("dp 2", [1, 1, 2], 0, ""),
    LayoutSpec("dp 4, ZeRO-1", [1, 1, 4], 1, ""),
    LayoutSpec("dp 2, ZeRO-2", [1, 1, 2], 2, ""),
    LayoutSpec("dp 4, ZeRO-2, reduce once", [1, 1, 4], 2, "sharding.reduce=step"),
    LayoutSpec("dp 2, ZeRO-3", [1, 1, 2], 3, ""),
    LayoutSpec("dp 4, ZeRO-3, gather once", [1, 1, 4], 3, "sharding.gather=step sharding.reduce=step"),
    LayoutSpec("dp 2, ZeRO-3, no prefetch", [1, 1, 2], 3, "parallel.prefetch=0 parallel.overlap=false"),
    LayoutSpec("tp 2", [2, 1, 1], 0, ""),
    LayoutSpec("tp 4", [4, 1, 1], 0, ""),
    LayoutSpec("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
    LayoutSpec(
        "tp 4, sequence parallel, full",
        [4, 1, 1],
        0,
        "parallel.sequence_parallel=true memory.recompute=full",
    ),
    LayoutSpec("selective", [1, 1, 1], 0, "memory.recompute=selective"),
    LayoutSpec("full", [1, 1, 1], 0, "memory.recompute=full"),
    LayoutSpec("plain attention", [1, 1, 1], 0, "memory.attention=plain"),
    LayoutSpec("pp 2, GPipe", [1, 2, 1], 0, "parallel.schedule=gpipe"),
    LayoutSpec("pp 4, 1F1B", [1, 4, 1], 0, ""),
    LayoutSpec("pp 3, 1F1B, uneven", [1, 3, 1], 0, ""),
    LayoutSpec("pp 2, interleaved", [1, 2, 1], 0, "parallel.schedule=interleaved parallel.virtual_stages=2"),
    LayoutSpec("pp 4, zero-bubble", [1, 4, 1], 0, "parallel.schedule=zero-bubble"),
    LayoutSpec(
        "pp 2, zero-bubble, full",
        [1, 2, 1],
        0,
        "parallel.schedule=zero-bubble memory.recompute=full",
    ),
    LayoutSpec(
        "pp 2, zero-bubble, selective",
        [1, 2, 1],
        0,
        "parallel.schedule=zero-bubble memory.recompute=selective",
    ),
    LayoutSpec("tp 2, pp 2, dp 2, ZeRO-1", [2, 2, 2], 1, ""),
    LayoutSpec("tp 2, pp 2, dp 2, ZeRO-2, GPipe", [2, 2, 2], 2, "parallel.schedule=gpipe"),
    LayoutSpec(
        "tp 2, pp 2, dp 2, ZeRO-3, interleaved, full",
        [2, 2, 2],
        3,
        "parallel.schedule=interleaved parallel.virtual_stages=2 memory.recompute=full",
    ),
    LayoutSpec(
        "tp 2, pp 2, dp 2, ZeRO-3, sequence parallel, selective",
        [2, 2, 2],
        3,
        "parallel.sequence_parallel=true memory.recompute=selective",
    ),
    LayoutSpec(
        "tp 2, pp 2, dp 2, ZeRO-3, zero-bubble, sequence parallel",
        [2, 2, 2],
        3,
        "parallel.schedule=zero-bubble parallel.sequence_parallel=true",
    ),
    LayoutSpec("pp 4, dp 2, ZeRO-1, zero-bubble", [1, 4, 2], 1, "parallel.schedule=zero-bubble"),
    LayoutSpec("pp 3, dp 2, ZeRO-2, zero-bubble", [1, 3, 2], 2, "parallel.schedule=zero-bubble"),
    LayoutSpec(
        "pp 4, dp 2, ZeRO-3, zero-bubble, full, no overlap",
        [1, 4, 2],
        3,
        "parallel.schedule=zero-bubble memory.recompute=full parallel.overlap=false",
    ),
    LayoutSpec(
        "pp 2, dp 2, ZeRO-3, zero-bubble, reduce once",
        [1, 2, 2],
        3,
        "parallel.schedule=zero-bubble sharding.reduce=step",
    ),
    LayoutSpec(
        "tp 4, dp 2, ZeRO-3, sequence parallel, tp overlap",
        [4, 1, 2],
        3,
        "parallel.sequence_parallel=true parallel.overlap_tp=true",
    ),
    LayoutSpec(
        "tp 2, dp 4, ZeRO-2, full, tp overlap",
        [2, 1, 4],
        2,
        "memory.recompute=full parallel.overlap_tp=true",
    ),
    LayoutSpec(
        "pp 2, dp 4, ZeRO-3, GPipe, gather once",
        [1, 2, 4],
        3,
        "parallel.schedule=gpipe sharding.gather=step",
    ),
    LayoutSpec(
        "dp 4, hierarchical sums",
        [1, 1, 4],
        0,
        "cluster.per_node=2 sharding.collectives=hierarchical",
    ),
    LayoutSpec("dp 4, states over the node", [1, 1, 4], 0, "cluster.per_node=2 sharding.states=node"),
    LayoutSpec("dp 4, MiCS", [1, 1, 4], 0, "cluster.per_node=2 sharding.preset=mics"),
    LayoutSpec(
        "dp 4, ZeRO++ without codes",
        [1, 1, 4],
        0,
        "cluster.per_node=2 sharding.preset=zero++ sharding.quantize_weights=none sharding.quantize_gradients=none",
    ),
    LayoutSpec(
        "dp 8, three levels without codes",
        [1, 1, 8],
        0,
        "cluster.per_package=2 cluster.per_node=4 sharding.preset=three-level sharding.quantize_weights=none \
         sharding.quantize_gradients=none",
    ),
    LayoutSpec(
        "dp 8, ZeRO-3, hierarchical, full",
        [1, 1, 8],
        3,
        "cluster.per_package=2 cluster.per_node=4 sharding.collectives=hierarchical memory.recompute=full",
    ),
    LayoutSpec(
        "pp 2, dp 4, weights over the node, zero-bubble, reduce once",
        [1, 2, 4],
        0,
        "cluster.per_node=2 sharding.weights=node sharding.gradients=node \
         sharding.states=cluster sharding.reduce=step parallel.schedule=zero-bubble",
    ),
    LayoutSpec(
        "tp 2, pp 2, dp 4, ZeRO++ without codes, interleaved",
        [2, 2, 4],
        0,
        "cluster.per_node=4 sharding.preset=zero++ parallel.schedule=interleaved parallel.virtual_stages=2 \
         parallel.sequence_parallel=true memory.recompute=full sharding.quantize_weights=none \
         sharding.quantize_gradients=none",
    ),
    LayoutSpec(
        "dp 4, ZeRO++",
        [1, 1, 4],
        0,
        "cluster.per_node=2 sharding.preset=zero++ sharding.quantize_block=32",
    ),
    LayoutSpec(
        "dp 4, ZeRO++ as published",
        [1, 1, 4],
        0,
        "cluster.per_node=2 sharding.preset=zero++ sharding.secondary_use=backward sharding.quantize_block=32",
    ),
    LayoutSpec(
        "dp 4, ZeRO++ in int8",
        [1, 1, 4],
        0,
        "cluster.per_node=2 sharding.preset=zero++ sharding.quantize_gradients=int8 sharding.quantize_block=32",
    ),
    LayoutSpec(
        "dp 4, ZeRO-1 in int8",
        [1, 1, 4],
        1,
        "sharding.quantize_weights=int8 sharding.quantize_gradients=int8 sharding.quantize_block=32",
    ),
    LayoutSpec(
        "dp 8, three levels",
        [1, 1, 8],
        0,
        "cluster.per_package=2 cluster.per_node=4 sharding.preset=three-level",
    ),
    LayoutSpec(
        "dp 8, ZeRO-3 in int8, hierarchical, gather once",
        [1, 1, 8],
        3,
        "cluster.per_package=2 cluster.per_node=4 sharding.collectives=hierarchical sharding.gather=step \
         sharding.quantize_weights=int8 sharding.quantize_gradients=int8 sharding.quantize_block=32",
    ),
    LayoutSpec(
        "pp 2, dp 4, three levels in int8, zero-bubble, reduce once",
        [1, 2, 4],
        0,
        "cluster.per_package=2 cluster.per_node=4 sharding.preset=three-level sharding.states=cluster \
         sharding.quantize_gradients=int8 sharding.quantize_block=32 sharding.reduce=step \
         parallel.schedule=zero-bubble",
    ),
    LayoutSpec(
        "tp 2, pp 2, dp 4, ZeRO++ in int8, interleaved, full",
        [2, 2, 4],
        0,
        "cluster.per_node=4 sharding.preset=zero++ sharding.quantize_gradients=int8 sharding.quantize_block=32 \
         parallel.schedule=interleaved parallel.virtual_stages=2 parallel.sequence_parallel=true \
         memory.recompute=full",
    ),
    LayoutSpec(
        "tp 2, dp 2, ZeRO-3, sequence parallel, tp overlap, logits of 10 rows",
        [2, 1, 2],
        3,
        "parallel.sequence_parallel=true parallel.overlap_tp=true memory.head_rows=10",
    ),
    LayoutSpec(
        "pp 2, dp 2, ZeRO-1, zero-bubble, logits of 10 rows",
        [1, 2, 2],
        1,
        "parallel.schedule=zero-bubble memory.head_rows=10",
    ),
    LayoutSpec("cp 2", [1, 1, 1], 0, "parallel.cp=2"),
    LayoutSpec("cp 4, ZeRO-1", [1, 1, 1], 1, "parallel.cp=4"),
    LayoutSpec("cp 2, dp 2, ZeRO-3", [1, 1, 2], 3, "parallel.cp=2"),
    LayoutSpec("cp 4, ZeRO-2, full", [1, 1, 1], 2, "parallel.cp=4 memory.recompute=full"),
    LayoutSpec("tp 2, cp 2", [2, 1, 1], 0, "parallel.cp=2"),
    LayoutSpec(
        "tp 2, cp 4, sequence parallel, selective",
        [2, 1, 1],
        0,
        "parallel.cp=4 parallel.sequence_parallel=true memory.recompute=selective",
    ),
    LayoutSpec(
        "tp 2, cp 2, dp 2, ZeRO-3, sequence parallel, tp overlap",
        [2, 1, 2],
        3,
        "parallel.cp=2 parallel.sequence_parallel=true parallel.overlap_tp=true",
    ),
    LayoutSpec("pp 2, cp 2, GPipe", [1, 2, 1], 0, "parallel.cp=2 parallel.schedule=gpipe"),
    LayoutSpec(
        "pp 2, cp 2, dp 2, ZeRO-2, zero-bubble",
        [1, 2, 2],
        2,
        "parallel.cp=2 parallel.schedule=zero-bubble",
    ),
    LayoutSpec(
        "tp 2, pp 2, cp 2, ZeRO-3, interleaved, full",
        [2, 2, 1],
        3,
        "parallel.cp=2 parallel.schedule=interleaved parallel.virtual_stages=2 memory.recompute=full",
    ),
    LayoutSpec(
        "cp 2, dp 4, three levels without codes",
        [1, 1, 4],
        0,
        "parallel.cp=2 cluster.per_package=2 cluster.per_node=4 sharding.preset=three-level \
         sharding.quantize_weights=none sharding.quantize_gradients=none",
    ),
    LayoutSpec("cp 4, ring", [1, 1, 1], 0, "parallel.cp=4 parallel.cp_attention=ring"),
    LayoutSpec(
        "tp 2, cp 2, dp 2, ZeRO-3, ring, sequence parallel",
        [2, 1, 2],
        3,
        "parallel.cp=2 parallel.cp_attention=ring parallel.sequence_parallel=true",
    ),
    LayoutSpec(
        "pp 2, cp 4, ZeRO-1, ring, zero-bubble, full",
        [1, 2, 1],
        1,
        "parallel.cp=4 parallel.cp_attention=ring parallel.schedule=zero-bubble memory.recompute=full",
    ),
    LayoutSpec("cp 4, all-to-all", [1, 1, 1], 0, "parallel.cp=4 parallel.cp_attention=all-to-all"),
    LayoutSpec(
        "tp 2, cp 2, dp 2, ZeRO-3, all-to-all, sequence parallel",
        [2, 1, 2],
        3,
        "parallel.cp=2 parallel.cp_attention=all-to-all parallel.sequence_parallel=true",
    ),
    LayoutSpec(
        "pp 2, cp 2, dp 2, ZeRO-2, all-to-all, interleaved, full",
        [1, 2, 2],
        2,
        "parallel.cp=2 parallel.cp_attention=all-to-all parallel.schedule=interleaved parallel.virtual_stages=2 \
         memory.recompute=full",
    ),
];

/// The layouts of the other families.
const FAMILIES: [LayoutSpec; 8] = [
    LayoutSpec("cp 4, ring", [1, 1, 1], 0, "parallel.cp=4 parallel.cp_attention=ring"),
    LayoutSpec(
        "cp 4, dp 2, ZeRO-3, all-to-all",
        [1, 1, 2],
        3,
        "parallel.cp=4 parallel.cp_attention=all-to-all",
    ),
    LayoutSpec(
        "tp 2, cp 2, dp 2, ZeRO-1, sequence parallel",
        [2, 1, 2],
        1,
        "parallel.cp=2 parallel.sequence_parallel=true",
    ),
    LayoutSpec(
        "tp 2, sequence parallel, tp overlap",
        [2, 1, 1],
        0,
        "parallel.sequence_parallel=true parallel.overlap_tp=true",
    ),
    LayoutSpec("tp 2, pp 2, dp 2, ZeRO-1", [2, 2, 2], 1, ""),
    LayoutSpec(
        "pp 4, zero-bubble, selective",
        [1, 4, 1],
        0,
        "parallel.schedule=zero-bubble memory.recompute=selective",
    ),
    LayoutSpec(
        "tp 2, pp 2, dp 2, ZeRO-3, interleaved, full",
        [2, 2, 2],
        3,
        "parallel.schedule=interleaved parallel.virtual_stages=2 memory.recompute=full",
    ),
    LayoutSpec("dp 2, ZeRO-3, plain attention", [1, 1, 2], 3, "memory.attention=plain"),
];

/// The layouts of families that differ in a feature from another one.
const FEATURES: [LayoutSpec; 4] = [
    LayoutSpec("cp 2, dp 2, ZeRO-2, full", [1, 1, 2], 2, "parallel.cp=2 memory.recompute=full"),
    LayoutSpec(
        "tp 2, sequence parallel, selective",
        [2, 1, 1],
        0,
        "parallel.sequence_parallel=true memory.recompute=selective",
    ),
    LayoutSpec(
        "tp 2, pp 2, dp 2, ZeRO-3, zero-bubble, full",
        [2, 2, 2],
        3,
        "parallel.schedule=zero-bubble memory.recompute=full",
    ),
    LayoutSpec(
        "dp 8, three levels without codes",
        [1, 1, 8],
        0,
        "cluster.per_package=2 cluster.per_node=4 sharding.preset=three-level sharding.quantize_weights=none \
         sharding.quantize_gradients=none",
    ),
];

/// More layouts for sliding windows: slices of samples.
const WINDOWS: [LayoutSpec; 3] = [
    LayoutSpec("cp 2", [1, 1, 1], 0, "parallel.cp=2"),
    LayoutSpec("cp 4, ring", [1, 1, 1], 0, "parallel.cp=4 parallel.cp_attention=ring"),
    LayoutSpec("cp 2, all-to-all", [1, 1, 1], 0, "parallel.cp=2 parallel.cp_attention=all-to-all"),
];

/// The layouts of the other optimizers.
const OPTIMIZERS: [LayoutSpec; 5] = [
    LayoutSpec("tp 2, dp 2", [2, 1, 2], 0, ""),
    LayoutSpec("tp 2, sequence parallel, dp 2, ZeRO-1", [2, 1, 2], 1, "parallel.sequence_parallel=true"),
    LayoutSpec("pp 2, dp 2, ZeRO-2", [1, 2, 2], 2, ""),
    LayoutSpec("tp 2, pp 2, dp 2, ZeRO-3", [2, 2, 2], 3, ""),
    LayoutSpec(
        "dp 8, three levels without codes",
        [1, 1, 8],
        0,
        "cluster.per_package=2 cluster.per_node=4 sharding.preset=three-level sharding.quantize_weights=none \
         sharding.quantize_gradients=none",
    ),
];

/// More layouts for frozen weights: whole frozen stages, and every kind of backward.
const FROZEN: [LayoutSpec; 5] = [
    LayoutSpec("pp 4, 1F1B", [1, 4, 1], 0, ""),
    LayoutSpec("pp 2, GPipe, selective", [1, 2, 1], 0, "parallel.schedule=gpipe memory.recompute=selective"),
    LayoutSpec(
        "tp 2, pp 2, dp 2, ZeRO-3, zero-bubble, full",
        [2, 2, 2],
        3,
        "parallel.schedule=zero-bubble parallel.sequence_parallel=true memory.recompute=full",
    ),
    LayoutSpec(
        "pp 2, dp 2, ZeRO-2, interleaved, logits of 10 rows",
        [1, 2, 2],
        2,
        "parallel.schedule=interleaved parallel.virtual_stages=2 memory.head_rows=10",
    ),
    LayoutSpec("cp 4, ring", [1, 1, 1], 0, "parallel.cp=4 parallel.cp_attention=ring"),
];

/// The layouts of the 16-bit types.
const PRECISIONS: [LayoutSpec; 7] = [
    LayoutSpec("cp 4, ring", [1, 1, 1], 0, "parallel.cp=4 parallel.cp_attention=ring"),
    LayoutSpec("cp 2, all-to-all", [1, 1, 1], 0, "parallel.cp=2 parallel.cp_attention=all-to-all"),
    LayoutSpec("cp 2, dp 2, ZeRO-1", [1, 1, 2], 1, "parallel.cp=2"),
    LayoutSpec("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
    LayoutSpec("tp 2, pp 2, dp 2, ZeRO-1, tp overlap", [2, 2, 2], 1, "parallel.overlap_tp=true"),
    LayoutSpec("dp 4, ZeRO-3, full", [1, 1, 4], 3, "memory.recompute=full"),
    LayoutSpec(
        "dp 4, ZeRO++",
        [1, 1, 4],
        0,
        "cluster.per_node=2 sharding.preset=zero++ sharding.quantize_block=32",
    ),
];

/// The layouts of products in 8 bits.
const PRODUCTS: [LayoutSpec; 6] = [
    LayoutSpec("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
    // Rows of a rank are multiples of 16, also with the short samples of the tests.
    LayoutSpec("cp 2, ZeRO-1", [1, 1, 1], 1, "parallel.cp=2 batch.micro=2"),
    LayoutSpec("tp 2, pp 2, dp 2, ZeRO-1", [2, 2, 2], 1, ""),
    LayoutSpec("pp 4, zero-bubble", [1, 4, 1], 0, "parallel.schedule=zero-bubble"),
    LayoutSpec("dp 4, ZeRO-3, full", [1, 1, 4], 3, "memory.recompute=full"),
    LayoutSpec("selective", [1, 1, 1], 0, "memory.recompute=selective"),
];

/// All layouts: those of the given model's family, some of the other families if `all_families`, some of the other
/// optimizers, some with frozen weights, some in each 16-bit type, and some with products in 8 bits.
pub fn layouts(all_families: bool) -> Vec<Layout> {
    let mut layouts: Vec<Layout> = COMMON.iter().map(|short| layout("", "", short)).collect();
    if all_families {
        let neox = "model.family=neox model.tied=false model.rotary_fraction=0.25";
        let llama = "model.family=llama model.tied=false model.kv_heads=2";
        layouts.extend(FAMILIES.iter().map(|short| layout("neox: ", neox, short)));
        layouts.extend(FAMILIES.iter().map(|short| layout("llama: ", llama, short)));
        let qwen2 = "model.family=qwen2 model.tied=false model.kv_heads=2";
        let qwen3 = "model.family=qwen3 model.tied=false model.kv_heads=2";
        let smollm3 = "model.family=smollm3 model.kv_heads=2 model.no_rotary_every=2";
        layouts.extend(FEATURES.iter().map(|short| layout("qwen2: ", qwen2, short)));
        layouts.extend(FEATURES.iter().map(|short| layout("qwen3: ", qwen3, short)));
        layouts.extend(FEATURES.iter().map(|short| layout("smollm3: ", smollm3, short)));
        let windows = "model.family=mistral model.tied=false model.kv_heads=2 model.sliding_window=5 \
                       model.full_attention_every=2";
        layouts.extend(FEATURES.iter().map(|short| layout("mistral: ", windows, short)));
        layouts.extend(WINDOWS.iter().map(|short| layout("mistral: ", windows, short)));
        let gemma2 = "model.family=gemma2 model.kv_heads=2 model.sliding_window=5 model.score_soft_cap=0.5 \
                      model.logit_soft_cap=2.0";
        layouts.extend(FEATURES.iter().map(|short| layout("gemma2: ", gemma2, short)));
        layouts.extend(WINDOWS.iter().map(|short| layout("gemma2: ", gemma2, short)));
        let olmo2 = "model.family=olmo2 model.tied=false model.kv_heads=2";
        layouts.extend(FEATURES.iter().map(|short| layout("olmo2: ", olmo2, short)));
    }
    // An element that Lion turns disturbs the gradients of all others by about 2·rate relative to the norm of the weights, which
    // must be less than gradients may differ in fp32.
    for (name, settings) in [
        ("lion: ", "optimizer.name=lion optimizer.lr=1e-5 optimizer.min_lr=1e-6"),
        ("sgd: ", "optimizer.name=sgd optimizer.nesterov=true optimizer.lr=0.1"),
        ("muon: ", "optimizer.name=muon"),
    ] {
        layouts.extend(OPTIMIZERS.iter().map(|short| layout(name, settings, short)));
    }
    for (name, settings) in [
        (
            "frozen below: ",
            "optimizer.groups=[{parameters=\"table.*\",frozen=true},{parameters=\"positions.*\",frozen=true},\
             {parameters=\"layer.0.*\",frozen=true},{parameters=\"layer.1.*\",frozen=true}]",
        ),
        (
            "frozen between: ",
            "optimizer.groups=[{parameters=\"positions.*\",frozen=true},{parameters=\"layer.2.*\",frozen=true},\
             {parameters=\"head.*\",frozen=true}]",
        ),
    ] {
        layouts.extend(OPTIMIZERS.iter().chain(&FROZEN).map(|short| layout(name, settings, short)));
    }
    for (name, settings) in [
        ("lion, bf16: ", "optimizer.name=lion optimizer.lr=1e-3 precision.compute=bf16"),
        ("muon, bf16: ", "optimizer.name=muon precision.compute=bf16"),
        ("sgd, bf16: ", "optimizer.name=sgd optimizer.nesterov=true optimizer.lr=0.1 precision.compute=bf16"),
    ] {
        layouts.push(layout(name, settings, &OPTIMIZERS[0]));
    }
    for (name, settings) in [("bf16: ", "precision.compute=bf16"), ("fp16: ", "precision.compute=fp16")] {
        layouts.extend(PRECISIONS.iter().map(|short| layout(name, settings, short)));
    }
    let fp8 = "precision.compute=bf16 precision.products=fp8";
    layouts.extend(PRODUCTS.iter().map(|short| layout("fp8: ", fp8, short)));
    layouts
}

/// The layouts of the given model's family that have every kind of transfer and op between them: few and small enough for ranks
/// that share a GPU, where every transfer takes milliseconds.
const FOR_NCCL: [&str; 15] = [
    "dp 2",
    "dp 4, ZeRO-1",
    "dp 4, ZeRO++ without codes",
    "tp 4",
    "tp 2, sequence parallel",
    "cp 2",
    "cp 4, ring",
    "cp 4, all-to-all",
    "pp 2, GPipe",
    "pp 3, 1F1B, uneven",
    "pp 2, interleaved",
    "pp 4, zero-bubble",
    "tp 2, pp 2, dp 2, ZeRO-1",
    "pp 4, dp 2, ZeRO-3, zero-bubble, full, no overlap",
    "dp 4, ZeRO++",
];

/// The layouts for ranks that communicate by NCCL.
pub fn nccl_layouts() -> Vec<Layout> {
    let chosen = FOR_NCCL.iter().filter_map(|name| COMMON.iter().find(|short| short.0 == *name));
    chosen.map(|short| layout("", "", short)).collect()
}

fn layout(prefix: &str, model: &str, LayoutSpec(name, [tp, pp, dp], zero, more): &LayoutSpec) -> Layout {
    let words = |text: &str| text.split_whitespace().map(str::to_string).collect::<Vec<_>>();
    let mut settings = vec![
        format!("parallel.tp={tp}"),
        format!("parallel.pp={pp}"),
        format!("parallel.dp={dp}"),
        format!("sharding.zero={zero}"),
    ];
    settings.extend(words(more));
    Layout { name: format!("{prefix}{name}"), model: words(model), settings }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::mem::{Discriminant, discriminant};

    use kintsugi_plan::config::ConfigSource;
    use kintsugi_plan::{Op, Plan};

    use super::*;

    fn plans(layouts: &[Layout]) -> Vec<Plan> {
        let base = ConfigSource::demo().sets(["batch.micro=1", "batch.global=8"]);
        let base = base.without(&["parallel", "sharding", "memory"]);
        let plan = |layout: &Layout| base.clone().sets(&layout.model).sets(&layout.settings).plan();
        layouts
            .iter()
            .map(|layout| plan(layout).unwrap_or_else(|error| panic!("{layout}: {error}")))
            .collect()
    }

    fn ops(plans: &[Plan]) -> HashSet<Discriminant<Op>> {
        let stages = plans.iter().flat_map(|plan| (0..plan.mesh.pp()).map(move |stage| plan.program(stage)));
        stages.flat_map(|program| program.ops.into_iter().map(|op| discriminant(&op))).collect()
    }

    #[test]
    fn the_layouts_for_nccl_have_every_op() {
        let chosen = nccl_layouts();
        assert_eq!(chosen.len(), FOR_NCCL.len(), "every name is that of a layout");
        let chosen = plans(&chosen);
        let ranks: Vec<usize> = chosen.iter().map(|plan| plan.mesh.ranks()).collect();
        assert_eq!(ranks.iter().filter(|&&ranks| ranks == 8).count(), 2, "{ranks:?}");
        let all: Vec<Layout> = COMMON.iter().map(|short| layout("", "", short)).collect();
        assert_eq!(ops(&chosen), ops(&plans(&all)));
    }
}

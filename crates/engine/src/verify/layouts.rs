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

/// The layouts of the given model's family.
const COMMON: [LayoutSpec; 41] = [
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
    LayoutSpec("tp 4, dp 2, ZeRO-3, sequence parallel", [4, 1, 2], 3, "parallel.sequence_parallel=true"),
    LayoutSpec("tp 2, dp 4, ZeRO-2, full", [2, 1, 4], 2, "memory.recompute=full"),
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
    LayoutSpec("dp 4, ZeRO++ without codes", [1, 1, 4], 0, "cluster.per_node=2 sharding.preset=zero++"),
    LayoutSpec(
        "dp 8, three levels without codes",
        [1, 1, 8],
        0,
        "cluster.per_package=2 cluster.per_node=4 sharding.preset=three-level",
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
        "tp 2, pp 2, dp 4, ZeRO++, interleaved, sequence parallel, full",
        [2, 2, 4],
        0,
        "cluster.per_node=4 sharding.preset=zero++ parallel.schedule=interleaved parallel.virtual_stages=2 \
         parallel.sequence_parallel=true memory.recompute=full",
    ),
];

/// The layouts of the other families.
const FAMILIES: [LayoutSpec; 5] = [
    LayoutSpec("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
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

/// The layouts of the 16-bit types.
const PRECISIONS: [LayoutSpec; 3] = [
    LayoutSpec("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
    LayoutSpec("tp 2, pp 2, dp 2, ZeRO-1", [2, 2, 2], 1, ""),
    LayoutSpec("dp 4, ZeRO-3, full", [1, 1, 4], 3, "memory.recompute=full"),
];

/// All layouts: those of the given model's family, some of the other families if `all_families`, and some in each 16-bit
/// type.
pub fn layouts(all_families: bool) -> Vec<Layout> {
    let mut layouts: Vec<Layout> = COMMON.iter().map(|short| layout("", "", short)).collect();
    if all_families {
        let neox = "model.family=neox model.tied=false model.rotary_fraction=0.25";
        let llama = "model.family=llama model.tied=false model.kv_heads=2";
        layouts.extend(FAMILIES.iter().map(|short| layout("neox: ", neox, short)));
        layouts.extend(FAMILIES.iter().map(|short| layout("llama: ", llama, short)));
    }
    for (name, settings) in [("bf16: ", "precision.compute=bf16"), ("fp16: ", "precision.compute=fp16")] {
        layouts.extend(PRECISIONS.iter().map(|short| layout(name, settings, short)));
    }
    layouts
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

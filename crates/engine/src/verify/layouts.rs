//! The layouts that `verify` runs: each is a list of settings laid over the given configuration.

use std::fmt;

/// A way to split the model, as settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What a person calls it.
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

/// A layout in short: `[tp, pp, dp]`, ZeRO, and further settings.
struct Short(&'static str, [usize; 3], usize, &'static str);

/// What every layout is checked with, for the family of the given model.
const COMMON: [Short; 33] = [
    Short("dp 2", [1, 1, 2], 0, ""),
    Short("dp 4, ZeRO-1", [1, 1, 4], 1, ""),
    Short("dp 2, ZeRO-2", [1, 1, 2], 2, ""),
    Short("dp 4, ZeRO-2, reduce once", [1, 1, 4], 2, "sharding.reduce=step"),
    Short("dp 2, ZeRO-3", [1, 1, 2], 3, ""),
    Short("dp 4, ZeRO-3, gather once", [1, 1, 4], 3, "sharding.gather=step sharding.reduce=step"),
    Short("dp 2, ZeRO-3, no prefetch", [1, 1, 2], 3, "parallel.prefetch=0 parallel.overlap=false"),
    Short("tp 2", [2, 1, 1], 0, ""),
    Short("tp 4", [4, 1, 1], 0, ""),
    Short("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
    Short(
        "tp 4, sequence parallel, full",
        [4, 1, 1],
        0,
        "parallel.sequence_parallel=true memory.recompute=full",
    ),
    Short("selective", [1, 1, 1], 0, "memory.recompute=selective"),
    Short("full", [1, 1, 1], 0, "memory.recompute=full"),
    Short("plain attention", [1, 1, 1], 0, "memory.attention=plain"),
    Short("pp 2, GPipe", [1, 2, 1], 0, "parallel.schedule=gpipe"),
    Short("pp 4, 1F1B", [1, 4, 1], 0, ""),
    Short("pp 3, 1F1B, uneven", [1, 3, 1], 0, ""),
    Short("pp 2, interleaved", [1, 2, 1], 0, "parallel.schedule=interleaved parallel.virtual_stages=2"),
    Short("pp 4, zero-bubble", [1, 4, 1], 0, "parallel.schedule=zero-bubble"),
    Short("pp 2, zero-bubble, full", [1, 2, 1], 0, "parallel.schedule=zero-bubble memory.recompute=full"),
    Short(
        "pp 2, zero-bubble, selective",
        [1, 2, 1],
        0,
        "parallel.schedule=zero-bubble memory.recompute=selective",
    ),
    Short("tp 2, pp 2, dp 2, ZeRO-1", [2, 2, 2], 1, ""),
    Short("tp 2, pp 2, dp 2, ZeRO-2, GPipe", [2, 2, 2], 2, "parallel.schedule=gpipe"),
    Short(
        "tp 2, pp 2, dp 2, ZeRO-3, interleaved, full",
        [2, 2, 2],
        3,
        "parallel.schedule=interleaved parallel.virtual_stages=2 memory.recompute=full",
    ),
    Short(
        "tp 2, pp 2, dp 2, ZeRO-3, sequence parallel, selective",
        [2, 2, 2],
        3,
        "parallel.sequence_parallel=true memory.recompute=selective",
    ),
    Short(
        "tp 2, pp 2, dp 2, ZeRO-3, zero-bubble, sequence parallel",
        [2, 2, 2],
        3,
        "parallel.schedule=zero-bubble parallel.sequence_parallel=true",
    ),
    Short("pp 4, dp 2, ZeRO-1, zero-bubble", [1, 4, 2], 1, "parallel.schedule=zero-bubble"),
    Short("pp 3, dp 2, ZeRO-2, zero-bubble", [1, 3, 2], 2, "parallel.schedule=zero-bubble"),
    Short(
        "pp 4, dp 2, ZeRO-3, zero-bubble, full, no overlap",
        [1, 4, 2],
        3,
        "parallel.schedule=zero-bubble memory.recompute=full parallel.overlap=false",
    ),
    Short(
        "pp 2, dp 2, ZeRO-3, zero-bubble, reduce once",
        [1, 2, 2],
        3,
        "parallel.schedule=zero-bubble sharding.reduce=step",
    ),
    Short("tp 4, dp 2, ZeRO-3, sequence parallel", [4, 1, 2], 3, "parallel.sequence_parallel=true"),
    Short("tp 2, dp 4, ZeRO-2, full", [2, 1, 4], 2, "memory.recompute=full"),
    Short(
        "pp 2, dp 4, ZeRO-3, GPipe, gather once",
        [1, 2, 4],
        3,
        "parallel.schedule=gpipe sharding.gather=step",
    ),
];

/// What the other families are checked with.
const FAMILIES: [Short; 5] = [
    Short("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
    Short("tp 2, pp 2, dp 2, ZeRO-1", [2, 2, 2], 1, ""),
    Short(
        "pp 4, zero-bubble, selective",
        [1, 4, 1],
        0,
        "parallel.schedule=zero-bubble memory.recompute=selective",
    ),
    Short(
        "tp 2, pp 2, dp 2, ZeRO-3, interleaved, full",
        [2, 2, 2],
        3,
        "parallel.schedule=interleaved parallel.virtual_stages=2 memory.recompute=full",
    ),
    Short("dp 2, ZeRO-3, plain attention", [1, 1, 2], 3, "memory.attention=plain"),
];

/// What the 16-bit types are checked with.
const PRECISIONS: [Short; 3] = [
    Short("tp 2, sequence parallel", [2, 1, 1], 0, "parallel.sequence_parallel=true"),
    Short("tp 2, pp 2, dp 2, ZeRO-1", [2, 2, 2], 1, ""),
    Short("dp 4, ZeRO-3, full", [1, 1, 4], 3, "memory.recompute=full"),
];

/// Every layout: those of the given model's family, with `all_families` some of the others', and some in each 16-bit type.
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

fn layout(prefix: &str, model: &str, Short(name, [tp, pp, dp], zero, more): &Short) -> Layout {
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

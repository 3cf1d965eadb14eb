//! Every strategy that a model, a batch and a number of ranks allow.
//!
//! This module only proposes strategies; `plan` decides whether they are allowed. The simplest form of a proposal is checked
//! first, so that a mesh or a schedule is refused once and not again with every sharding.

use std::sync::Arc;

use kintsugi_plan::config::{LayerSplit, ShardingChoice, Strategy};
use kintsugi_plan::{
    Axis, Codes, Integer, Mesh, Plan, Quantized, Recompute, ScheduleKind, Sharding, When, divisors,
};
use kintsugi_spec::Level;
use rayon::prelude::*;

use crate::{Only, Settings, SupportedValues};

/// Strategies that differ only in their sharding.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    /// The strategy without sharding.
    pub(crate) plain: Strategy,
    /// The shardings.
    shardings: Arc<[ShardingChoice]>,
}

impl Region {
    pub(crate) fn len(&self) -> usize {
        self.shardings.len()
    }

    pub(crate) fn strategies(&self) -> impl Iterator<Item = Strategy> {
        self.shardings.iter().map(|&sharding| Strategy { sharding, ..self.plain })
    }

    /// The region without strategies that `wanted` refuses.
    fn retain(self, wanted: impl Fn(&Strategy) -> bool) -> Option<Region> {
        if self.strategies().all(|strategy| wanted(&strategy)) {
            return Some(self);
        }
        let shardings: Arc<[ShardingChoice]> =
            self.strategies().filter(wanted).map(|strategy| strategy.sharding).collect();
        (!shardings.is_empty()).then_some(Region { shardings, ..self })
    }
}

/// Every strategy for `base` on `ranks` ranks that passes all of `only` and `supported`, without duplicates. If there are
/// more than `most`, any `most` of them.
pub fn strategies(
    base: &Plan,
    ranks: usize,
    only: &[Only],
    supported: &[SupportedValues],
    most: usize,
) -> Vec<Strategy> {
    let regions = regions(base, ranks, only, supported);
    regions.iter().flat_map(Region::strategies).take(most).collect()
}

/// The same by region.
pub(crate) fn regions(
    base: &Plan,
    ranks: usize,
    only: &[Only],
    supported: &[SupportedValues],
) -> Vec<Region> {
    let wanted = |strategy: &Strategy| {
        only.iter().all(|only| only.allows(strategy)) && supported.iter().all(|one| one.allows(strategy))
    };
    let codes = codes(base, only);
    let of_mesh = |mesh| of_mesh(base, mesh, &codes).into_iter().filter_map(|region| region.retain(wanted));
    let context = only.iter().any(Only::asks_for_context);
    meshes(ranks, context).into_par_iter().flat_map_iter(of_mesh).collect()
}

/// The meshes of some ranks, with sequences that are divided over cp if `context`.
fn meshes(ranks: usize, context: bool) -> Vec<Mesh> {
    let mut meshes = vec![Mesh::ONE];
    for axis in Axis::ALL.into_iter().rev().filter(|&axis| searched(axis, context)) {
        let sizes = |mesh: Mesh| divisors(ranks / mesh.ranks()).map(move |size| mesh.with(axis, size));
        meshes = meshes.into_iter().flat_map(sizes).collect();
    }
    // The replicas are the rest.
    meshes.into_iter().map(|mesh| mesh.with(Axis::Data, ranks / mesh.ranks())).collect()
}

/// Whether a search varies the size of an axis by itself.
fn searched(axis: Axis, context: bool) -> bool {
    match axis {
        Axis::Pipeline | Axis::Tensor => true,
        Axis::Context => context,
        // The replicas are the rest.
        Axis::Data => false,
    }
}

fn of_mesh(base: &Plan, mesh: Mesh, codes: &[Quantized]) -> Vec<Region> {
    let global = base.batch.global;
    let simplest = Strategy {
        mesh,
        micro: 1,
        schedule: ScheduleKind::OneForwardOneBackward,
        virtual_stages: 1,
        split: LayerSplit::Even,
        sequence_parallel: false,
        sharding: ShardingChoice::NONE,
        recompute: Recompute::None,
    };
    let allowed = |strategy: &Strategy| base.with_strategy(strategy).is_ok();
    let mut found = Vec::new();
    // The larger the micro-batch, the shorter the pipeline; but a micro-batch may be too large.
    if !divisors(global / mesh.dp()).any(|micro| allowed(&Strategy { micro, ..simplest })) {
        return found;
    }
    let shardings: Arc<[ShardingChoice]> = shardings(base, mesh, codes).into();
    for micro in divisors(global / mesh.dp()) {
        for (schedule, virtual_stages, split) in pipelines(base, mesh.pp(), global / mesh.dp() / micro) {
            for sequence_parallel in [false, true].into_iter().filter(|&wanted| !wanted || mesh.tp() > 1) {
                let plain =
                    Strategy { micro, schedule, virtual_stages, split, sequence_parallel, ..simplest };
                if !allowed(&plain) {
                    continue;
                }
                found.extend(RECOMPUTE.map(|recompute| Region {
                    plain: Strategy { recompute, ..plain },
                    shardings: Arc::clone(&shardings),
                }));
            }
        }
    }
    found
}

const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

/// Schedules with every useful number of chunks per stage and division of the layers. A single stage has only one schedule,
/// and with a single micro-batch GPipe is 1F1B.
fn pipelines(base: &Plan, pp: usize, micro_batches: usize) -> Vec<(ScheduleKind, usize, LayerSplit)> {
    let plain: &[ScheduleKind] = match (pp, micro_batches) {
        (1, _) => return vec![(ScheduleKind::OneForwardOneBackward, 1, LayerSplit::Even)],
        (_, 1) => &[ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble],
        _ => &[ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble, ScheduleKind::GPipe],
    };
    let (layers, head) = (base.model.layers, base.head_in_layers());
    let splits = |chunks| splits(layers, pp, chunks, head).into_iter();
    let plain = splits(1).flat_map(|split| plain.iter().map(move |&schedule| (schedule, 1, split)));
    let interleaved = chunk_counts(layers, pp).into_iter();
    let interleaved = interleaved
        .flat_map(|chunks| splits(chunks).map(move |split| (ScheduleKind::Interleaved, chunks, split)));
    plain.chain(interleaved).collect()
}

/// The numbers of chunks per stage, from 2, that divide the layers evenly, or leave out at most one layer of a stage. Of
/// uneven numbers with chunks as long, the fewest.
pub(crate) fn chunk_counts(layers: usize, pp: usize) -> Vec<usize> {
    let of_length = |length: usize| {
        let chunks = layers.div_ceil(pp * length);
        let missing = pp * chunks * length - layers;
        // Each chunk needs a layer.
        (missing == 0 || (length > 1 && missing <= pp)).then_some(chunks)
    };
    let mut counts: Vec<usize> = (1..=layers / pp).rev().filter_map(of_length).collect();
    counts.retain(|&chunks| chunks > 1);
    counts.dedup();
    counts
}

/// What a search leaves out, in words.
pub(crate) fn left_out(settings: &Settings) -> Vec<String> {
    let (layers, ranks) = (settings.base.model.layers, settings.ranks);
    let stages = || divisors(ranks).filter(|&pp| pp > 1 && 2 * pp <= layers);
    let all: usize = stages().map(|pp| layers / pp - 1).sum();
    let searched: usize = stages().map(|pp| chunk_counts(layers, pp).len()).sum();
    let chunks = format!("{} of {all} numbers of chunks for {layers} layers, as uneven", all - searched);
    let codes = "codes, as --only sharding.quantize_weights=int8, which change the numbers".to_owned();
    let chunks = Some(chunks).filter(|_| searched < all);
    chunks.into_iter().chain(Some(codes).filter(|_| !settings.codes_are_asked_for())).collect()
}

/// How layers are divided into chunks: as evenly as possible, and with fewer layers in the last chunk if that makes the longest
/// stage shorter. `head` is the time of the head, in layers.
fn splits(layers: usize, pp: usize, chunks: usize, head: f64) -> Vec<LayerSplit> {
    let count = pp * chunks;
    let missing = layers.next_multiple_of(count) - layers;
    let plain = if missing < 2 { LayerSplit::Even } else { LayerSplit::LighterEnds };
    let longest = |split: LayerSplit| {
        // Where the default is proposed, it is the same.
        let layers = split.layers(layers, count).or(LayerSplit::LighterEnds.layers(layers, count));
        let layers = layers.unwrap_or_default();
        let stage = |stage: usize| layers.iter().skip(stage).step_by(pp).sum::<usize>() as f64;
        (0..pp).map(|at| stage(at) + if at + 1 == pp { head } else { 0.0 }).fold(0.0, f64::max)
    };
    let lighter = (1..=layers / count).rev().map(LayerSplit::Last);
    let lighter = lighter.min_by(|&a, &b| longest(a).total_cmp(&longest(b)));
    std::iter::once(plain).chain(lighter.filter(|&split| longest(split) < longest(plain))).collect()
}

/// The choices of sharding that differ on a mesh: ZeRO over all replicas with every timing, and the schemes by level that trade
/// memory for traffic, each gathered and reduced for every micro-batch or once a step. ZeRO++ and three levels are proposed with
/// codes, too, unless the profile of a framework is planned. Placements that need more memory and move no less are left out, as
/// states over a part of the replicas with weights and gradients whole.
fn shardings(base: &Plan, mesh: Mesh, codes: &[Quantized]) -> Vec<ShardingChoice> {
    let [package, node, pod, cluster] = Level::ALL.map(Some);
    let zero =
        [[None, None, None], [None, None, cluster], [None, cluster, cluster], [cluster, cluster, cluster]];
    let zero = zero.into_iter().flat_map(|[weights, gradients, states]| {
        let choice = ShardingChoice { weights, gradients, states, ..ShardingChoice::NONE };
        timings(weights, gradients).into_iter().map(move |(gather, reduce)| ShardingChoice {
            gather,
            reduce,
            ..choice
        })
    });
    // Without pods those over pods are refused, and left out.
    let by_level = [
        [node, node, node],
        [package, node, cluster],
        [node, node, cluster],
        [pod, pod, pod],
        [pod, pod, cluster],
        [node, pod, cluster],
    ];
    let by_level = by_level.into_iter().flat_map(|[weights, gradients, states]| {
        let choice = ShardingChoice { weights, gradients, states, ..ShardingChoice::NONE };
        [When::MicroBatch, When::Step].map(|when| ShardingChoice { gather: when, reduce: when, ..choice })
    });
    let secondary = ShardingChoice {
        weights: cluster,
        gradients: cluster,
        states: cluster,
        secondary: node,
        gather: When::MicroBatch,
        reduce: When::MicroBatch,
        quantized: Quantized::NONE,
    };
    let by_level: Vec<ShardingChoice> = by_level.chain([secondary]).collect();
    let quantized = by_level.iter().filter(|choice| choice.weights == package || choice.secondary.is_some());
    let with_codes = |choice: &ShardingChoice| {
        codes.iter().map(|&quantized| ShardingChoice { quantized, ..*choice }).collect::<Vec<_>>()
    };
    let quantized = quantized.flat_map(with_codes);
    let quantized = quantized.filter(|_| base.framework.preset.is_none());
    let mut found: Vec<(Sharding, ShardingChoice)> = Vec::new();
    for choice in zero.chain(by_level.iter().copied()).chain(quantized) {
        let Ok(means) = base.resolve_sharding(mesh, choice) else { continue };
        // A choice that makes no difference on this mesh is proposed only once.
        let gather = if means.weights == 1 { When::MicroBatch } else { means.gather };
        let means = Sharding { gather, ..means };
        if found.iter().all(|(other, _)| *other != means) {
            found.push((means, choice));
        }
    }
    found.into_iter().map(|(_, choice)| choice).collect()
}

/// The codes to try: those that the configuration or a restriction asks for, of weights, of gradients and of both. If neither asks,
/// those of the presets of ZeRO++ and three levels, for what they would gain.
fn codes(base: &Plan, only: &[Only]) -> Vec<Quantized> {
    let given = base.sharding.quantized;
    let block = given.iter().next().map_or(Codes::DEFAULT_BLOCK, |codes| codes.block);
    let asked = |key: &str, given: Option<Codes>| {
        let mut integers: Vec<Integer> = given.map(|codes| codes.integer).into_iter().collect();
        integers.extend(only.iter().flat_map(|only| only.integers(key)));
        integers.sort();
        integers.dedup();
        integers
    };
    let weights = asked("sharding.quantize_weights", given.weights);
    let gradients = asked("sharding.quantize_gradients", given.gradients);
    if weights.is_empty() && gradients.is_empty() {
        let codes = |integer| Some(Codes { integer, block });
        return vec![Quantized {
            weights: codes(Integer::Int8),
            refresh: None,
            gradients: codes(Integer::Int4),
        }];
    }
    let or_none = |integers: Vec<Integer>| {
        let some = integers.into_iter().map(move |integer| Some(Codes { integer, block }));
        [None].into_iter().chain(some).collect::<Vec<_>>()
    };
    let (weights, gradients) = (or_none(weights), or_none(gradients));
    let pairs = weights.iter().flat_map(|&weights| {
        gradients.iter().map(move |&gradients| Quantized { weights, refresh: None, gradients })
    });
    pairs.filter(|codes| *codes != Quantized::NONE).collect()
}

/// When weights are gathered and gradients reduced, if the choice makes a difference.
fn timings(weights: Option<Level>, gradients: Option<Level>) -> Vec<(When, When)> {
    let both = [When::MicroBatch, When::Step];
    let gathers = if weights.is_some() { &both[..] } else { &both[..1] };
    let reduces = if gradients.is_some() { &both[..] } else { &both[1..] };
    gathers.iter().flat_map(|&gather| reduces.iter().map(move |&reduce| (gather, reduce))).collect()
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    #[test]
    fn only_codes_that_are_asked_for_are_tried() {
        let words = |base: &Plan, only: &[&str]| {
            let only: Vec<Only> = only.iter().map(|text| Only::parse(text).expect("valid")).collect();
            let word = |codes: Option<Codes>| codes.map_or("none", |codes| codes.integer.name());
            let pair = |codes: Quantized| format!("{} {}", word(codes.weights), word(codes.gradients));
            codes(base, &only).into_iter().map(pair).collect::<Vec<_>>()
        };
        let plain = base();
        assert_eq!(words(&plain, &[]), ["int8 int4"], "for what they would gain");
        assert_eq!(words(&plain, &["sharding.quantize_weights=int8,none"]), ["int8 none"]);
        assert_eq!(words(&plain, &["sharding.quantize_gradients=int8"]), ["none int8"]);
        let sets =
            ["model.preset=gpt-22b", "batch.global=32", "sharding.zero=3", "sharding.quantize_weights=int8"];
        let (given, _) = ConfigSource::demo().sets(sets).search_base().expect("a valid configuration");
        assert_eq!(words(&given, &[]), ["int8 none"]);
        let both = words(&given, &["sharding.quantize_gradients=int4"]);
        assert_eq!(both, ["none int4", "int8 none", "int8 int4"]);
    }

    #[test]
    fn every_mesh_has_all_ranks() {
        let meshes = meshes(12, false);
        assert_eq!(meshes.len(), 18, "ordered products of three factors");
        assert!(meshes.iter().all(|mesh| mesh.ranks() == 12));
    }

    fn base() -> Plan {
        let sets = ["model.preset=gpt-22b", "batch.sequence=2048", "batch.global=32"];
        ConfigSource::demo().sets(sets).plan().expect("a right configuration")
    }

    #[test]
    fn a_batch_that_is_too_large_for_one_micro_batch_is_split() {
        let sets = ["model.preset=gpt-22b", "batch.sequence=2048", "batch.global=65536"];
        let base = ConfigSource::demo().sets(sets).search_base().expect("a valid configuration").0;
        let one_replica = of_mesh(&base, Mesh::ONE.with(Axis::Pipeline, 2).with(Axis::Tensor, 2), &[]);
        assert!(!one_replica.is_empty());
        assert!(one_replica.iter().all(|region| region.plain.micro * 2048 <= 1 << 26));
    }

    #[test]
    fn chunks_cut_the_layers_evenly_or_leave_out_one_of_a_stage() {
        let chunks: Vec<usize> = pipelines(&base(), 4, 8).into_iter().map(|(_, chunks, _)| chunks).collect();
        assert_eq!(chunks, [1, 1, 1, 2, 3, 4, 6, 12]);
        // Llama 3 405B: a layer less in the first and in the last chunk (arXiv 2407.21783).
        assert_eq!(chunk_counts(126, 16), [2, 4]);
        let llama = splits(126, 16, 4, 0.7);
        assert_eq!(llama, [LayerSplit::LighterEnds]);
        let layers = llama[0].layers(126, 64).expect("not the default");
        assert_eq!((layers[0], layers[63], layers.iter().sum()), (1, 1, 126));
        assert!(layers[1..63].iter().all(|&layers| layers == 2));
        // No division but the even ones leaves out so little.
        assert_eq!(chunk_counts(128, 12), [0; 0]);
        assert_eq!(chunk_counts(126, 2), [2, 3, 4, 7, 8, 9, 16, 21, 32, 63]);
    }

    #[test]
    fn schedules_that_mean_the_same_are_proposed_once() {
        assert_eq!(pipelines(&base(), 1, 8), [(ScheduleKind::OneForwardOneBackward, 1, LayerSplit::Even)]);
        assert!(pipelines(&base(), 4, 1).iter().all(|&(schedule, ..)| schedule != ScheduleKind::GPipe));
    }

    #[test]
    fn a_heavy_head_takes_layers_from_the_last_stage() {
        let both = |last| vec![LayerSplit::Even, LayerSplit::Last(last)];
        // 9, 9, 8 and 6 with a head of 2.4; without one all are alike.
        assert_eq!(splits(32, 4, 1, 2.4), both(6));
        assert_eq!(splits(32, 4, 1, 0.3), [LayerSplit::Even]);
        // There are no fewer than one.
        assert_eq!(splits(32, 16, 1, 5.0), both(1));
        assert_eq!(splits(4, 4, 1, 5.0), [LayerSplit::Even]);
        // BLOOM has 5, 6, …, 6 and 5 on 12 stages; its head takes as long as 1.5 layers.
        assert_eq!(splits(70, 12, 1, 1.5), [LayerSplit::LighterEnds, LayerSplit::Last(4)]);
        // Of two chunks per stage, the last has two layers and the head.
        assert_eq!(splits(32, 4, 2, 2.4), both(2));
    }
}

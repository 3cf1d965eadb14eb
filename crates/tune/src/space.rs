//! Every strategy that a model, a batch and a number of ranks allow.
//!
//! This module only proposes strategies; `plan` decides whether they are allowed. The simplest form of a proposal is checked
//! first, so that a mesh or a schedule is refused once and not again with every sharding.

use kintsugi_plan::config::{ShardingChoice, Strategy};
use kintsugi_plan::{
    Axis, Codes, Integer, Mesh, Plan, Quantized, Recompute, ScheduleKind, Sharding, When, divisors,
};
use kintsugi_spec::Level;
use rayon::prelude::*;

use crate::{Only, SupportedValues};

/// Every strategy for `base` on `ranks` ranks that passes all of `only` and `supported`, without duplicates. If there are
/// more than `most`, any `most` of them.
pub fn strategies(
    base: &Plan,
    ranks: usize,
    only: &[Only],
    supported: &[SupportedValues],
    most: usize,
) -> Vec<Strategy> {
    let wanted = |strategy: &Strategy| {
        only.iter().all(|only| only.allows(strategy)) && supported.iter().all(|one| one.allows(strategy))
    };
    meshes(ranks).into_par_iter().flat_map_iter(|mesh| of_mesh(base, mesh, &wanted)).take_any(most).collect()
}

fn meshes(ranks: usize) -> Vec<Mesh> {
    let mut meshes = vec![Mesh::ONE];
    for axis in Axis::ALL.into_iter().rev().filter(|&axis| axis != Axis::Data) {
        let sizes = |mesh: Mesh| divisors(ranks / mesh.ranks()).map(move |size| mesh.with(axis, size));
        meshes = meshes.into_iter().flat_map(sizes).collect();
    }
    // The replicas are the rest.
    meshes.into_iter().map(|mesh| mesh.with(Axis::Data, ranks / mesh.ranks())).collect()
}

fn of_mesh(base: &Plan, mesh: Mesh, wanted: &dyn Fn(&Strategy) -> bool) -> Vec<Strategy> {
    let global = base.batch.global;
    let simplest = Strategy {
        mesh,
        micro: 1,
        schedule: ScheduleKind::OneForwardOneBackward,
        virtual_stages: 1,
        last_layers: None,
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
    let shardings = shardings(base, mesh);
    for micro in divisors(global / mesh.dp()) {
        for (schedule, virtual_stages, last_layers) in pipelines(base, mesh.pp(), global / mesh.dp() / micro)
        {
            for sequence_parallel in [false, true].into_iter().filter(|&wanted| !wanted || mesh.tp() > 1) {
                let plain =
                    Strategy { micro, schedule, virtual_stages, last_layers, sequence_parallel, ..simplest };
                if !allowed(&plain) {
                    continue;
                }
                for &sharding in &shardings {
                    let full = RECOMPUTE.map(|recompute| Strategy { sharding, recompute, ..plain });
                    found.extend(full.into_iter().filter(|strategy| wanted(strategy)));
                }
            }
        }
    }
    found
}

const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

/// Schedules with every number of chunks per stage that divides the layers evenly. Schedules with one chunk are also proposed
/// with fewer layers in the last stage, if the head makes that stage the longest. A single stage has only one schedule, and
/// with a single micro-batch GPipe is 1F1B.
fn pipelines(base: &Plan, pp: usize, micro_batches: usize) -> Vec<(ScheduleKind, usize, Option<usize>)> {
    let plain: &[ScheduleKind] = match (pp, micro_batches) {
        (1, _) => return vec![(ScheduleKind::OneForwardOneBackward, 1, None)],
        (_, 1) => &[ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble],
        _ => &[ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble, ScheduleKind::GPipe],
    };
    let layers = base.model.layers;
    let lasts = std::iter::once(None).chain(lighter(layers, pp, base.head_in_layers()).map(Some));
    let plain = lasts.flat_map(|last| plain.iter().map(move |&schedule| (schedule, 1, last)));
    let even = |chunks: &usize| layers.is_multiple_of(pp * chunks);
    let interleaved = (2..=layers / pp).filter(even).map(|chunks| (ScheduleKind::Interleaved, chunks, None));
    plain.chain(interleaved).collect()
}

/// The number of layers in the last stage that makes the longest stage shortest, if that is not the even share.
fn lighter(layers: usize, pp: usize, head: f64) -> Option<usize> {
    let longest = |&last: &usize| (last as f64 + head).max((layers - last).div_ceil(pp - 1) as f64);
    let best = (1..=layers / pp).rev().min_by(|a, b| longest(a).total_cmp(&longest(b)))?;
    Some(best).filter(|&best| best != layers / pp)
}

/// The choices of sharding that differ on a mesh: ZeRO over all replicas with every timing, and the schemes by level that trade
/// memory for traffic, each gathered and reduced for every micro-batch or once a step. ZeRO++ and three levels are proposed with
/// codes, too, unless the profile of a framework is planned. Placements that need more memory and move no less are left out, as
/// states over a part of the replicas with weights and gradients whole.
fn shardings(base: &Plan, mesh: Mesh) -> Vec<ShardingChoice> {
    let (package, node, cluster) = (Some(Level::Package), Some(Level::Node), Some(Level::Cluster));
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
    let by_level = [[node, node, node], [package, node, cluster], [node, node, cluster]];
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
    let quantized = quantized.map(|choice| ShardingChoice { quantized: codes(base), ..*choice });
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

/// What the presets of ZeRO++ and three levels quantise, in blocks of the plan's size.
fn codes(base: &Plan) -> Quantized {
    let block = base.sharding.quantized.iter().next().map_or(Codes::DEFAULT_BLOCK, |codes| codes.block);
    let codes = |integer| Some(Codes { integer, block });
    Quantized { weights: codes(Integer::Int8), refresh: None, gradients: codes(Integer::Int4) }
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
    fn every_mesh_has_all_ranks() {
        let meshes = meshes(12);
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
        let one_replica: Vec<Strategy> =
            of_mesh(&base, Mesh::ONE.with(Axis::Pipeline, 2).with(Axis::Tensor, 2), &|_| true);
        assert!(!one_replica.is_empty());
        assert!(one_replica.iter().all(|strategy| strategy.micro * 2048 <= 1 << 26));
    }

    #[test]
    fn chunks_cut_the_layers_evenly() {
        let chunks: Vec<usize> = pipelines(&base(), 4, 8).into_iter().map(|(_, chunks, _)| chunks).collect();
        assert_eq!(chunks, [1, 1, 1, 2, 3, 4, 6, 12]);
    }

    #[test]
    fn schedules_that_mean_the_same_are_proposed_once() {
        assert_eq!(pipelines(&base(), 1, 8), [(ScheduleKind::OneForwardOneBackward, 1, None)]);
        assert!(pipelines(&base(), 4, 1).iter().all(|&(schedule, ..)| schedule != ScheduleKind::GPipe));
    }

    #[test]
    fn a_heavy_head_takes_layers_from_the_last_stage() {
        // 9, 9, 8 and 6 with a head of 2.4; without one all are alike.
        assert_eq!(lighter(32, 4, 2.4), Some(6));
        assert_eq!(lighter(32, 4, 0.3), None);
        // There are no fewer than one.
        assert_eq!(lighter(32, 16, 5.0), Some(1));
        assert_eq!(lighter(4, 4, 5.0), None);
    }
}

//! Random layouts, as `--set` arguments over the built-in demo.

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Op, Plan, Program};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

/// The plan of the demo under these settings.
pub fn plan(sets: &[String]) -> Plan {
    ConfigSource::demo().sets(sets).plan().unwrap_or_else(|error| panic!("{sets:?}: {error}"))
}

/// The programs of all stages.
pub fn programs(plan: &Plan) -> Vec<Program> {
    (0..plan.mesh.pp()).map(|stage| plan.program(stage)).collect()
}

/// Whether an op computes a block.
pub fn computes(op: &Op) -> bool {
    op.block().is_some()
}

/// Settings that make a legal plan.
pub fn layouts() -> impl Strategy<Value = Vec<String>> {
    (pipelines(), replicas(), options()).prop_map(|((mut sets, micro_batches), (dp, replicas), options)| {
        sets.push(format!("parallel.dp={dp}"));
        sets.push("batch.micro=1".to_owned());
        sets.push(format!("batch.global={}", micro_batches * dp));
        sets.extend(replicas);
        sets.extend(options);
        sets
    })
}

/// Schedule, stages, chunks of uneven size, and the number of micro-batches.
fn pipelines() -> impl Strategy<Value = (Vec<String>, usize)> {
    let schedule = select(vec!["gpipe", "1f1b", "interleaved", "zero-bubble"]);
    let shape =
        (schedule, 1..=6_usize, 1..=12_usize, 2..=3_usize).prop_map(|(schedule, pp, micro_batches, v)| {
            if schedule == "interleaved" {
                let pp = pp.max(2);
                (schedule, pp, micro_batches.next_multiple_of(pp), v)
            } else {
                (schedule, pp, micro_batches, 1)
            }
        });
    shape.prop_flat_map(|(schedule, pp, micro_batches, virtual_stages)| {
        vec(1..=3_usize, pp * virtual_stages).prop_map(move |layers| {
            let sets = vec![
                format!("parallel.schedule={schedule}"),
                format!("parallel.pp={pp}"),
                format!("parallel.virtual_stages={virtual_stages}"),
                format!("model.layers={}", layers.iter().sum::<usize>()),
                format!("parallel.layers_per_stage={layers:?}"),
            ];
            (sets, micro_batches)
        })
    })
}

/// Data-parallel replicas and what is sharded over them: over all, or over the levels of packages of 2 tp groups and nodes of 4.
fn replicas() -> impl Strategy<Value = (usize, Vec<String>)> {
    let when = || select(vec!["micro-batch", "step"]);
    let over_all = (1..=3_usize, 0..=3_usize).prop_map(|(dp, zero)| {
        let sets = vec![format!("sharding.zero={zero}")];
        (dp, zero >= 2, sets)
    });
    let level = || 0..LEVELS.len();
    let levels = [level(), level(), level(), level()];
    let by_level = (select(vec![4, 8]), levels, select(vec!["all", "backward"]), any::<bool>()).prop_map(
        |(dp, [a, b, c, secondary], secondary_use, hierarchical)| {
            let mut levels = [a, b, c];
            levels.sort_unstable();
            let mut sets = vec![
                format!("sharding.weights={}", LEVELS[levels[0]]),
                format!("sharding.gradients={}", LEVELS[levels[1]]),
                format!("sharding.states={}", LEVELS[levels[2]]),
                format!("sharding.collectives={}", if hierarchical { "hierarchical" } else { "ring" }),
            ];
            if levels[0] > 0 {
                sets.push(format!("sharding.secondary={}", LEVELS[secondary]));
                sets.push(format!("sharding.secondary_use={secondary_use}"));
            }
            (dp, levels[1] > 0, sets)
        },
    );
    let codes = (select(vec!["none", "int8"]), select(vec!["none", "int8", "int4"]));
    (prop_oneof![over_all, by_level], when(), when(), codes).prop_map(
        |((dp, reduces, mut sets), gather, reduce, (weights, gradients))| {
            sets.push(format!("sharding.gather={gather}"));
            sets.extend(reduces.then(|| format!("sharding.reduce={reduce}")));
            if reduces {
                sets.push(format!("sharding.quantize_weights={weights}"));
                sets.push(format!("sharding.quantize_gradients={gradients}"));
            }
            (dp, sets)
        },
    )
}

const LEVELS: [&str; 4] = ["none", "package", "node", "cluster"];

fn options() -> impl Strategy<Value = Vec<String>> {
    let recompute = select(vec!["none", "selective", "full"]);
    let family = select(vec!["gpt", "llama"]);
    let flag = any::<bool>;
    (recompute, family, flag(), flag(), flag(), flag(), 1..=2_usize, 0..=3_usize).prop_map(
        |(recompute, family, masked, tied, overlap, sequence_parallel, tp, prefetch)| {
            vec![
                format!("memory.recompute={recompute}"),
                format!("model.family={family}"),
                "data.source=corpus".to_owned(),
                format!("data.mask_documents={masked}"),
                format!("model.tied={tied}"),
                format!("parallel.overlap={overlap}"),
                format!("parallel.sequence_parallel={sequence_parallel}"),
                format!("parallel.tp={tp}"),
                format!("cluster.per_package={}", 2 * tp),
                format!("cluster.per_node={}", 4 * tp),
                format!("parallel.prefetch={prefetch}"),
            ]
        },
    )
}

//! Runs on chosen nodes: bytes by level are those that were predicted, whatever pods the nodes are in.

use kintsugi_engine::{MemoryChoice, TrainOptions, dataset, train};
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Coverage, predict};
use kintsugi_tensor::Device;

#[test]
fn traffic_by_level_is_that_of_the_chosen_nodes() {
    let small = [
        "model.hidden=32",
        "model.ffn=64",
        "batch.sequence=16",
        "batch.micro=1",
        "batch.global=8",
        "run.steps=1",
        "run.eval_every=0",
        "cluster.per_node=2",
        "cluster.placement.nodes=[\"n1\", \"n2\", \"n3\", \"n4\"]",
    ];
    let layouts: [&[&str]; 3] = [
        &["parallel.tp=1", "parallel.pp=2", "parallel.dp=4", "sharding.zero=1"],
        &["parallel.tp=2", "parallel.pp=1", "parallel.dp=4", "sharding.zero=3"],
        &[
            "parallel.tp=1",
            "parallel.pp=1",
            "parallel.dp=8",
            "cluster.nodes_per_pod=2",
            "sharding.weights=pod",
            "sharding.gradients=pod",
            "sharding.states=cluster",
        ],
    ];
    let mut seen = Vec::new();
    for layout in layouts {
        for pods in ["aabb", "abab", "aaaa", "abca"] {
            let list: Vec<String> = pods.chars().map(|pod| format!("\"{pod}\"")).collect();
            let pods = format!("cluster.placement.pods=[{}]", list.join(", "));
            let plan = ConfigSource::demo().sets(small).sets(layout).set(&pods).plan().expect("a plan");
            let data = dataset(&plan).expect("its data");
            let outcome = train(&plan, &*data, &TrainOptions::new(MemoryChoice::Heap), |_| {});
            let measured = outcome.expect("it trains").expect("rank 0 is here").measured.comm_bytes;
            let predicted =
                predict(&plan, Device::Cpu { threads: 1 }, Coverage::WholeStep).figures().comm_bytes;
            assert_eq!(predicted, measured, "{layout:?} {pods}");
            let bytes =
                |level: &str| measured.get(level).map_or(0, |of_level| of_level.values().sum::<u64>());
            seen.push((bytes("pod"), bytes("cluster")));
        }
    }
    // Levels follow the pods: alternating ones send more between them, and one pod sends nothing out.
    for of_layout in seen.chunks(4) {
        let [together, alternating, one, _] = [of_layout[0], of_layout[1], of_layout[2], of_layout[3]];
        assert!(alternating.1 >= together.1 && together.1 > 0 && one.1 == 0, "{of_layout:?}");
        assert!([together, alternating].iter().all(|bytes| bytes.0 + bytes.1 == one.0), "{of_layout:?}");
    }
}

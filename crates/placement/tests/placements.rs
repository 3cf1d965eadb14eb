//! Placements of small plans beside the enumeration of all, and properties of those of larger ones.

use std::time::Instant;

use kintsugi_placement::{Found, FreeNode, How, PlaceError, place};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::TracedStep;
use kintsugi_spec::Placement;
use proptest::prelude::{ProptestConfig, any, proptest};
use proptest::{prop_assert, prop_assert_eq};

/// Nodes of eight ranks, whose links between pods are a fifth of those inside.
fn plan(tp: usize, pp: usize, dp: usize, sets: &[&str]) -> Plan {
    let layout = [
        format!("parallel.tp={tp}"),
        format!("parallel.pp={pp}"),
        format!("parallel.dp={dp}"),
        format!("batch.global={}", 4 * pp * dp),
    ];
    ConfigSource::text(
        "[model]\npreset = \"gpt-1.3b\"\n[batch]\nsequence = 2048\nmicro = 1\n[precision]\ncompute = \"bf16\"\n\
         [sharding]\nzero = 1\n[cluster]\npreset = \"h100\"\n[cluster.links]\npod = { bandwidth = 50e9, latency = 8e-6 }\n\
         cluster = { bandwidth = 10e9, latency = 3e-5 }\n",
    )
    .sets(layout)
    .sets(sets)
    .plan()
    .expect("a plan")
}

/// Nodes with numbers from 1, each in one of the pods a, b, c, ….
fn nodes(pods: &str) -> Vec<FreeNode> {
    let node = |(i, pod): (usize, char)| FreeNode { name: format!("n{}", i + 1), pod: pod.to_string() };
    pods.chars().enumerate().map(node).collect()
}

/// The shortest step of all ways to give a pod to every node, by definition.
fn enumerated(plan: &Plan, needed: usize, free: &[FreeNode]) -> f64 {
    let step = TracedStep::new(plan);
    let mut pods: Vec<&str> = free.iter().map(|node| node.pod.as_str()).collect();
    pods.sort_unstable();
    let mut kinds = pods.clone();
    kinds.dedup();
    let mut best = f64::INFINITY;
    for number in 0..kinds.len().pow(needed as u32) {
        let digit = |place: usize| kinds[number / kinds.len().pow(place as u32) % kinds.len()];
        let order: Vec<&str> = (0..needed).map(digit).collect();
        let count = |list: &[&str], kind: &str| list.iter().filter(|pod| **pod == kind).count();
        if kinds.iter().any(|kind| count(&order, kind) > count(&pods, kind)) {
            continue;
        }
        let mut placed = plan.clone();
        placed.cluster = plan.cluster.placed(Placement {
            nodes: (0..needed).map(|node| node.to_string()).collect(),
            pods: order.iter().map(|&pod| pod.to_owned()).collect(),
        });
        best = best.min(step.time(&placed).expect("its speed is known").step_s);
    }
    best
}

/// The step of a plan on a placement, timed anew.
fn timed(plan: &Plan, placement: &Placement) -> f64 {
    let mut placed = plan.clone();
    placed.cluster = plan.cluster.placed(placement.clone());
    kintsugi_simulate::time(&placed).expect("its speed is known").step_s
}

fn check(plan: &Plan, free: &[FreeNode], found: &Found) {
    let Placement { nodes, pods } = &found.placement;
    for (node, pod) in nodes.iter().zip(pods) {
        assert!(free.iter().any(|free| free.name == *node && free.pod == *pod), "{node} is not in {pod}");
    }
    let mut different = nodes.clone();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), nodes.len(), "a node is there twice");
    assert!((timed(plan, &found.placement) / found.step_s - 1.0).abs() < 1e-9);
    assert!(found.bound_s <= found.step_s && found.step_s <= found.by_name_s, "{found:?}");
}

#[test]
fn small_placements_are_those_that_enumeration_finds() {
    let cases = [
        (plan(8, 2, 2, &[]), 4, "abab"),
        (plan(8, 4, 1, &[]), 4, "abcabc"),
        (plan(8, 2, 3, &[]), 6, "aabbcaa"),
        (plan(4, 3, 2, &["parallel.layers_per_stage=[8, 8, 8]"]), 3, "abca"),
        (plan(8, 2, 4, &["sharding.zero=3"]), 8, "abcabcab"),
        (plan(2, 2, 12, &["model.tied=false"]), 6, "abcabc"),
    ];
    for (plan, needed, pods) in cases {
        let free = nodes(pods);
        let found = place(&plan, &free).expect("a placement");
        check(&plan, &free, &found);
        assert!(matches!(found.how, How::Exact { .. }));
        let best = enumerated(&plan, needed, &free);
        assert!((found.step_s / best - 1.0).abs() < 1e-9, "{pods}: {} and {best}", found.step_s);
    }
}

#[test]
fn replicas_of_a_stage_or_pipelines_share_a_pod() {
    // The gradients of a stage are more than its messages: each stage is in one pod.
    let found = place(&plan(8, 2, 4, &[]), &nodes("abababab")).expect("a placement");
    assert_eq!(found.placement.pods.concat(), "aaaabbbb");
    assert_eq!(found.placement.nodes, ["n1", "n3", "n5", "n7", "n2", "n4", "n6", "n8"]);
    assert!(found.by_name_s > 1.02 * found.step_s, "{found:?}");
    // Many micro-batches between two sums: pipelines are in one pod.
    let messages = plan(8, 4, 2, &["batch.global=512", "sharding.zero=0", "parallel.overlap=false"]);
    let found = place(&messages, &nodes("abababab")).expect("a placement");
    assert_eq!(found.placement.pods.concat(), "abababab");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_table_in_another_order_gives_the_same(
        seed in any::<u64>(),
        room in proptest::collection::vec(1_usize..20, 2..7),
        shape in 0_usize..4,
    ) {
        let (pp, dp) = [(2, 8), (4, 4), (8, 2), (1, 12)][shape];
        let plan = plan(8, pp, dp, &["model.layers=24"]);
        let letters: String =
            room.iter().enumerate().flat_map(|(i, &n)| std::iter::repeat_n((b'a' + i as u8) as char, n)).collect();
        let mut pods: Vec<char> = letters.chars().collect();
        let mut state = seed;
        let mut draw = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for i in (1..pods.len()).rev() {
            pods.swap(i, draw(i + 1));
        }
        let free = nodes(&pods.iter().collect::<String>());
        let mut other = free.clone();
        for i in (1..other.len()).rev() {
            other.swap(i, draw(i + 1));
        }
        let found = place(&plan, &free);
        prop_assert_eq!(&found, &place(&plan, &other));
        match found {
            Ok(found) => check(&plan, &free, &found),
            Err(error) => {
                prop_assert!(free.len() < pp * dp);
                prop_assert!(matches!(error, PlaceError::TooFewNodes { .. }), "{}", error);
            }
        }
    }
}

#[test]
fn mistakes_are_a_sentence_each() {
    let wrong = |plan: &Plan, pods| place(plan, &nodes(pods)).expect_err("a mistake").to_string();
    assert_eq!(wrong(&plan(8, 2, 4, &[]), "aabb"), "64 ranks need 8 nodes of 8, and the table has 4 free");
    let local = ConfigSource::demo().plan().expect("the demo");
    assert_eq!(wrong(&local, "aabb"), "a placement needs cluster.per_node, the ranks of a node");
    let unknown = ConfigSource::demo().set("cluster.per_node=4").plan().expect("a plan");
    assert!(wrong(&unknown, "aabb").starts_with("the time of a step is unknown"));
}

/// A thousand nodes in the test command; ten thousand if the whole suite was asked for.
#[test]
fn many_nodes_are_placed_within_a_bound() {
    let (dp, pods) = if std::env::var_os("KINTSUGI_FULL").is_some() { (1250, 90) } else { (125, 11) };
    let plan = plan(8, 8, dp, &["model.preset=gpt-175b"]);
    let size = |pod: usize| 96 + (pod * 37) % 33;
    let free: Vec<FreeNode> = (0..pods)
        .flat_map(|pod| (0..size(pod)).map(move |i| (pod, i)))
        .map(|(pod, i)| FreeNode { name: format!("n{}", 1 + i * pods + pod), pod: format!("p{pod}") })
        .collect();
    let begun = Instant::now();
    let found = place(&plan, &free).expect("a placement");
    println!(
        "{} of {} nodes: {:.1} s, {found:.3?}",
        8 * dp,
        free.len(),
        begun.elapsed().as_secs_f64(),
        found = (found.step_s, found.bound_s, found.by_name_s, found.random_s)
    );
    check(&plan, &free, &found);
    assert!(found.step_s < 1.2 * found.bound_s);
}

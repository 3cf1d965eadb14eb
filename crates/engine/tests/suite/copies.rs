//! A run that begins with the copies of states in the memory of nodes, of which one is lost, equals one that was never interrupted.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kintsugi_checkpoint::{CopyFolder, CopyPass, CopyRecord, CopySet};
use kintsugi_engine::{CopiedStart, Event, MemoryChoice, Start, StepReport, TrainOptions, dataset, train};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;

/// Copies come after steps 3 and 6.
const STEPS: u64 = 8;

/// A small model on eight ranks, with these settings.
fn plan(settings: &[&str]) -> Plan {
    let small = [
        "model.hidden=32",
        "model.ffn=64",
        "model.vocab=200",
        "batch.sequence=8",
        "batch.micro=1",
        "batch.global=8",
        "run.steps=8",
        "run.replicate_every=3",
        "run.eval_every=0",
        "cluster.per_node=2",
        "optimizer.warmup=2",
    ];
    ConfigSource::demo().sets(small).sets(settings).plan().expect("a legal config")
}

struct Node(PathBuf);

impl Node {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::remove_dir_all(&path).ok();
        fs::create_dir_all(&path).expect("a folder for tests");
        Node(path)
    }

    /// The files of copies of a rank's states, which it has itself or its neighbour.
    fn files(&self, origin: &str, rank: usize) -> Vec<PathBuf> {
        let folder = self.0.join("copies").join(origin);
        let files =
            fs::read_dir(folder).expect("it was reserved").map(|entry| entry.expect("an entry").path());
        let name = format!("rank-{rank:05}-");
        files.filter(|path| path.file_name().expect("a name").to_string_lossy().starts_with(&name)).collect()
    }
}

fn copies(plan: &Plan, node: &Node) -> CopyFolder {
    let folder = CopyFolder::new(&node.0, plan);
    (0..plan.mesh.ranks()).for_each(|rank| folder.reserve(plan, rank).expect("there is room"));
    folder
}

/// Trains from a start.
fn run(plan: &Plan, start: Start, copies: Option<&CopyFolder>) -> Vec<StepReport> {
    let options = TrainOptions { start, copies: copies.cloned(), ..TrainOptions::new(MemoryChoice::Heap) };
    let mut reports = Vec::new();
    let outcome = train(plan, &*dataset(plan).expect("its data"), &options, |event| {
        if let Event::Step(report) = event {
            reports.push(report.clone());
        }
    });
    let measured = outcome.expect("it trains").expect("rank 0 is here").measured;
    if copies.is_some() {
        assert_eq!(
            measured.replication.expect("states are copied").node_bytes,
            plan.copied_bytes_of_node(),
            "the memory of the copies is that of the plan"
        );
    }
    reports
}

/// What each rank finds on its node, which has the copies of its own ranks and of those of the node before. On `lost` there is nothing.
fn found(plan: &Plan, folder: &CopyFolder, lost: usize) -> Vec<Vec<CopyRecord>> {
    let (nodes, per_node) = plan.nodes();
    let on_node = |holder: usize, rank: usize| {
        let (holder, of) = (holder / per_node, rank / per_node);
        holder != lost && (of == holder || (of + 1) % nodes == holder)
    };
    (0..plan.mesh.ranks()).map(|holder| folder.whole(|rank| on_node(holder, rank))).collect()
}

fn numbers(reports: &[StepReport]) -> Vec<(u64, u64, u64, u64, u64)> {
    let bits = |r: &StepReport| (r.step, r.loss.to_bits(), r.grad_norm.to_bits(), r.lr.to_bits(), r.tokens);
    reports.iter().map(bits).collect()
}

#[test]
fn after_the_loss_of_any_node_not_a_bit_is_different() {
    let replicas =
        ["parallel.tp=1", "parallel.pp=1", "parallel.dp=8", "cluster.per_package=2", "cluster.per_node=4"];
    for settings in [
        &["sharding.zero=0", "optimizer.ema=0.9"][..],
        &["sharding.zero=2", "precision.compute=bf16", "precision.states=bf16"],
        &["sharding.zero=1", "optimizer.name=muon", "model.tied=false"],
        &["sharding.zero=3", "precision.compute=fp16", "parallel.schedule=zero-bubble", "cluster.per_node=4"],
        &[
            "parallel.tp=1",
            "parallel.pp=4",
            "sharding.zero=1",
            "optimizer.name=sgd",
            "precision.compute=bf16",
        ],
        &[&replicas[..], &["sharding.preset=zero++", "precision.compute=bf16"]].concat(),
        &[&replicas[..], &["sharding.preset=three-level", "sharding.quantize_weights=int8"]].concat(),
        &[&replicas[..], &["sharding.zero=1", "sharding.quantize_weights=int8", "precision.compute=fp16"]]
            .concat(),
    ] {
        let plan = plan(settings);
        let (nodes, per_node) = plan.nodes();
        for lost in 0..nodes {
            let node = Node::new("copies-node");
            let folder = copies(&plan, &node);
            let uninterrupted = run(&plan, Start::Seed, Some(&folder));
            assert_eq!(uninterrupted.len() as u64, STEPS);
            for rank in lost * per_node..(lost + 1) * per_node {
                let lost =
                    [node.files("own", rank), node.files("received", plan.rank_before(rank, 1))].concat();
                assert!(lost.len() >= 4, "two sets of both: {lost:?}");
                for file in &lost {
                    fs::remove_file(file).expect("it is there");
                }
            }
            let set = CopySet::newest(&plan, &found(&plan, &folder, lost), 0).expect("all states are left");
            assert_eq!(set.progress.step, 6, "{settings:?}");
            let passes: Vec<CopyPass> = (lost * per_node..(lost + 1) * per_node)
                .map(|rank| CopyPass { rank, nodes: nodes - 1 })
                .collect();
            assert_eq!(set.passes, passes, "the node after it has its copies");
            let folder = copies(&plan, &node);
            let start =
                Start::Copies(Arc::new(CopiedStart { folder: folder.clone(), set, origin: Start::Seed }));
            let resumed = run(&plan, start, None);
            assert_eq!(numbers(&uninterrupted[6..]), numbers(&resumed), "{settings:?}, node {lost}");
            let copies = folder.whole(|rank| rank / per_node == lost).len();
            assert_eq!(copies, 3 * per_node, "two sets of the neighbour, and the one that has passed");
        }
    }
}

#[test]
fn a_set_counts_if_all_of_it_is_whole_and_of_the_steps_that_the_run_keeps() {
    let plan = plan(&[]);
    let node = Node::new("copies-sets");
    let folder = copies(&plan, &node);
    run(&plan, Start::Seed, Some(&folder));
    let nobody = plan.nodes().0;
    let newest = |rollbacks| CopySet::newest(&plan, &found(&plan, &folder, nobody), rollbacks);
    assert_eq!(newest(0).map(|set| set.progress.step), Some(6));
    assert_eq!(newest(1), None, "the run has gone back since then");
    for file in [node.files("own", 1), node.files("received", 1)].concat() {
        let mode = fs::metadata(&file).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", file.display());
    }
    // The two copies of the newest states of rank 1. Their records say which they are.
    let newest_copy = |origin: &str| {
        let is_newest = |path: &PathBuf| {
            fs::read_to_string(path.with_extension("json")).is_ok_and(|record| record.contains("\"step\":6"))
        };
        node.files(origin, 1)
            .into_iter()
            .filter(|path| path.extension().is_none())
            .find(is_newest)
            .expect("a copy")
    };
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).expect("a copy");
        bytes[100] ^= 4;
        fs::write(path, bytes).expect("it is ours");
    };
    flip(&newest_copy("own"));
    assert_eq!(newest(0).map(|set| set.progress.step), Some(6), "the neighbour has a copy");
    flip(&newest_copy("received"));
    assert_eq!(newest(0).map(|set| set.progress.step), Some(3), "the set before is whole");
    // Another layout cannot use them.
    let other = ConfigSource::text(plan.to_toml()).set("optimizer.clip=0.5").plan().expect("a legal config");
    assert!(CopyFolder::new(&node.0, &other).whole(|_| true).is_empty());
    assert!(folder.whole(|_| true).is_empty(), "and they are removed");
}

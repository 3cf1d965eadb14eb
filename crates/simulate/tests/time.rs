//! Rules for step times that hold for all constants of the cost model.

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Coverage, check_planned, planned_device, predict, time};
use kintsugi_spec::{Hardware, presets};

const BASE: &[&str] =
    &["model.preset=gpt-1.3b", "batch.sequence=2048", "cluster.preset=h100", "precision.compute=bf16"];

fn plan(settings: &[&str]) -> Plan {
    ConfigSource::demo().sets(BASE).sets(settings).plan().expect("it is allowed")
}

fn seconds(settings: &[&str]) -> f64 {
    time(&plan(settings)).expect("the device's speed is known").step_s
}

#[test]
fn overlap_is_not_slower_where_stages_and_replicas_share_links() {
    for mesh in [[2, 4, 3], [8, 4, 8], [2, 4, 4]] {
        let [tp, pp, dp] = mesh.map(|n: usize| n.to_string());
        let [tp, pp, dp] = [("tp", tp), ("pp", pp), ("dp", dp)].map(|(key, n)| format!("parallel.{key}={n}"));
        let settings =
            [tp.as_str(), pp.as_str(), dp.as_str(), "batch.global=48", "batch.micro=1", "sharding.zero=1"];
        let with = |overlap: &'static str| seconds(&[&settings[..], &[overlap]].concat());
        let (together, apart) = (with("parallel.overlap=true"), with("parallel.overlap=false"));
        assert!(together <= apart, "{mesh:?}: {together} s with overlap, {apart} s without");
    }
}

/// Links without latency, so that a transfer in chunks takes as long as in one.
const NO_LATENCY: &[&str] =
    &["cluster.links.node.latency=0", "cluster.links.node.start=0", "cluster.links.node.short.until=0"];

#[test]
fn overlapped_tensor_parallel_transfers_hide_behind_products() {
    for bandwidth in [2e9, 2e10, 2e11] {
        for (tp, rows) in [(2, false), (4, true), (8, false), (8, true)] {
            let settings = [
                format!("parallel.tp={tp}"),
                format!("parallel.sequence_parallel={rows}"),
                format!("cluster.links.node.bandwidth={bandwidth}"),
            ];
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            let with = |overlap: &'static str| {
                let one_stage = ["parallel.pp=1", "parallel.dp=1", "batch.global=4", "batch.micro=2"];
                let plan = plan(&[&settings[..], NO_LATENCY, &one_stage, &[overlap]].concat());
                time(&plan).expect("the device's speed is known")
            };
            let (apart, together) = (with("parallel.overlap_tp=false"), with("parallel.overlap_tp=true"));
            let (transfers, what) = (apart.tensor_s, format!("tp {tp}, {rows}, {bandwidth}: {together:?}"));
            assert!(together.step_s <= 1.001 * (together.compute_s + transfers), "{what} {apart:?}");
            assert!(together.step_s >= 0.999 * together.compute_s.max(transfers), "{what} {apart:?}");
            assert!(together.tensor_s < transfers, "{what}: nothing is hidden of {transfers} s");
            if transfers > 0.1 * apart.step_s {
                assert!(together.step_s < apart.step_s, "{what} beside {apart:?}");
            }
        }
    }
}

/// A machine of two cores that copies 10 GB/s, for ranks that are threads.
const CORES: &str = "[model]\npreset = \"demo\"\n[cluster]\ncores = 2\n[cluster.device]\npeak_fp32 = 1e11\n\
                     memory_bandwidth = 1e10\n[cluster.links.node]\nlatency = 0\nstart = 0\nbandwidth = 1e10\n\
                     [parallel]\ndp = 2\n[batch]\nmicro = 4\nglobal = 8\n[sharding]\nzero = 3\n";

#[test]
fn emulated_links_overlap_and_copies_on_shared_cores_do_not() {
    let step = |settings: &[String]| {
        let plan = ConfigSource::text(CORES).sets(settings).plan().expect("it is allowed");
        time(&plan).expect("the device's speed is known").step_s
    };
    let overlap = |on: bool| format!("parallel.overlap={on}");
    let plain = step(&[overlap(true)]);
    assert!((step(&[overlap(false)]) / plain - 1.0).abs() < 1e-9, "copies take cores in any order");
    for bandwidth in [1e8, 1e9] {
        let link = format!("cluster.emulated.node.bandwidth={bandwidth}");
        let [together, apart] = [true, false].map(|on| step(&[overlap(on), link.clone()]));
        assert!(plain <= together && together < apart, "{plain} {together} {apart}");
    }
    let fast = step(&[overlap(true), "cluster.emulated.node.bandwidth=1e12".to_owned()]);
    assert!((fast / plain - 1.0).abs() < 1e-9, "a link that is faster than the copies changes nothing");
}

#[test]
fn an_emulated_link_is_free_during_its_latency() {
    let layout = ["parallel.dp=1", "parallel.tp=2", "sharding.zero=0"];
    let links = ["cluster.emulated.node.bandwidth=1e12", "cluster.emulated.node.latency=1e-3"];
    let [in_chunks, whole] = [true, false].map(|on| {
        let settings = format!("parallel.overlap_tp={on}");
        let plan = ConfigSource::text(CORES).sets(layout).sets(links).set(settings).plan();
        time(&plan.expect("it is allowed")).expect("the device's speed is known").step_s
    });
    assert!(in_chunks < 1.1 * whole, "chunks are on the link at the same time: {in_chunks} {whole}");
}

#[test]
fn messages_over_emulated_links_overlap_during_their_latency_and_take_no_cores() {
    let step = |layout: &[&str], latency: f64| {
        let links = [("bandwidth", 1e12), ("latency", latency)];
        let links = links.map(|(key, value)| format!("cluster.emulated.cluster.{key}={value}"));
        let plan =
            ConfigSource::text(CORES).sets(["sharding.zero=0", "batch.micro=1"]).sets(layout).sets(links);
        time(&plan.plan().expect("it is allowed")).expect("the device's speed is known").step_s
    };
    let latencies = |layout: &[&str]| step(layout, 2.0) - step(layout, 1.0);
    // Four micro-batches are in flight, and each passes six links. A stage in the middle sends 128 messages.
    let pipeline = latencies(&["cluster.per_node=1", "parallel.dp=1", "parallel.pp=4", "batch.global=64"]);
    assert!((96.0..112.0).contains(&pipeline), "{pipeline} latencies");
    // Kernels of four ranks on two cores take longer; messages do not.
    let two = latencies(&["cluster.per_node=2", "parallel.dp=2", "parallel.pp=2", "batch.global=8"]);
    let four = latencies(&["cluster.per_node=4", "parallel.dp=4", "parallel.pp=2", "batch.global=16"]);
    assert!((two - four).abs() < 0.5, "{two} and {four} latencies");
}

#[test]
fn a_step_of_years_takes_as_long_as_it_takes() {
    let slow =
        ["cluster.device.peak_16bit=1e9", "cluster.device.memory_bandwidth=1e9", "cluster.device.launch=0"];
    let with = |settings: &[&str]| {
        let shape = ["model.preset=gpt-175b", "batch.micro=1", "parallel.dp=1", "parallel.tp=1"];
        let plan = plan(&[&shape[..], &slow, settings].concat());
        (time(&plan).expect("the device's speed is known").step_s, plan.flops().hardware / 1e9)
    };
    for pp in ["parallel.pp=1", "parallel.pp=8"] {
        let (one, _) = with(&[pp, "batch.global=64"]);
        let (many, floor) = with(&[pp, "batch.global=6400"]);
        let stages = if pp.ends_with('8') { 8.0 } else { 1.0 };
        assert!(many > floor / stages && many < 4.0 * floor / stages, "{pp}: {many} s, {floor} s of FLOPs");
        assert!(many > 85.0 * one && many < 100.0 * one, "{pp}: {many} s, {one} s for a hundredth");
        // The ops of a single micro-batch exceed 64 bits of picoseconds.
        let (larger, floor) = with(&[pp, "batch.global=6400", "batch.micro=16"]);
        assert!(
            larger > floor / stages && larger < 4.0 * floor / stages,
            "{pp}: {larger} s, {floor} s of FLOPs"
        );
    }
}

#[test]
fn every_micro_batch_takes_time_however_often_the_pipeline_is_drained() {
    for (schedule, step) in [("1f1b", 1), ("interleaved", 4)] {
        let with = |micro_batches: usize| {
            let global = format!("batch.global={micro_batches}");
            let schedule = format!("parallel.schedule={schedule}");
            let mut settings =
                vec!["parallel.tp=1", "parallel.pp=4", "parallel.dp=1", "batch.micro=1", "framework.fills=4"];
            settings.extend([global.as_str(), schedule.as_str()]);
            settings.extend((step > 1).then_some("parallel.virtual_stages=2"));
            seconds(&settings)
        };
        let times: Vec<f64> = (1..=9).map(|n| with(n * step)).collect();
        assert!(times.is_sorted_by(|a, b| a < b), "{schedule}: {times:?}");
    }
}

/// Nobody has measured most of these machines. So the test asks for what no data sheet and no guess may break.
#[test]
fn every_cluster_times_a_model_between_its_bytes_and_its_peak() {
    for preset in presets::CLUSTERS.iter().filter(|preset| preset.name != "local") {
        let cluster = format!("cluster.preset={}", preset.name);
        let source = ConfigSource::text("model.preset = \"llama3.2-1b\"").sets([
            &*cluster,
            "cluster.nodes=2",
            "sharding.zero=1",
            "precision.compute=bf16",
            "batch.sequence=2048",
        ]);
        let plan = source.plan().unwrap_or_else(|error| panic!("{}: {error}", preset.name));
        let device = &plan.cluster.device;
        let peak = device.peak_16bit.or(device.peak_fp32).expect("a data sheet has a peak");
        let step = time(&plan).expect("the device's speed is known").step_s;
        let share = plan.flops().model / plan.mesh.ranks() as f64 / step / peak;
        assert!((0.001..device.matmul.unwrap()).contains(&share), "{}: {share} of the peak", preset.name);
        let stages = predict(&plan, planned_device(&plan, plan.mesh.ranks(), 48), Coverage::ShortStep).stages;
        let fits = check_planned(&plan, &stages, None);
        assert_eq!(fits.is_err(), device.kind == Some(Hardware::Cpu), "{}: {fits:?}", preset.name);
        if let Err(misfit) = fits {
            assert!(misfit.to_string().contains(&device.name), "{misfit}");
        }
    }
}

//! Requests that no machine could answer in time or memory are refused with the reason, at once.

use std::process::{Command, Output};

use serde_json::Value;

use crate::resume::stderr;
use crate::support::{command, folder, kintsugi, stdout};

/// Plans in two GiB and at most a minute.
fn bounded(name: &str, settings: &[&str], arguments: &[&str]) -> Output {
    let folder = folder(name);
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    let binary = command(
        &folder,
        &["plan"].into_iter().chain(sets).chain(arguments.iter().copied()).collect::<Vec<_>>(),
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -v 2097152 && exec timeout 60 \"$@\"", "sh"]);
    shell.arg(binary.get_program()).args(binary.get_args()).current_dir(&folder).output().unwrap()
}

#[test]
fn the_deepest_model_is_planned_on_one_stage() {
    let settings = ["model.layers=16384", "parallel.pp=1", "cluster.preset=frontier"];
    let said = stdout(&bounded("limits-layers", &settings, &[]));
    assert!(said.contains("16384 layers") && said.contains("\ntime     "), "{said}");
}

#[test]
fn a_pipeline_that_is_too_long_to_lay_out_is_refused() {
    let settings = |pp: &'static str, schedule: &'static str| {
        [
            "model.layers=1024",
            pp,
            schedule,
            "parallel.dp=1",
            "parallel.tp=1",
            "batch.micro=1",
            "batch.global=4096",
        ]
    };
    for schedule in ["parallel.schedule=1f1b", "parallel.schedule=gpipe"] {
        let output = bounded("limits-pipeline", &settings("parallel.pp=1024", schedule), &[]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = stderr(&output);
        assert!(
            said.starts_with("error: parallel.pp · micro-batches = 1024 · 4096 needs 41943040 ops "),
            "{said}"
        );
    }
    stdout(&bounded("limits-shorter", &settings("parallel.pp=32", "parallel.schedule=1f1b"), &[]));
}

#[test]
fn a_search_over_thousands_of_ranks_is_within_limits() {
    let settings = [
        "model.preset=gpt-22b",
        "model.layers=720",
        "batch.sequence=2048",
        "batch.global=5040",
        "precision.compute=fp16",
        "cluster.preset=frontier",
        "cluster.nodes=630",
    ];
    let narrow = ["--search", "--top", "1", "--only", "parallel.pp=1", "--only", "sharding.zero=1"];
    let narrow = [&narrow[..], &["--only", "memory.recompute=full", "--only", "batch.micro=1"]].concat();
    let found = stdout(&bounded("limits-narrow", &settings, &narrow));
    assert!(found.contains("search   5040 ranks"), "{found}");
}

#[test]
fn figures_beyond_what_a_machine_can_be_are_refused() {
    let folder = folder("limits-figures");
    let refused = |setting: &str| {
        let output = kintsugi(&folder, &["plan", "--set", "cluster.preset=frontier", "--set", setting]);
        assert_eq!(output.status.code(), Some(2), "{setting}: {output:?}");
        stderr(&output)
    };
    let said = refused("framework.interference=1e30");
    assert_eq!(said, "error: framework.interference = 1e30 must be from 0 to 1000\n");
    for setting in [
        "framework.interference=inf",
        "framework.products=1e30",
        "framework.kernels.copies=1e30",
        "framework.attention=1e30",
        "framework.attention_again=1e30",
        "framework.dropout=1e30",
        "framework.between_nodes=1e-30",
        "framework.replicas_between_nodes=1e30",
        "framework.reserve=1e30",
        "framework.logit_bytes=1e30",
        "framework.parameter_bytes=nan",
        "framework.kept=1e30",
        "framework.keeps.norms=1e30",
        "framework.layer_gradients=1e30",
        "cluster.price=1e30",
        "cluster.device.peak_16bit=1e30",
        "cluster.device.peak_fp32=inf",
        "cluster.device.memory_bandwidth=1e30",
        "cluster.device.matmul=1e-30",
        "cluster.device.streaming=1e-30",
        "cluster.device.ramp=1e30",
        "cluster.device.epilogue=1e-30",
        "cluster.device.power_idle=1e30",
        "cluster.device.power_max=1e30",
        "cluster.device.power_cap=1e30",
        "cluster.device.power_links=nan",
        "cluster.links.node.bandwidth=1e30",
        "cluster.links.node.efficiency=1e-30",
        "cluster.device.attention=[{ head_dim = 64, sequence = 64, forward = 1e-30, backward = 1e12 }]",
        "cluster.device.products=[{ m = 1, n = 1, k = 1, flops = 1e30 }]",
        "cluster.device.kernels=[{ name = \"a\", bandwidth = 1e30 }]",
    ] {
        let (field, said) = (setting.split('=').next().unwrap(), refused(setting));
        assert!(said.contains(field) && said.contains(" must be from "), "{setting}: {said}");
    }
}

/// The slowest machine that is allowed: its times are long, and none of them overflows.
#[test]
fn the_largest_figures_give_a_long_time_and_not_none() {
    let step = |name: &str, settings: &[&str]| -> f64 {
        let layout = ["parallel.tp=2", "parallel.pp=2", "parallel.dp=16", "batch.micro=4", "batch.global=64"];
        let settings = [&["cluster.preset=frontier"], &layout[..], settings].concat();
        let answer: Value = serde_json::from_str(&stdout(&bounded(name, &settings, &["--json"]))).unwrap();
        answer["step_s"].as_f64().unwrap()
    };
    let usual = step("limits-usual", &[]);
    let beside = step("limits-beside", &["framework.interference=1000"]);
    assert!(beside > usual, "{beside} {usual}");
    let slow =
        ["framework.interference=1000", "framework.kernels.copies=1000", "cluster.device.peak_fp32=1e6"];
    let slow = step(
        "limits-slow",
        &[&slow[..], &["cluster.device.memory_bandwidth=1e6", "framework.host=60"]].concat(),
    );
    assert!(slow > 1000.0 * beside, "{slow} {beside}");
}

//! Predictions for people and for scripts.

use serde_json::Value;

use crate::support::{folder, json_lines, keys, kintsugi, stdout};

fn plan(name: &str, arguments: &[&str]) -> String {
    stdout(&kintsugi(&folder(name), &[&["plan"], arguments].concat()))
}

#[test]
fn scripts_get_every_key() {
    let answer: Value = serde_json::from_str(&plan("plan-json", &["--json"])).unwrap();
    let names = [
        "fits",
        "params",
        "ranks",
        "micro_batches",
        "flops",
        "step_s",
        "tokens_per_s_per_gpu",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "mfu",
        "bubble",
        "memory",
        "comm",
        "energy_j_per_step",
        "power_w_per_gpu",
    ];
    assert_eq!(keys(&answer), names);
    assert_eq!(answer["memory"].as_array().unwrap().len(), 2);
    let categories =
        ["weights", "gradients", "states", "activations", "workspace", "communication", "total", "reserved"];
    assert_eq!(keys(&answer["memory"][0]), categories);
    assert_eq!(answer["params"], 817_920);
    assert_eq!(answer["fits"], true);
}

#[test]
fn a_plan_that_does_not_fit_is_an_answer() {
    let settings = ["--json", "--set", "cluster.device.memory=1000000"];
    let answer: Value = serde_json::from_str(&plan("plan-misfit", &settings)).unwrap();
    assert_eq!(answer["fits"], false);
}

#[test]
fn people_get_tables_and_a_picture() {
    let settings =
        ["--draw", "--set", "parallel.schedule=zero-bubble", "--set", "cluster.device.memory=1000000000"];
    insta::assert_snapshot!(plan("plan-draw", &settings), @"");
}

#[test]
fn sharding_that_does_nothing_is_noted() {
    let report = plan("plan-note", &["--set", "parallel.dp=1", "--set", "sharding.zero=1"]);
    let note = "note: sharding states over the cluster is the same as not sharding them: there is one replica, \
                parallel.dp = 1\n";
    assert!(report.ends_with(note), "{report}");
    assert!(!plan("plan-no-note", &[]).contains("note:"));
}

#[test]
fn the_trace_is_that_of_the_schedule() {
    let folder = folder("plan-trace");
    stdout(&kintsugi(&folder, &["plan", "--trace", "schedule.json"]));
    let trace = &json_lines(&folder.join("schedule.json"))[0];
    let events = trace["traceEvents"].as_array().unwrap();
    // Two stages of two layers, four micro-batches, forward and backward.
    assert_eq!(events.iter().filter(|event| event["ph"] == "X").count(), 2 * 2 * 4 * 2);
}

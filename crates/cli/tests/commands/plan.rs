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
    let report = plan("plan-draw", &settings);
    let paragraphs: Vec<&str> = report.split("\n\n").collect();
    let [summary, memory, traffic, picture] = paragraphs[..] else { panic!("{report}") };
    insta::assert_snapshot!(summary, @r"
    model    demo (gpt), 817.92 k parameters: 4 layers of width 128, 4 heads, ffn 512, vocabulary 128
    layout   8 ranks (local): tp 2 · pp 2 · dp 2, zero-bubble, ZeRO-1, recompute none, fp32
    step     2048 tokens: 2 replicas × 4 micro-batches × 4 samples × 64 tokens
    FLOPs    model 10.62 G, hardware 10.62 G per step
    bubble   7.7 % of the time, with unit costs
    fits     yes
    ");
    assert_eq!(memory.lines().count(), 3, "a header and two stages\n{memory}");
    assert!(traffic.contains("node all_reduce"), "{traffic}");
    insta::assert_snapshot!(picture, @r"
    stage 0  F0░░F1░░    B0▒▒W0▓▓F2░░B1▒▒W1▓▓F3░░B2▒▒W2▓▓B3▒▒W3▓▓
    stage 1      F0░░B0▒▒F1░░B1▒▒W0▓▓F2░░B2▒▒W1▓▓F3░░B3▒▒W2▓▓W3▓▓
    F░ forward   B▒ backward, inputs   W▓ backward, weights   bubble 7.7 %
    ");
}

/// The first column of the table of stages.
fn stages(report: &str) -> Vec<&str> {
    let rows = report.lines().skip_while(|line| !line.starts_with("  stage")).skip(1);
    rows.take_while(|row| !row.is_empty()).map(|row| row[2..].split("  ").next().unwrap()).collect()
}

#[test]
fn equal_stages_share_a_row_and_many_different_ones_are_cut_short() {
    let deep = ["--set", "model.layers=32", "--set", "parallel.pp=32", "--set", "parallel.tp=1"];
    assert_eq!(stages(&plan("plan-equal", &deep)), ["0", "1 – 28", "29", "30", "31"]);
    let many = [&deep[..], &["--set", "batch.micro=1", "--set", "batch.global=128"]].concat();
    let gap = "… (--json has every stage)";
    assert_eq!(
        stages(&plan("plan-different", &many)),
        ["0", "1", "2", "3", "4", "5", gap, "26", "27", "28", "29", "30", "31"]
    );
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
    assert_eq!(events.iter().filter(|event| event["cat"] == "compute").count(), 2 * 2 * 4 * 2);
}

//! Runs write their files, repeat bit for bit, and end cleanly on request.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use kintsugi_plan::config::ConfigSource;
use serde_json::Value;

use crate::support::{TINY, command, folder, json_lines, keys, kintsugi, stdout, tiny};

fn summary(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("out/summary.json")).unwrap()).unwrap()
}

fn losses(folder: &Path) -> Vec<Value> {
    json_lines(&folder.join("out/metrics.jsonl")).iter().map(|line| line["loss"].clone()).collect()
}

#[test]
fn no_steps_leave_the_initial_weights_and_batches_are_written_down() {
    let folder = folder("train-none");
    let said = stdout(&tiny(&folder, &["train"], &["run.steps=0"]));
    assert!(
        said.contains("steps    0: nothing was trained\nsaved    out/checkpoints/step-00000000 "),
        "{said}"
    );
    let straight = [&["train", "--write-batches", "batches.npy"][..]].concat();
    stdout(&tiny(&folder, &straight, &["run.out=a"]));
    // Four steps of four samples, each of seventeen tokens.
    let bytes = fs::read(folder.join("batches.npy")).unwrap();
    assert_eq!(bytes.len(), 128 + 4 * 4 * 4 * 17);
    stdout(&tiny(&folder, &["train", "--resume=out"], &["run.out=b"]));
    let losses = |out: &str| -> Vec<Value> {
        json_lines(&folder.join(out).join("metrics.jsonl")).iter().map(|line| line["loss"].clone()).collect()
    };
    assert_eq!(losses("a"), losses("b"), "they are the weights that training starts with");
}

#[test]
fn a_run_leaves_metrics_and_a_summary() {
    let folder = folder("train-files");
    let printed: Value = serde_json::from_str(&stdout(&tiny(&folder, &["train", "--json"], &[]))).unwrap();
    let summary = summary(&folder);
    assert_eq!(printed, summary);
    let metrics = json_lines(&folder.join("out/metrics.jsonl"));
    let names = [
        "schema",
        "time",
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "step_s",
        "mfu",
        "loss_scale",
        "skipped",
    ];
    let with = |more: &[&'static str]| [&names[..], more, &["samples"]].concat();
    assert_eq!(keys(&metrics[0]), with(&[]));
    assert_eq!(keys(&metrics[1]), with(&["validation_loss"]));
    assert_eq!(keys(&metrics[3]), with(&["checkpoint_s", "validation_loss"]));
    assert!(metrics.windows(2).all(|pair| pair[0]["time"].as_f64() <= pair[1]["time"].as_f64()));
    assert_eq!(metrics.len(), 4);
    let names = [
        "params",
        "ranks",
        "steps",
        "skipped",
        "stopped",
        "failure",
        "loss_first",
        "loss_last",
        "loss_floor",
        "validation_loss",
        "resumed_after",
        "checkpoints",
        "predicted",
        "measured",
    ];
    assert_eq!(keys(&summary), names);
    assert_eq!(summary["ranks"], 8);
    assert_eq!(summary["stopped"], false);
    assert_eq!(summary["loss_first"], metrics[0]["loss"]);
    assert_eq!(summary["loss_last"], metrics[3]["loss"]);
    assert_eq!(summary["validation_loss"], metrics[3]["validation_loss"]);
    assert_eq!(keys(&summary["checkpoints"]), ["last", "saved", "failed", "blocked_s", "write_s"]);
    let left = ["checkpoints", "config.toml", "flight", "metrics.jsonl", "run.lock", "summary.json"];
    let mut found: Vec<_> =
        fs::read_dir(folder.join("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    found.sort();
    assert_eq!(found, left, "nothing half-written is left");
}

#[test]
fn the_configuration_that_is_left_repeats_the_run() {
    let folder = folder("train-config");
    let more = ["parallel.schedule=interleaved", "model.layers=4", "sharding.zero=3", "run.seed=9"];
    let said = stdout(&tiny(&folder, &["train"], &more));
    assert!(said.contains("out/config.toml"), "{said}");
    let left = folder.join("out/config.toml");
    let text = fs::read_to_string(&left).unwrap();
    assert_eq!(ConfigSource::text(&text).plan(), ConfigSource::demo().sets(TINY).sets(more).plan());
    let before = losses(&folder);
    stdout(&kintsugi(&folder, &["train", "out/config.toml"]));
    assert_eq!(losses(&folder), before);
    assert_eq!(fs::read_to_string(&left).unwrap(), text);
}

#[test]
fn weights_without_deviation_predict_every_token_alike() {
    let folder = folder("train-init-std");
    stdout(&tiny(&folder, &["train"], &["model.init_std=0", "run.steps=1"]));
    let loss = losses(&folder)[0].as_f64().unwrap();
    assert!((loss - 128f64.ln()).abs() < 1e-6, "{loss}");
}

/// The steps whose lines on stderr have a loss.
fn logged(name: &str, settings: &[&str]) -> (Vec<String>, String) {
    let output = tiny(&folder(name), &["train"], &[&["run.keep=0", "run.eval_every=0"], settings].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    let step = |line: &str| line.split_once("  loss ").map(|(step, _)| step.to_owned());
    (said.lines().filter_map(step).collect(), said)
}

#[test]
fn lines_appear_every_ten_steps_or_as_asked() {
    let (steps, said) = logged("train-log", &["run.steps=25", "cluster.preset=a100"]);
    assert_eq!(steps, ["step  1/25", "step 10/25", "step 20/25", "step 25/25"], "{said}");
    let line = said.lines().find(|line| line.starts_with("step 10/25")).unwrap();
    let parts: Vec<&str> = line.split("  ").skip(1).collect();
    let [loss, norm, lr, speed, mfu, left] = parts[..] else { panic!("{line}") };
    assert!(loss.starts_with("loss ") && norm.starts_with("norm ") && lr.starts_with("lr "), "{line}");
    assert!(speed.ends_with(" tokens/s") && mfu.starts_with("MFU ") && left.ends_with(" left"), "{line}");
    let (steps, said) = logged("train-log-every", &["run.steps=9", "run.log_every=4"]);
    assert_eq!(steps, ["step 1/9", "step 4/9", "step 8/9", "step 9/9"], "{said}");
}

#[test]
fn a_folder_may_be_named_by_a_date() {
    let folder = folder("train-date");
    stdout(&tiny(&folder, &["train"], &["run.out=20251116", "run.steps=1"]));
    assert!(folder.join("20251116/summary.json").exists());
    let left = fs::read_to_string(folder.join("20251116/config.toml")).unwrap();
    assert!(left.contains("out = \"20251116\"\n"), "{left}");
}

#[test]
fn the_given_configuration_is_never_replaced() {
    let folder = folder("train-own-config");
    let left = folder.join("out/config.toml");
    fs::create_dir(folder.join("out")).unwrap();
    let own = "# My own.\nmodel.preset = \"demo\"\nbatch = { sequence = 16, global = 4 }\nrun.steps = 2\n";
    fs::write(&left, own).unwrap();
    stdout(&kintsugi(&folder, &["train", "out/config.toml"]));
    assert_eq!(fs::read_to_string(&left).unwrap(), own);
    let output = kintsugi(&folder, &["train", "out/config.toml", "--set", "run.steps=3"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(fs::read_to_string(&left).unwrap(), own);
    assert_eq!(losses(&folder).len(), 2, "the run that is there stays");
}

#[test]
fn a_step_that_is_skipped_is_said_plainly() {
    let folder = folder("train-skipped");
    let settings =
        ["precision.compute=fp16", "precision.loss_scale=1e9", "run.max_skipped=2", "run.eval_every=0"];
    let output = tiny(&folder, &["train"], &settings);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    let skipped = "step 1/4  skipped: the loss or a gradient is not finite, so the weights stay unchanged; \
                   loss scale now 1000000000\n";
    assert!(said.starts_with(skipped), "{said}");
    assert_eq!(said.lines().count(), 4, "two steps, a checkpoint, and the end\n{said}");
}

#[test]
fn time_and_energy_are_predicted_where_the_machine_is_known() {
    let folder = folder("train-time");
    stdout(&tiny(&folder, &["train"], &["cluster.preset=a100"]));
    let predicted = summary(&folder)["predicted"].clone();
    let plan: Value =
        serde_json::from_str(&stdout(&tiny(&folder, &["plan", "--json"], &["cluster.preset=a100"]))).unwrap();
    assert!(plan["step_s"].as_f64().unwrap() > 0.0);
    assert_eq!(predicted["step_s"], plan["step_s"]);
    assert_eq!(predicted["energy_j"], plan["energy_j_per_step"]);
}

#[test]
fn traffic_and_memory_are_as_predicted() {
    let folder = folder("train-predicted");
    let layout = ["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"];
    stdout(&tiny(
        &folder,
        &["train"],
        &[&layout[..], &["sharding.zero=3", "cluster.preset=frontier"]].concat(),
    ));
    // Frontier is a cluster of GPUs, and eight threads have no GPU each: the run and its prediction are the CPU's.
    let config = fs::read_to_string(folder.join("out/config.toml")).unwrap();
    assert!(
        config.contains("\ndeterministic = true\n") && config.contains("\ndevice = \"cpu\"\n"),
        "{config}"
    );
    let summary = summary(&folder);
    let (predicted, measured) = (&summary["predicted"], &summary["measured"]);
    assert_eq!(keys(predicted), ["peak_bytes", "comm_bytes", "step_s", "tokens_per_s", "energy_j"]);
    assert_eq!(keys(predicted), keys(measured));
    assert!(!keys(&predicted["comm_bytes"]).is_empty());
    assert_eq!(predicted["comm_bytes"], measured["comm_bytes"]);
    for (before, after) in
        predicted["peak_bytes"].as_array().unwrap().iter().zip(measured["peak_bytes"].as_array().unwrap())
    {
        assert_eq!(before["total"], after["total"]);
        assert!(after["reserved"].as_u64() >= before["reserved"].as_u64(), "{before} {after}");
    }
}

#[test]
fn two_runs_have_the_same_losses() {
    let [first, second] = ["train-first", "train-second"].map(folder);
    for folder in [&first, &second] {
        stdout(&tiny(folder, &["train"], &[]));
    }
    assert_eq!(losses(&first), losses(&second));
    assert_eq!(losses(&first).len(), 4);
}

#[test]
fn another_seed_has_other_losses_and_replaces_the_old_run() {
    let folder = folder("train-seeds");
    stdout(&tiny(&folder, &["train"], &[]));
    let before = losses(&folder);
    stdout(&tiny(&folder, &["train"], &["run.seed=7"]));
    assert_ne!(before, losses(&folder));
    assert_eq!(losses(&folder).len(), 4);
}

#[test]
fn the_trace_has_every_rank() {
    let folder = folder("train-trace");
    let said = stdout(&tiny(&folder, &["train", "--trace", "step.json"], &[]));
    assert!(said.ends_with("trace    step.json\n"), "{said}");
    let trace = &json_lines(&folder.join("step.json"))[0];
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..8 {
        assert!(events.iter().any(|event| event["pid"] == rank && event["ph"] == "X"), "rank {rank}");
    }
    // The transfers have a row of their own, and together they have the bytes of the step.
    let transfers: Vec<_> = events.iter().filter(|event| event["cat"] == "transfers").collect();
    let in_a_layer = |event: &&Value| {
        event["name"] == "all_reduce over tp"
            && event["args"]["op"].as_str().is_some_and(|op| op.starts_with("forward layer"))
            && event["args"]["waited"].as_f64().is_some_and(|waited| waited >= 0.0)
    };
    assert!(transfers.iter().any(in_a_layer), "{transfers:?}");
    let sent = transfers.iter().filter(|event| event["name"] != "receive over pp");
    let sent: u64 = sent.filter_map(|event| event["args"]["bytes"].as_u64()).sum();
    let summary = summary(&folder);
    let levels = summary["measured"]["comm_bytes"].as_object().unwrap().values();
    let operations = levels.flat_map(|operations| operations.as_object().unwrap().values());
    assert_eq!(sent, operations.map(|bytes| bytes.as_u64().unwrap()).sum::<u64>());
}

#[test]
fn another_step_can_be_traced_but_none_that_is_not_run() {
    let folder = folder("train-trace-step");
    let said = stdout(&tiny(&folder, &["train", "--trace", "step.json", "--trace-step", "4"], &[]));
    assert!(said.ends_with("trace    step.json\n"), "{said}");
    let output = tiny(&folder, &["train", "--trace", "step.json", "--trace-step", "5"], &[]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "error: --trace-step 5: this run has 4 steps\n");
    assert_eq!(losses(&folder).len(), 4, "the run before it is as it was");
}

#[test]
fn a_signal_ends_a_run_with_a_whole_summary() {
    let folder = folder("train-signal");
    let settings = TINY.iter().chain(&["run.steps=1000000", "run.eval_every=0"]);
    let arguments: Vec<&str> = ["train"].into_iter().chain(settings.flat_map(|s| ["--set", s])).collect();
    let mut run = command(&folder, &arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let metrics = folder.join("out/metrics.jsonl");
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 2 {
        assert!(run.try_wait().unwrap().is_none(), "it ended by itself");
        sleep(Duration::from_millis(10));
    }
    assert!(Command::new("kill").args(["-TERM", &run.id().to_string()]).status().unwrap().success());
    assert!(run.wait().unwrap().success());
    let summary = summary(&folder);
    assert_eq!(summary["stopped"], true);
    let steps = json_lines(&metrics);
    assert_eq!(summary["steps"], steps.len());
    assert_eq!(summary["loss_last"], steps.last().unwrap()["loss"]);
}

#[test]
fn a_run_and_its_plan_count_mfu_alike() {
    let folder = folder("train-mfu");
    fs::write(
        folder.join("run.toml"),
        "[model]\npreset = \"demo\"\n[cluster]\ncores = 2\n[cluster.device]\npeak_fp32 = 1e11\nmemory_bandwidth = 1e10\n",
    )
    .unwrap();
    let settings = ["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"];
    stdout(&tiny(&folder, &["train", "run.toml"], &settings));
    let plan: Value =
        serde_json::from_str(&stdout(&tiny(&folder, &["plan", "run.toml", "--json"], &settings))).unwrap();
    // Seconds of a step at the peak.
    let at_peak = |figures: &Value| figures["mfu"].as_f64().unwrap() * figures["step_s"].as_f64().unwrap();
    for line in json_lines(&folder.join("out/metrics.jsonl")) {
        assert!((at_peak(&line) / at_peak(&plan) - 1.0).abs() < 1e-9, "{line} {plan}");
    }
}

#[test]
fn event_files_for_tensorboard_lie_beside_the_metrics() {
    let folder = folder("train-tensorboard");
    tiny(&folder, &["train"], &["run.log=[\"tensorboard\"]", "run.steps=2"]);
    let events = |out: &str| -> Vec<Vec<u8>> {
        let entries = fs::read_dir(folder.join(out)).expect("a folder of events");
        entries.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
    };
    let found = events("out/tensorboard");
    assert_eq!(found.len(), 1);
    let has = |name: &str| found[0].windows(name.len()).any(|part| part == name.as_bytes());
    for name in ["brain.Event:2", "loss", "tokens_per_s", "samples", "skipped", "config/text_summary"] {
        assert!(has(name), "{name}");
    }
    tiny(&folder, &["train"], &["run.steps=2"]);
    assert!(!folder.join("out/tensorboard").exists(), "the events of the run before are moved aside");
    assert_eq!(events("out/checkpoints-1/tensorboard").len(), 1);
}

//! `kintsugi tune`: real trials, and what is left of a tuning that was killed.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{TINY, command, folder, json_lines, kintsugi, stdout};

/// A tuning of the tiny model on two ranks, with short trials unless `more` says how long they are.
fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let sets = TINY.iter().chain(&["parallel.dp=2", "parallel.tp=1", "parallel.pp=1"]);
    let sets = sets.flat_map(|set| ["--set", set]);
    let few = ["--warm-up", "1", "--space", "parallel.schedule=1f1b", "--space", "sharding.zero=0,1"];
    let short = ["--steps", "2"].into_iter().filter(|_| !more.contains(&"--steps"));
    ["tune"].into_iter().chain(sets).chain(few).chain(short).chain(more.iter().copied()).collect()
}

fn tuned(folder: &Path, more: &[&str]) -> Output {
    kintsugi(folder, &arguments(more))
}

fn trials(folder: &Path) -> Vec<Value> {
    json_lines(&folder.join("tuning/trials.jsonl"))
}

#[test]
fn a_tuning_finds_a_strategy_that_trains() {
    let folder = folder("tune");
    let answer: Value = serde_json::from_str(&stdout(&tuned(&folder, &["--trials", "6", "--json"]))).unwrap();
    assert_eq!(answer["trials"], 6);
    let lines = trials(&folder);
    let settings: HashSet<String> = lines.iter().map(|line| line["settings"].to_string()).collect();
    assert_eq!((lines.len(), settings.len()), (6, 6), "no candidate twice");
    let seconds = |line: &Value| line["step_s"].as_f64().unwrap();
    let best = lines.iter().map(seconds).fold(f64::INFINITY, f64::min);
    assert!((answer["best"]["step_s"].as_f64().unwrap() - best).abs() < 1e-12);
    assert!(
        lines
            .iter()
            .all(|line| line["outcome"] == "finished" && line["predicted"]["reserved_bytes"].is_u64())
    );
    // More trials continue; the configuration of the best is one that train takes.
    let said = stdout(&tuned(&folder, &["--trials", "8"]));
    assert!(said.contains("before   6 trials") && said.contains("trials   8:"), "{said}");
    assert_eq!(trials(&folder)[..6], lines[..]);
    let text = fs::read_to_string(folder.join("tuning/best.toml")).unwrap();
    assert!(text.contains("the choice of kintsugi tune") && !text.contains("[optimizer.betas]"), "{text}");
    stdout(&kintsugi(&folder, &["train", "tuning/best.toml", "--set", "run.steps=1"]));
    // Its page has the trajectory, the importance and every trial.
    let page: Value =
        serde_json::from_str(&stdout(&kintsugi(&folder, &["report", "tuning", "--json"]))).unwrap();
    let titles: Vec<&str> = page["sections"]
        .as_array()
        .unwrap()
        .iter()
        .map(|section| section["title"].as_str().unwrap())
        .collect();
    assert_eq!(titles, ["Trials", "What matters", "Every trial"]);
    stdout(&kintsugi(&folder, &["report", "tuning"]));
}

#[test]
fn a_space_that_is_wrong_is_refused() {
    let folder = folder("tune-space");
    for (space, said) in [
        ("parallel.tp=0", "--space: parallel.tp = 0 must be a number from 1"),
        ("parallel.tp", "--space: \"parallel.tp\" must be table.key=value,value"),
        ("parallel.tp=64", "no strategy fits"),
        ("model.colour=red", "model.colour"),
    ] {
        let output = tuned(&folder, &["--trials", "1", "--space", space]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(said), "{space}: {error}");
    }
    let output = tuned(&folder, &["--by", "cost"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("--by cost needs cluster.price"));
}

#[test]
fn values_of_any_other_key_are_tried_too() {
    let folder = folder("tune-variants");
    let more = [
        "--trials",
        "4",
        "--space",
        "batch.sequence=8,16",
        "--space",
        "sharding.zero=0",
        "--space",
        "batch.micro=1",
    ];
    stdout(&tuned(&folder, &more));
    let sequences: HashSet<String> =
        trials(&folder).iter().map(|line| line["settings"]["batch.sequence"].to_string()).collect();
    assert_eq!(sequences, ["\"8\"".to_owned(), "\"16\"".to_owned()].into());
}

#[test]
fn a_trial_that_takes_too_long_or_too_much_is_a_failure() {
    let folder = folder("tune-limits");
    let output = tuned(&folder, &["--trials", "1", "--steps", "100000", "--deadline", "0.3"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(trials(&folder)[0]["outcome"], "timeout");
    let output = tuned(&folder, &["--trials", "2", "--steps", "100000", "--memory", "1000"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(trials(&folder)[1]["outcome"], "out-of-memory");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("no trial worked"), "{said}");
    // The next trials go on, and one that works is the best.
    assert!(stdout(&tuned(&folder, &["--trials", "3"])).contains("best     tuning/best.toml"));
}

#[test]
fn candidates_keep_the_constraint_on_memory_and_trials_that_on_time() {
    let folder = folder("tune-constraints");
    stdout(&tuned(&folder, &["--trials", "3"]));
    let bytes = |line: &Value| line["predicted"]["reserved_bytes"].as_u64().unwrap();
    let least = trials(&folder).iter().map(bytes).min().unwrap();
    let most = least.to_string();
    stdout(&tuned(&folder, &["--trials", "100", "--out", "small", "--at-most-memory", &most]));
    let small = json_lines(&folder.join("small/trials.jsonl"));
    assert!(!small.is_empty() && small.iter().all(|line| bytes(line) <= least), "{small:?}");
    let output = tuned(&folder, &["--trials", "1", "--out", "fast", "--at-most-step", "1e-9"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && said.contains(": outside of the constraints"), "{said}");
    let nothing = String::from_utf8(tuned(&folder, &["--at-most-memory", "1000"]).stderr).unwrap();
    assert!(nothing.contains("no strategy fits"), "{nothing}");
}

/// Processes of the trials in a folder.
fn running(folder: &Path) -> Vec<String> {
    let trials = folder.join("tuning/trials").display().to_string();
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let ids = entries.filter_map(|entry| entry.file_name().to_str().map(str::to_owned));
    let names = |id: &String| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&trials)
    };
    ids.filter(|id| id.parse::<u32>().is_ok()).filter(names).collect()
}

fn wait_for_a_trial(folder: &Path, tuner: &mut Child) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let found = running(folder);
        if !found.is_empty() {
            return found;
        }
        assert!(tuner.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(2));
    }
}

fn begun(folder: &Path, more: &[&str]) -> Child {
    let mut command = command(folder, &arguments(more));
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn signal(name: &str, id: &str) {
    let sent = std::process::Command::new("kill").args([&format!("-{name}"), id]).status();
    assert!(sent.is_ok());
}

#[test]
fn a_trial_that_is_killed_or_stopped_from_outside_is_a_failure() {
    let folder = folder("tune-killed-trials");
    let more = ["--trials", "2", "--steps", "100000", "--deadline", "2"];
    let mut tuner = begun(&folder, &more);
    signal("KILL", &wait_for_a_trial(&folder, &mut tuner)[0]);
    while trials_if_any(&folder).is_empty() {
        thread::sleep(Duration::from_millis(2));
    }
    signal("STOP", &wait_for_a_trial(&folder, &mut tuner)[0]);
    tuner.wait().unwrap();
    let outcomes: Vec<Value> = trials(&folder).iter().map(|line| line["outcome"].clone()).collect();
    assert_eq!(outcomes, ["killed", "timeout"]);
    assert!(running(&folder).is_empty());
}

fn trials_if_any(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("tuning/trials.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn a_tuner_that_is_killed_loses_and_repeats_no_trial() {
    let folder = folder("tune-killed");
    let mut finished: Vec<Value> = Vec::new();
    // From during the first trial to between later ones.
    for pause in [30, 300, 700, 1100] {
        let mut tuner = begun(&folder, &["--trials", "7"]);
        let now = Instant::now();
        while tuner.try_wait().unwrap().is_none() && now.elapsed() < Duration::from_millis(pause) {
            thread::sleep(Duration::from_millis(5));
        }
        tuner.kill().ok();
        tuner.wait().unwrap();
        let found = trials_if_any(&folder);
        assert_eq!(found[..finished.len()], finished[..], "none is lost");
        finished = found;
    }
    stdout(&tuned(&folder, &["--trials", "7"]));
    let lines = trials(&folder);
    assert_eq!(lines[..finished.len()], finished[..]);
    let settings: HashSet<String> = lines.iter().map(|line| line["settings"].to_string()).collect();
    assert_eq!((lines.len(), settings.len()), (7, 7), "none is repeated");
    assert!(running(&folder).is_empty());
}

#[test]
fn a_disk_without_room_ends_the_tuning_with_what_it_has() {
    let folder = folder("tune-full");
    stdout(&tuned(&folder, &["--trials", "2"]));
    let before = fs::read(folder.join("tuning/trials.jsonl")).unwrap();
    // No file may grow beyond a kilobyte: as a full disk, the room for the next line is missing.
    let binary = command(&folder, &arguments(&["--trials", "4"]));
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "ulimit -f 2 && exec \"$@\"", "sh"]).arg(binary.get_program()).args(binary.get_args());
    let output = shell.current_dir(&folder).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("the same command continues"), "{said}");
    assert_eq!(fs::read(folder.join("tuning/trials.jsonl")).unwrap(), before);
    stdout(&tuned(&folder, &["--trials", "4"]));
    assert_eq!(trials(&folder).len(), 4);
}

/// A cluster whose links between nodes are four times slower than its preset says.
const WORLD: &str = "[cluster.links]\ncluster = { efficiency = 0.2 }\n";

#[test]
fn a_simulated_tuning_learns_what_the_planner_did_not_know() {
    let folder = folder("tune-simulated");
    fs::write(folder.join("world.toml"), WORLD).unwrap();
    let more =
        ["--space", "parallel.tp=1,2,4,8", "--space", "parallel.schedule=1f1b", "--learn", "learned.toml"];
    let sets = [
        "model.preset=gpt-1.4b",
        "cluster.preset=h100",
        "cluster.nodes=4",
        "batch.global=64",
        "precision.compute=bf16",
    ];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let fixed = ["tune", "--executor", "simulated", "--world", "world.toml", "--trials", "14", "--json"];
    let arguments: Vec<&str> = fixed.into_iter().chain(sets).chain(more).collect();
    let answer: Value = serde_json::from_str(&stdout(&kintsugi(&folder, &arguments))).unwrap();
    assert!(answer["gain"].as_f64().unwrap() > -1e-9, "{answer}");
    let unseen = &answer["learned"]["unseen"];
    assert!(unseen[1].as_f64().unwrap() < 0.5 * unseen[0].as_f64().unwrap(), "{unseen}");
    let text = fs::read_to_string(folder.join("learned.toml")).unwrap();
    assert!(text.starts_with("# Learned by kintsugi tune --learn from 14 trials"), "{text}");
    stdout(&kintsugi(&folder, &["plan", "--profile", "learned.toml", "--set", "model.preset=gpt-1.4b"]));
}

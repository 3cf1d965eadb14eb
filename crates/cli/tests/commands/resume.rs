//! Runs that stop and resume: from the newest complete checkpoint, on any layout, with one metrics file.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use kintsugi_gpu::CUDA;
use serde_json::Value;

use crate::support::{TINY, command, folder, json_lines, kintsugi, stdout, tiny};

/// The metrics that do not depend on the clock.
pub fn numbers(folder: &Path) -> Vec<[Value; 5]> {
    let of = |line: &Value| ["step", "loss", "grad_norm", "lr", "tokens"].map(|key| line[key].clone());
    json_lines(&folder.join("out/metrics.jsonl")).iter().map(of).collect()
}

/// The entries of a run's checkpoint folder, oldest first, without the lock.
pub fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("out/checkpoints")).map(|entries| entries.flatten().collect());
    let entries: Vec<fs::DirEntry> = entries.unwrap_or_default();
    let mut names: Vec<String> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn summary(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("out/summary.json")).unwrap()).unwrap()
}

/// Starts the tiny model with more settings and leaves it running.
pub fn start(folder: &Path, arguments: &[&str], settings: &[&str]) -> Child {
    let settings = TINY.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    let arguments: Vec<&str> = arguments.iter().copied().chain(settings).collect();
    command(folder, &arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until a run has written this many lines of metrics.
pub fn wait_for_steps(run: &mut Child, folder: &Path, steps: usize) {
    while fs::read_to_string(folder.join("out/metrics.jsonl")).map_or(0, |text| text.lines().count()) < steps
    {
        assert!(run.try_wait().unwrap().is_none(), "it ended by itself");
        sleep(Duration::from_millis(5));
    }
}

/// Sends a signal, such as `-TERM`, to a run.
pub fn signal(run: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &run.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_run_in_two_parts_is_the_run_in_one() {
    let [whole, parts] = ["resume-whole", "resume-parts"].map(folder);
    let settings = ["run.steps=8", "run.checkpoint_every=3", "sharding.zero=1"];
    stdout(&tiny(&whole, &["train"], &settings));
    assert_eq!(checkpoints(&whole), ["step-00000006", "step-00000008"], "the newest two are kept");

    // As if the run had been killed after step 7, with the checkpoint of step 6.
    stdout(&tiny(&parts, &["train"], &settings));
    fs::remove_dir_all(parts.join("out/checkpoints/step-00000008")).unwrap();
    let said = stdout(&tiny(&parts, &["train", "--resume"], &settings));
    assert!(said.contains("note     resumes after step 6 from out/checkpoints/step-00000006\n"), "{said}");
    assert!(
        said.contains("saved    out/checkpoints/step-00000008 (1 in all; training paused for "),
        "{said}"
    );
    assert_eq!(numbers(&parts), numbers(&whole), "no line is lost, none is there twice");
    let summary = summary(&parts);
    assert_eq!((&summary["resumed_after"], &summary["steps"]), (&6.into(), &8.into()));
    assert_eq!(summary["loss_first"], json_lines(&whole.join("out/metrics.jsonl"))[0]["loss"]);
    assert_eq!(summary["checkpoints"]["last"], "out/checkpoints/step-00000008");
    let shard = |folder: &Path| {
        fs::read(folder.join("out/checkpoints/step-00000008/rank-00003.safetensors")).unwrap()
    };
    assert_eq!(shard(&parts), shard(&whole));
}

#[test]
fn a_run_goes_on_on_another_layout() {
    let folder = folder("resume-layout");
    stdout(&tiny(&folder, &["train"], &[]));
    let before = numbers(&folder);
    let other = ["run.steps=6", "parallel.tp=1", "parallel.pp=2", "parallel.dp=4", "sharding.zero=3"];
    let resume = ["train", "out/config.toml", "--resume"];
    let sets = other.iter().flat_map(|set| ["--set", set]);
    let arguments: Vec<&str> = resume.into_iter().chain(sets).collect();
    let said = stdout(&command(&folder, &arguments).output().unwrap());
    assert!(said.contains("resumes after step 4"), "{said}");
    let after = numbers(&folder);
    assert_eq!((after.len(), &after[..4]), (6, &before[..]));
    assert_eq!(checkpoints(&folder), ["step-00000004", "step-00000006"]);
}

#[test]
fn a_checkpoint_of_another_run_can_be_gone_on_from() {
    let folder = folder("resume-path");
    stdout(&tiny(&folder, &["train"], &[]));
    let settings = ["run.out=other", "run.steps=6", "run.keep=0"];
    for path in ["out", "out/checkpoints", "out/checkpoints/step-00000004"] {
        let said = stdout(&tiny(&folder, &["train", &format!("--resume={path}")], &settings));
        assert!(said.contains("resumes after step 4 from out/checkpoints/step-00000004"), "{said}");
    }
    assert_eq!(json_lines(&folder.join("other/metrics.jsonl")).len(), 2, "its own steps alone");
    assert!(!folder.join("other/checkpoints").exists(), "none shall be kept");
    let output = tiny(&folder, &["train", "--resume=absent"], &settings);
    assert_eq!(
        (output.status.code(), stderr(&output)),
        (Some(2), "error: absent: there is no such folder\n".into())
    );
}

#[test]
fn a_run_knows_its_own_checkpoints_by_any_path() {
    let folder = folder("resume-own");
    stdout(&tiny(&folder, &["train"], &[]));
    for (steps, path) in [(5, folder.join("out").display().to_string()), (6, "./out".to_owned())] {
        let settings = [&format!("run.steps={steps}")[..]];
        let said = stdout(&tiny(&folder, &["train", &format!("--resume={path}")], &settings));
        assert!(!said.contains("are now in"), "{said}");
        assert_eq!(numbers(&folder).len(), steps, "its metrics go on");
    }
    stdout(&tiny(&folder, &["train"], &[]));
    let said = stdout(&tiny(&folder, &["train", "--resume=out/checkpoints-1"], &["run.steps=7"]));
    assert!(said.contains("are now in out/checkpoints-2\n"), "what was set aside is another run's: {said}");
    assert_eq!(numbers(&folder).len(), 1, "its own steps alone");
}

#[test]
fn a_new_run_never_goes_on_from_an_old_ones_checkpoints() {
    let folder = folder("resume-anew");
    let said = stdout(&tiny(&folder, &["train", "--resume"], &["run.steps=6"]));
    assert!(said.contains("note     no checkpoint in out: starts from the beginning\n"), "{said}");
    let said = stdout(&tiny(&folder, &["train"], &["run.seed=5"]));
    assert!(said.contains("of the previous run are now in out/checkpoints-1\n"), "{said}");
    assert_eq!(checkpoints(&folder), ["step-00000004"]);
    assert!(folder.join("out/checkpoints-1/step-00000006/manifest.json").exists(), "nothing is lost");
}

#[test]
fn every_signal_saves_and_a_resumed_run_goes_on_from_there() {
    for (name, signal_name) in [("term", "-TERM"), ("int", "-INT"), ("usr1", "-USR1")] {
        let folder = folder(&format!("resume-signal-{name}"));
        let endless = ["run.steps=1000000", "run.eval_every=0"];
        let mut run = start(&folder, &["train"], &endless);
        wait_for_steps(&mut run, &folder, 2);
        signal(&run, signal_name);
        assert!(run.wait().unwrap().success());
        let steps = json_lines(&folder.join("out/metrics.jsonl")).len();
        assert_eq!(checkpoints(&folder), [format!("step-{steps:08}")]);
        let mut run = start(&folder, &["train", "--resume"], &endless);
        wait_for_steps(&mut run, &folder, steps + 1);
        signal(&run, signal_name);
        assert!(run.wait().unwrap().success());
        let lines = json_lines(&folder.join("out/metrics.jsonl"));
        let expected: Vec<Value> = (1..=lines.len() as u64).map(Value::from).collect();
        assert_eq!(lines.iter().map(|line| line["step"].clone()).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn what_is_not_as_it_was_is_said() {
    let folder = folder("resume-changes");
    for name in ["a", "b"] {
        fs::write(folder.join("text.txt"), format!("{name} fish swims. ").repeat(300)).unwrap();
        stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", name, "--tokenizer", "bytes"]));
    }
    let of_a = ["model.vocab=257", "data.source=a", "data.split=0.1"];
    let one = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1"];
    stdout(&tiny(&folder, &["train"], &[&of_a[..], &one].concat()));
    let resume = |settings: &[&str]| {
        let settings = [&of_a[..], &one, &["run.steps=5", "run.out=other"], settings].concat();
        tiny(&folder, &["train", "--resume=out"], &settings)
    };
    let said = |settings: &[&str]| {
        let output = resume(settings);
        stdout(&output);
        let warnings = stderr(&output);
        warnings.lines().filter(|line| line.starts_with("warning: ")).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(said(&[]), "");
    insta::assert_snapshot!(
        said(&["run.seed=7"]),
        @"warning: run.seed = 7, but it was 1 up to step 4: from now on samples come in another order, and some are repeated"
    );
    insta::assert_snapshot!(
        said(&["data.source=b"]),
        @r#"warning: data.source = "b", but it was "a" up to step 4: it continues at sample 16 of the new order"#
    );
    insta::assert_snapshot!(
        said(&["data.source=[{ path = \"a\", weight = 3 }, { path = \"b\", weight = 1 }]", "data.split=0.05"]),
        @r#"
    warning: data.source = 75 % "a" and 25 % "b", but it was "a" up to step 4: it continues at sample 16 of the new order
    warning: data.split = 0.05, but it was 0.1 up to step 4: samples that were kept for validation are trained on, and the order of samples changes
    "#
    );
    insta::assert_snapshot!(
        said(&["data.mask_documents=true"]),
        @"warning: data.mask_documents = true, but it was false up to step 4: from now on a token attends to its own document only"
    );
    for source in ["data.source=./a", "data.source=a.bin", "data.source=./a.idx"] {
        let output = resume(&["data.split=0.2", source]);
        assert!(
            stderr(&output).ends_with("it would be validated on samples that it was trained on\n"),
            "{output:?}"
        );
    }
    for (setting, said) in [
        (
            "data.split=0.2",
            "trained with data.split = 0.1; with 0.2 it would be validated on samples that it was trained on\n",
        ),
        ("batch.sequence=8", "with batch.sequence = 16; with 8 its position in the data is unknown\n"),
    ] {
        let output = resume(&[setting, "model.positions=16"]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).ends_with(said) && stderr(&output).lines().count() == 1, "{output:?}");
    }
}

#[test]
fn a_finished_run_says_so_and_is_left_as_it_is() {
    let folder = folder("resume-finished");
    stdout(&tiny(&folder, &["train"], &[]));
    let files = ["summary.json", "metrics.jsonl", "config.toml"].map(|name| folder.join("out").join(name));
    let contents = || files.each_ref().map(|path| fs::read_to_string(path).unwrap());
    let before = contents();
    let output = tiny(&folder, &["train", "--resume"], &[]);
    insta::assert_snapshot!(
        stdout(&output),
        @"finished out is at step 4 of 4: nothing is left to train; a larger run.steps continues the run"
    );
    assert_eq!((stderr(&output), contents()), (String::new(), before.clone()));
    assert_eq!(stdout(&tiny(&folder, &["train", "--resume", "--json"], &[])), before[0], "its summary");
    // A copy of it in another folder is not this run.
    let output = tiny(&folder, &["train", "--resume=out"], &["run.out=other"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).ends_with("run.steps = 4 leaves nothing to train\n"), "{output:?}");
    // What is missing is said.
    fs::remove_file(&files[0]).unwrap();
    fs::write(&files[1], before[1].split_inclusive('\n').take(2).collect::<String>()).unwrap();
    let output = tiny(&folder, &["train", "--resume", "--json"], &[]);
    assert_eq!(stdout(&output), "null\n");
    insta::assert_snapshot!(stderr(&output), @r"
    warning: out/metrics.jsonl has no lines for steps 3 to 4
    warning: out/summary.json is missing or damaged: the run was ended after its last checkpoint
    finished out is at step 4 of 4: nothing is left to train; a larger run.steps continues the run
    ");
    stdout(&tiny(&folder, &["train", "--resume"], &["run.steps=5"]));
    assert_eq!(numbers(&folder).len(), 3, "two lines are missing");
}

#[test]
fn a_mistake_is_one_sentence() {
    let folder = folder("resume-mistakes");
    stdout(&tiny(&folder, &["train"], &[]));
    let metrics = fs::read(folder.join("out/metrics.jsonl")).unwrap();
    for (arguments, settings, said) in [
        (
            &["train", "--resume"][..],
            &["model.hidden=64"][..],
            "it has model.hidden = 32, but this run has 64; the model must be the same\n",
        ),
        (
            &["train", "--resume"],
            &["run.steps=3"],
            "it is already at step 4; run.steps = 3 leaves nothing to train\n",
        ),
        (
            &["train", "--resume"],
            &["batch.global=12", "run.steps=9"],
            "it has seen 16 samples, which is not a multiple of batch.global = 12; use 4\n",
        ),
        (
            &["train"],
            &["run.resume=[7]"],
            "run.resume = [7] must be true, false or the path of a checkpoint\n",
        ),
    ] {
        let output = tiny(&folder, arguments, settings);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).ends_with(said) && stderr(&output).lines().count() == 1, "{output:?}");
    }
    assert_eq!(fs::read(folder.join("out/metrics.jsonl")).unwrap(), metrics, "what is there stays");
}

#[test]
fn a_run_that_is_resumed_keeps_its_device() {
    let folder = folder("resume-device");
    stdout(&tiny(&folder, &["train"], &["run.steps=2"]));
    let left = fs::read_to_string(folder.join("out/config.toml")).unwrap();
    assert!(left.contains("\ndevice = \"cpu\"\n"), "{left}");
    stdout(&kintsugi(&folder, &["convert", "out", "gpus", "--set", "run.device=cuda"]));
    let resume = |settings: &[&str]| {
        tiny(&folder, &["train", "--resume=gpus"], &[&["run.steps=4", "run.out=more"], settings].concat())
    };
    if CUDA.devices().is_err() {
        let output = resume(&[]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.ends_with("keeps its device: set run.device = \"cpu\" to continue it on the CPU\n"),
            "{said}"
        );
    }
    stdout(&resume(&["run.device=cpu"]));
}

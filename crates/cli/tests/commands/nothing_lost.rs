//! What a run must not lose: good checkpoints while it diverges, folders of other programs, files that no run has
//! written.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::Duration;

use kintsugi_checkpoint::Checkpoint;

use crate::resume::{checkpoints, numbers, signal, start, stderr, wait_for_steps};
use crate::support::{command, folder, json_lines, kintsugi, stdout};

/// A gpt of 2 layers of width 16, on two ranks with ZeRO-1.
const SMALL: [&str; 13] = [
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "batch.sequence=16",
    "batch.micro=1",
    "batch.global=4",
    "optimizer.warmup=2",
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp=2",
    "sharding.zero=1",
    "run.eval_every=0",
    "run.steps=4",
];

fn small(folder: &Path, arguments: &[&str], settings: &[&str]) -> Output {
    let settings = SMALL.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    kintsugi(folder, &arguments.iter().copied().chain(settings).collect::<Vec<_>>())
}

/// Everything in a folder except locks: names and contents.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let (mut found, mut open) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(at) = open.pop() {
        for path in fs::read_dir(at).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.strip_prefix(folder).unwrap().display().to_string();
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            } else if !name.ends_with("run.lock") {
                found.push((name, fs::read(&path).unwrap_or_default()));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_run_that_diverges_keeps_its_last_good_checkpoint() {
    // Every fifth step is saved, or every step: then the update that makes the weights diverge is saved too.
    for (name, every, keep) in
        [("some", "run.checkpoint_every=5", "2"), ("all", "run.checkpoint_every=1", "1")]
    {
        let folder = folder(&format!("lost-diverged-{name}"));
        let saving = [every, &format!("run.keep={keep}")];
        stdout(&small(&folder, &["train"], &[&saving[..], &["run.steps=40"]].concat()));
        let diverges = ["run.steps=200", "optimizer.lr=1e6", "optimizer.min_lr=0", "optimizer.clip=0"];
        // When a run gives up, its state is saved if it is finite.
        for _ in 0..2 {
            let output = small(&folder, &["train", "--resume"], &[&saving[..], &diverges].concat());
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            let left = checkpoints(&folder);
            assert!(left.contains(&"step-00000040".to_owned()) && left.len() <= 3, "{left:?}");
            for name in left {
                Checkpoint::open(&folder.join("out/checkpoints").join(&name)).unwrap();
            }
        }
        let output = small(&folder, &["train", "--resume"], &[&saving[..], &["run.steps=90"]].concat());
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains("the last checkpoint of a good step is out/checkpoints/step-00000040\n"),
            "{said}"
        );
        let good = ["train", "--resume=out/checkpoints/step-00000040"];
        stdout(&small(&folder, &good, &[&saving[..], &["run.steps=60"]].concat()));
        assert_eq!(numbers(&folder).len(), 60);
    }
}

#[test]
fn weights_that_are_not_finite_are_never_published() {
    let folder = folder("lost-infinite");
    // The first update is larger than fp16's largest number.
    let diverges = ["precision.compute=fp16", "optimizer.lr=1e6", "optimizer.min_lr=0", "optimizer.clip=0"];
    let settings = [&diverges[..], &["run.checkpoint_every=1", "run.max_skipped=3", "run.steps=9"]].concat();
    let output = small(&folder, &["train"], &settings);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(checkpoints(&folder), Vec::<String>::new());
    let said = stderr(&output);
    assert!(said.contains("warning: the checkpoint of step 1 was not written: "), "{said}");
    assert!(said.contains(" has numbers that are not finite\n"), "{said}");
}

#[test]
fn a_run_that_is_asked_to_stop_in_a_streak_of_skipped_steps_saves_its_weights() {
    let folder = folder("lost-streak");
    let overflows = ["precision.compute=fp16", "precision.loss_scale=1e9", "run.max_skipped=1000000"];
    let endless = [&SMALL[..], &overflows, &["run.steps=1000000"]].concat();
    let mut run = start(&folder, &["train"], &endless);
    wait_for_steps(&mut run, &folder, 3);
    signal(&run, "-TERM");
    let output = run.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let steps = json_lines(&folder.join("out/metrics.jsonl")).len();
    assert_eq!(checkpoints(&folder), [format!("step-{steps:08}")]);
}

#[test]
fn a_resumed_run_counts_skipped_steps_anew() {
    let folder = folder("lost-counter");
    let overflows = ["precision.compute=fp16", "run.max_skipped=5", "run.steps=30"];
    let fixed = |scale: &'static str| [&overflows[..], &[scale]].concat();
    let output = small(&folder, &["train"], &fixed("precision.loss_scale=1e9"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(checkpoints(&folder), ["step-00000005"], "weights that are finite are saved");
    let output = small(&folder, &["train", "--resume"], &fixed("precision.loss_scale=1e9"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(numbers(&folder).len(), 10, "five more steps were tried");
    stdout(&small(&folder, &["train", "--resume"], &fixed("precision.loss_scale=128")));
    assert_eq!(numbers(&folder).len(), 30);
}

#[test]
fn a_save_that_falls_on_a_skipped_step_is_made_after_the_next_good_one() {
    let folder = folder("lost-late-save");
    // With this scale the gradients of the first steps overflow, and those of later ones do not.
    let scale = ["precision.compute=fp16", "precision.loss_scale=1.7e6"];
    let settings = [&scale[..], &["run.steps=12", "run.checkpoint_every=2", "run.keep=99"]].concat();
    stdout(&small(&folder, &["train"], &settings));
    let (mut due, mut late, mut expected) = (false, 0, Vec::new());
    for line in json_lines(&folder.join("out/metrics.jsonl")) {
        let (step, skipped) = (line["step"].as_u64().unwrap(), line["skipped"] == true);
        due |= step % 2 == 0;
        late += usize::from(due && skipped);
        if due && !skipped {
            expected.push(format!("step-{step:08}"));
            due = false;
        }
    }
    assert!(late > 0, "no checkpoint fell on a skipped step");
    assert_eq!(checkpoints(&folder), expected);
}

#[test]
fn the_checkpoint_just_written_is_never_pruned() {
    let folder = folder("lost-prune");
    stdout(&small(&folder, &["train"], &[]));
    let path = |name: &str| folder.join("out/checkpoints").join(name);
    let copied = Command::new("cp").arg("-r").args([path("step-00000004"), folder.join("copy")]).status();
    assert!(copied.unwrap().success());
    // A folder with a higher number appears during the run.
    let endless = [&SMALL[..], &["run.steps=1000000", "run.checkpoint_every=1", "run.keep=1"]].concat();
    let mut run = start(&folder, &["train", "--resume"], &endless);
    while !checkpoints(&folder).contains(&"step-00000006".to_owned()) && !path("step-00000007").exists() {
        assert!(run.try_wait().unwrap().is_none(), "it ended by itself");
        sleep(Duration::from_millis(1));
    }
    fs::rename(folder.join("copy"), path("step-99999999")).unwrap();
    sleep(Duration::from_millis(300));
    assert!(Command::new("kill").args(["-TERM", &run.id().to_string()]).status().unwrap().success());
    assert!(run.wait().unwrap().success());
    let steps = json_lines(&folder.join("out/metrics.jsonl")).len();
    assert_eq!(checkpoints(&folder), [format!("step-{steps:08}"), "step-99999999".to_owned()]);
    Checkpoint::open(&path(&format!("step-{steps:08}"))).unwrap();
    let output = small(&folder, &["train", "--resume"], &["run.keep=1"]);
    let name = "out/checkpoints/step-99999999";
    let refused = format!("warning: {name}: its name says step 99999999, but its manifest step 4; rename");
    assert!(stderr(&output).starts_with(&refused), "{output:?}");
}

#[test]
fn checkpoints_on_a_disk_that_is_not_there_are_no_reason_to_start_again() {
    let folder = folder("lost-link");
    stdout(&small(&folder, &["train"], &[]));
    fs::rename(folder.join("out/checkpoints"), folder.join("disk")).unwrap();
    symlink("../unmounted", folder.join("out/checkpoints")).unwrap();
    let before = contents(&folder);
    for arguments in [&["train", "--resume"][..], &["train"]] {
        let output = small(&folder, arguments, &["run.steps=6"]);
        let said = "error: out/checkpoints: it is a link to ../unmounted, which does not exist; is its disk mounted?\n";
        assert_eq!((output.status.code(), &stderr(&output)[..]), (Some(2), said));
        assert_eq!(contents(&folder), before);
    }
    fs::rename(folder.join("disk"), folder.join("unmounted")).unwrap();
    stdout(&small(&folder, &["train", "--resume"], &["run.steps=6"]));
    assert_eq!(numbers(&folder).len(), 6);
}

#[test]
fn starting_again_sets_everything_of_the_run_before_aside() {
    let folder = folder("lost-again");
    for keep in ["run.keep=0", "run.keep=1"] {
        stdout(&small(&folder, &["train"], &["run.seed=3", keep]));
    }
    let files = ["config.toml", "metrics.jsonl", "summary.json"];
    let before = files.map(|name| fs::read(folder.join("out").join(name)).unwrap());
    let said = stdout(&small(&folder, &["train"], &["run.seed=4"]));
    assert!(said.contains("files of the previous run are now in out/checkpoints-2\n"), "{said}");
    let aside = folder.join("out/checkpoints-2");
    assert_eq!(files.map(|name| fs::read(aside.join(name)).unwrap()), before);
    Checkpoint::open(&aside.join("step-00000004")).unwrap();
    assert!(folder.join("out/checkpoints-1/metrics.jsonl").exists(), "a run without checkpoints too");
    // The configuration from which a run is started stays in place and is copied.
    stdout(&kintsugi(&folder, &["train", "out/config.toml"]));
    for name in files {
        assert!(
            folder.join("out").join(name).exists() && folder.join("out/checkpoints-3").join(name).exists()
        );
    }
}

#[test]
fn a_file_that_no_run_wrote_is_never_replaced() {
    let folder = folder("lost-foreign");
    stdout(&small(&folder, &["train"], &[]));
    stdout(&kintsugi(&folder, &["convert", "out", "exported"]));
    fs::write(folder.join("exported/run.lock"), "of another program").unwrap();
    for name in ["tokenizer_config.json", "tokenizer.json", "metrics.jsonl", "summary.json", "config.toml"] {
        let foreign = folder.join("exported").join(name);
        fs::write(&foreign, "{}").unwrap();
        let before = contents(&folder.join("exported"));
        let output = small(&folder, &["train"], &["run.out=exported"]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = format!("error: exported/{name} exists, but no run has written it; ");
        assert!(stderr(&output).starts_with(&said), "{output:?}");
        assert_eq!(contents(&folder.join("exported")), before);
        fs::remove_file(foreign).unwrap();
    }
    let output = small(&folder, &["train"], &["run.out=exported"]);
    assert!(
        stderr(&output).starts_with("error: exported/run.lock exists, but no run has written it; "),
        "{output:?}"
    );
    assert_eq!(fs::read_to_string(folder.join("exported/run.lock")).unwrap(), "of another program");
}

#[test]
fn damaged_metrics_hold_no_resume_up_and_a_gap_is_said() {
    let folder = folder("lost-metrics");
    stdout(&small(&folder, &["train"], &["run.steps=6"]));
    let path = folder.join("out/metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<Vec<u8>> = text.lines().map(|line| line.as_bytes().to_vec()).collect();
    lines[2][5] = 0xFF;
    fs::write(&path, [lines.join(&b'\n'), b"\n".to_vec()].concat()).unwrap();
    let output = small(&folder, &["train", "--resume"], &["run.steps=8"]);
    stdout(&output);
    assert!(
        stderr(&output).starts_with("warning: out/metrics.jsonl has no lines for steps 3 to 3; 1 damaged lines of out/metrics.jsonl were removed\n"),
        "{output:?}"
    );
    let steps: Vec<u64> = json_lines(&path).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 4, 5, 6, 7, 8]);
}

#[test]
fn metrics_that_cannot_be_written_are_said_and_end_no_run() {
    let folder = folder("lost-full");
    let settings = [&SMALL[..], &["run.steps=60", "run.keep=0"]].concat();
    let sets = settings.iter().flat_map(|setting| ["--set", setting]);
    let binary = command(&folder, &["train"].into_iter().chain(sets).collect::<Vec<_>>());
    // Eight KiB suffice for the configuration, but not for the metrics.
    let script = "trap '' XFSZ; ulimit -f 16 && exec \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(binary.get_program()).args(binary.get_args());
    let output = shell.current_dir(&folder).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = stderr(&output);
    let warning = "warning: cannot write out/metrics.jsonl: File too large (os error 27); the run continues";
    assert_eq!(said.matches(warning).count(), 1, "{said}");
    assert!(said.contains("step 60/60"), "the run goes on to its end: {said}");
    assert!(
        said.ends_with("error: cannot write out/metrics.jsonl: File too large (os error 27)\n"),
        "{said}"
    );
    let whole = json_lines(&folder.join("out/metrics.jsonl"));
    assert!(!whole.is_empty() && whole.len() < 60, "no half a line is left");
}

#[test]
fn two_runs_whose_checkpoints_are_one_folder_are_one_too_many() {
    let folder = folder("lost-shared");
    stdout(&small(&folder, &["train"], &["run.out=other"]));
    fs::create_dir_all(folder.join("out")).unwrap();
    symlink("../other/checkpoints", folder.join("out/checkpoints")).unwrap();
    let endless = [&SMALL[..], &["run.steps=1000000"]].concat();
    let mut first = start(&folder, &["train", "--resume"], &endless);
    while !folder.join("out/metrics.jsonl").exists() {
        assert!(first.try_wait().unwrap().is_none(), "it ended by itself");
        sleep(Duration::from_millis(5));
    }
    let second = small(&folder, &["train", "--resume"], &["run.out=other", "run.steps=9"]);
    let process = first.id();
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(second.status.code(), Some(2), "{second:?}");
    let said = format!("error: other/checkpoints: another run, process {process}, writes its checkpoints to");
    assert!(stderr(&second).starts_with(&said), "{second:?}");
}

#[test]
fn what_others_put_among_the_checkpoints_stays_and_holds_nobody_up() {
    let folder = folder("lost-stray");
    stdout(&small(&folder, &["train"], &[]));
    let stray = |name: &str| folder.join("out/checkpoints").join(name);
    fs::write(stray("step-00000009"), "a file").unwrap();
    fs::write(stray("notes.partial"), "a file").unwrap();
    fs::create_dir(stray("download.partial")).unwrap();
    fs::create_dir(stray("step-copy")).unwrap();
    let output = small(&folder, &["train", "--resume"], &["run.steps=6", "run.keep=1"]);
    let said = stdout(&output);
    assert!(said.contains("resumes after step 4") && !stderr(&output).contains("warning"), "{output:?}");
    let names = ["download.partial", "notes.partial", "step-00000006", "step-00000009", "step-copy"];
    assert_eq!(checkpoints(&folder), names);
}

#[test]
fn a_run_is_evaluated_from_any_folder() {
    let folder = folder("lost-paths");
    fs::write(folder.join("text.txt"), "a fish swims in the sea. ".repeat(300)).unwrap();
    stdout(&kintsugi(&folder, &["prepare", "text.txt", "--out", "corpus", "--tokenizer", "bytes"]));
    stdout(&small(&folder, &["train"], &["model.vocab=257", "data.source=corpus", "data.split=0.2"]));
    fs::create_dir(folder.join("elsewhere")).unwrap();
    let here = stdout(&kintsugi(&folder, &["eval", "out"]));
    let there = stdout(&kintsugi(&folder.join("elsewhere"), &["eval", "../out"]));
    let loss = |said: &str| said.lines().find(|line| line.starts_with("loss")).map(str::to_owned);
    assert!(loss(&here).is_some() && loss(&here) == loss(&there), "{here}\n{there}");
}

#[test]
fn a_run_that_gave_up_leaves_a_summary() {
    let folder = folder("lost-summary");
    let overflows = ["precision.compute=fp16", "precision.loss_scale=1e9", "run.max_skipped=3"];
    let output = small(&folder, &["train"], &overflows);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let summary = json_file(&folder.join("out/summary.json"));
    assert_eq!((&summary["steps"], &summary["skipped"]), (&3.into(), &3.into()));
    let failure = summary["failure"].as_str().unwrap();
    assert!(stderr(&output).ends_with(&format!("error: {failure}\n")), "{output:?}");
    stdout(&small(&folder, &["train"], &[]));
    assert!(json_file(&folder.join("out/summary.json"))["failure"].is_null());

    // A failing output does not hide the error.
    let sets = SMALL.iter().chain(&overflows).flat_map(|setting| ["--set", setting]);
    let mut run = command(&folder, &["train", "--json"].into_iter().chain(sets).collect::<Vec<_>>());
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = run.stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = stderr(&output);
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 2, "{said}");
    assert!(
        errors[0].starts_with("error: 3 steps in a row, ") && errors[1].contains("cannot write the output")
    );
}

#[test]
fn a_summary_that_cannot_be_written_hides_no_other_failure() {
    let folder = folder("lost-both");
    fs::create_dir_all(folder.join("out/checkpoints")).unwrap();
    let endless = [&SMALL[..], &["run.steps=1000000"]].concat();
    let mut run = start(&folder, &["train"], &endless);
    while !fs::metadata(folder.join("out/metrics.jsonl")).is_ok_and(|file| file.len() > 0) {
        assert!(run.try_wait().unwrap().is_none(), "it ended by itself");
        sleep(Duration::from_millis(5));
    }
    // From now on neither a checkpoint nor a summary can be written.
    fs::remove_dir_all(folder.join("out/checkpoints")).unwrap();
    fs::write(folder.join("out/checkpoints"), "a file").unwrap();
    fs::create_dir(folder.join("out/summary.json.kintsugi-partial")).unwrap();
    assert!(Command::new("kill").args(["-TERM", &run.id().to_string()]).status().unwrap().success());
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = stderr(&output);
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 2, "{said}");
    assert!(errors[0].starts_with("error: the checkpoint of step "), "{said}");
    assert!(errors[1].starts_with("error: cannot write out/summary.json: "), "{said}");
}

fn json_file(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

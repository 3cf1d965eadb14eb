//! Faults of real runs on real disks: killed while saving, a full disk, a broken checkpoint, two runs in one folder.
//! Each fault is reported, the previous checkpoint is complete, and the run resumes from it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kintsugi_checkpoint::{Checkpoint, CheckpointFolder};

use crate::resume::{checkpoints, numbers, start, stderr};
use crate::support::{TINY, folder, stdout, tiny, under};
use kintsugi_testing::{Need, cases, skip};

/// One rank, which starts quickly and saves as often as possible.
const ALONE: [&str; 7] = [
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp=1",
    "run.eval_every=0",
    "run.checkpoint_every=1",
    "run.steps=400",
    "model.layers=1",
];

/// The newest step, after checking that every checkpoint is complete.
fn newest_of_whole(folder: &Path) -> u64 {
    let all = CheckpointFolder::of_run(&folder.join("out")).list().unwrap();
    for (step, path) in &all {
        let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("half a checkpoint: {error}"));
        assert_eq!(checkpoint.progress().step, *step);
    }
    all.first().map_or(0, |(step, _)| *step)
}

#[test]
fn killed_in_the_middle_of_saves_a_run_loses_nothing_that_was_saved() {
    let [whole, killed] = ["faults-whole", "faults-killed"].map(folder);
    let mut random = 0x9E37_79B9_u64;
    let (mut newest, mut in_a_save, kills) = (0, 0, cases(15, 50));
    for _ in 0..kills {
        let mut run = start(&killed, &["train", "--resume"], &ALONE);
        // Waits until it has advanced, then for the middle of a save, then for a random time.
        let begun = Instant::now();
        let saving = || checkpoints(&killed).iter().any(|name| name.ends_with(".partial"));
        let further = || {
            let names = checkpoints(&killed);
            names.iter().any(|name| !name.ends_with(".partial") && *name > format!("step-{newest:08}"))
        };
        while !(further() && saving()) && begun.elapsed() < Duration::from_secs(60) {
            assert!(run.try_wait().unwrap().is_none(), "it ended by itself: {newest}");
            sleep(Duration::from_micros(100));
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        sleep(Duration::from_micros((random >> 33) % 3000));
        run.kill().unwrap();
        run.wait().unwrap();
        in_a_save += usize::from(saving());
        let now = newest_of_whole(&killed);
        assert!(now > newest, "what was saved is lost: {now} after {newest}");
        newest = now;
    }
    println!("{kills} kills, {in_a_save} of them in the middle of a save, up to step {newest}");
    stdout(&tiny(&killed, &["train", "--resume"], &ALONE));
    stdout(&tiny(&whole, &["train"], &[&ALONE[..], &["run.checkpoint_every=0"]].concat()));
    assert_eq!(numbers(&killed), numbers(&whole), "the run is not the one that was never killed");
}

#[test]
fn a_checkpoint_that_broke_is_named_and_the_one_before_is_used() {
    let folder = folder("faults-broken");
    let settings = ["run.checkpoint_every=2"];
    stdout(&tiny(&folder, &["train"], &settings));
    assert_eq!(checkpoints(&folder), ["step-00000002", "step-00000004"]);
    let path = "out/checkpoints/step-00000004/rank-00005.safetensors";
    let mut bytes = fs::read(folder.join(path)).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(folder.join(path), bytes).unwrap();
    let output = tiny(&folder, &["train", "--resume"], &settings);
    let said = stdout(&output);
    let warning = stderr(&output).lines().next().unwrap_or_default().to_owned();
    assert!(warning.starts_with(&format!("warning: {path}: its checksum is xxh3:")), "{warning}");
    assert!(warning.ends_with("; trying another checkpoint"), "{warning}");
    assert!(said.contains("resumes after step 2 from out/checkpoints/step-00000002\n"), "{said}");
    assert!(said.contains("now in out/checkpoints-1\n"), "{said}");

    for step in ["step-00000002", "step-00000004"] {
        fs::write(folder.join("out/checkpoints").join(step).join("manifest.json"), "{").unwrap();
    }
    let output = tiny(&folder, &["train", "--resume"], &["run.steps=9"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        stderr(&output).ends_with("error: out/checkpoints: none of its checkpoints is whole\n"),
        "{output:?}"
    );
}

#[test]
fn two_runs_in_one_folder_are_one_too_many() {
    let folder = folder("faults-two");
    let endless = ["run.steps=1000000", "run.eval_every=0"];
    let mut first = start(&folder, &["train"], &endless);
    while !folder.join("out/metrics.jsonl").exists() {
        assert!(first.try_wait().unwrap().is_none(), "it ended by itself");
        sleep(Duration::from_millis(5));
    }
    let second = tiny(&folder, &["train"], &[]);
    let process = first.id();
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(second.status.code(), Some(2), "{second:?}");
    let said =
        format!("error: out: another run, process {process}, is using this folder; set another run.out\n");
    assert_eq!(stderr(&second), said);
    // The lock of a killed run does not block another one.
    stdout(&tiny(&folder, &["train"], &[]));
}

/// Continues in a folder whose checkpoints cannot grow, and checks that this is reported and that nothing is lost.
fn no_room(folder: &Path, resume: impl Fn(&[&str]) -> Output, reason: &str) {
    let before = newest_of_whole(folder);
    assert_eq!(before, 4);
    let output = resume(&["run.steps=8", "run.checkpoint_every=2"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = stderr(&output);
    for step in [6, 8] {
        let warning = format!("warning: the checkpoint of step {step} was not written: {reason}");
        assert!(said.contains(&warning), "{said}");
    }
    assert!(
        said.lines().last().unwrap().starts_with("error: the checkpoint of step 8 was not written: "),
        "{said}"
    );
    assert_eq!(numbers(folder).len(), 8, "training itself went on");
    assert_eq!(newest_of_whole(folder), before);
    assert_eq!(checkpoints(folder).len(), 1, "nothing half-written is left");
    let said = stdout(&tiny(folder, &["train", "--resume"], &["run.steps=9", "run.keep=0"]));
    assert!(said.contains("resumes after step 4"), "{said}");
    assert_eq!(numbers(folder).len(), 9);
}

#[test]
fn a_file_that_may_not_grow_loses_nothing() {
    let folder = folder("faults-limit");
    stdout(&tiny(&folder, &["train"], &[]));
    let resume = |settings: &[&str]| {
        let settings = TINY.iter().chain(settings).flat_map(|setting| ["--set", setting]);
        let arguments: Vec<&str> = ["train", "--resume"].into_iter().chain(settings).collect();
        under(&folder, "-f 16", &arguments)
    };
    no_room(&folder, resume, "File too large");
}

#[test]
fn a_disk_that_is_full_loses_nothing() {
    let folder = folder("faults-disk");
    let disk = folder.join("out/checkpoints");
    stdout(&tiny(&folder, &["train"], &[]));
    let size: u64 =
        fs::read_dir(disk.join("step-00000004")).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
    fs::rename(&disk, folder.join("saved")).unwrap();
    fs::create_dir(&disk).unwrap();
    let mount = |arguments: &[&str]| Command::new("mount").args(arguments).arg(&disk).output();
    let options = format!("size={}k", (size + size / 2) / 1024);
    let mounted =
        mount(&["-t", "tmpfs", "-o", &options, "tmpfs"]).is_ok_and(|output| output.status.success());
    if !mounted {
        skip(Need::Root, "no disk can be mounted here: only the limit on files was tried");
        return;
    }
    let _unmount = Unmount(&disk);
    let copied = Command::new("cp").arg("-r").arg(folder.join("saved/step-00000004")).arg(&disk).status();
    assert!(copied.unwrap().success());
    no_room(&folder, |settings| tiny(&folder, &["train", "--resume"], settings), "No space left on device");
}

#[test]
fn event_files_that_may_not_grow_end_the_run_with_an_error() {
    let folder = folder("faults-events");
    let alone = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "run.keep=0", "run.eval_every=0"];
    let settings = [&alone[..], &["run.log=[\"tensorboard\"]"]].concat();
    stdout(&tiny(&folder, &["train"], &[&settings[..], &["run.steps=2"]].concat()));
    let events = fs::read_dir(folder.join("out/tensorboard")).unwrap().next().unwrap().unwrap();
    // Room for the events of two steps, and for every other file of a run of eight.
    let limit = format!("-f {}", events.metadata().unwrap().len().div_ceil(512));
    let sets = TINY.iter().chain(&settings).chain(&["run.steps=8"]).flat_map(|setting| ["--set", setting]);
    let output = under(&folder, &limit, &["train"].into_iter().chain(sets).collect::<Vec<_>>());
    assert_eq!(numbers(&folder).len(), 8, "{output:?}");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = stderr(&output);
    let said: Vec<&str> = said.lines().filter(|line| !line.starts_with("step")).collect();
    insta::assert_snapshot!(said.join("\n"), @r"
    warning: cannot write to out/tensorboard: File too large (os error 27); the run continues, and writes the steps as soon as it can
    error: cannot write to out/tensorboard: File too large (os error 27)
    ");
}

/// Unmounts a disk when the test ends, however it ends.
struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg(self.0).status().ok();
    }
}

//! Trials that end badly are results, and a tuning that is killed loses and repeats none.
//!
//! The program of a trial is a shell script here, which does what its configuration says.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kintsugi_tune::trials::{
    AnyError, Constraints, Ending, Executor, ExecutorError, Journal, Objective, Processes, Record,
    StepFigures, TrialCandidate, TrialReport, TrialRequest, TuneError, TuneEvent, Tuning, best, tune,
};

/// What the script does: its fourth argument is `run.out=FOLDER`.
const SCRIPT: &str = r#"#!/bin/sh
out=${4#run.out=}
mkdir -p "$out"
step() { echo "{\"step\":$1,\"step_s\":$2}" >>"$out/metrics.jsonl"; }
read -r what value <"$2"
case $what in
    finish) for i in 1 2 3 4; do step $i "$value"; done ;;
    slow) for i in 1 2 3; do step $i "$value"; done; sleep 60 ;;
    hang) sleep 60 ;;
    deaf) trap '' TERM INT; sleep 60 & wait; wait ;;
    kill) kill -9 $$ ;;
    crash) echo "error: rank 1 panicked" >&2; exit 1 ;;
    refuse) echo "error: the plan does not fit: 3 GiB are available" >&2; exit 2 ;;
    garbage) echo '{"step":1,"step_s":"NaN"}' >"$out/metrics.jsonl"; head -c 2000 /dev/urandom >>"$out/metrics.jsonl" ;;
    silent) ;;
    full) echo "error: cannot write: No space left on device (os error 28)" >&2; exit 1 ;;
    large) exec dd if=/dev/zero of=/dev/null bs=200M count=1000 2>/dev/null ;;
esac
"#;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).expect("a folder for tests");
    folder
}

fn processes(folder: &Path) -> Processes {
    let program = folder.join("program");
    fs::write(&program, SCRIPT).expect("written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a program");
    Processes {
        program,
        launcher: Vec::new(),
        nodes: None,
        slots: 1,
        folder: folder.join("trials"),
        warm_up: 1,
        steps: 3,
        deadline: Duration::from_secs(2),
        memory: Some(100 << 20),
        stop: Arc::new(AtomicBool::new(false)),
    }
}

fn request(config: &str, stop_above: Option<f64>) -> TrialRequest {
    TrialRequest { trial: 1, candidate: 0, config: format!("{config}\n"), ranks: 1, stop_above }
}

#[test]
fn a_trial_that_ends_badly_is_a_result() {
    let folder = folder("endings");
    let processes = processes(&folder);
    let ending = |config: &str| processes.run(&request(config, None)).expect("an outcome");
    let cases = [
        ("finish 0.5", Ending::Finished),
        ("hang", Ending::Timeout),
        ("deaf", Ending::Timeout),
        ("kill", Ending::Killed),
        ("crash", Ending::Crashed),
        ("refuse", Ending::OutOfMemory),
        ("garbage", Ending::Garbage),
        ("silent", Ending::Garbage),
        ("large", Ending::OutOfMemory),
        ("finish -1", Ending::Garbage),
    ];
    for (config, expected) in cases {
        let report = ending(config);
        assert_eq!(report.ending, expected, "{config}: {report:?}");
        assert_eq!(report.measured.step_s.is_some(), expected.is_measured(), "{config}");
        assert!(report.wall_s < 4.0 && report.message.is_some() != expected.is_measured(), "{report:?}");
    }
    assert_eq!(ending("crash").message.as_deref(), Some("error: rank 1 panicked"));
}

#[test]
fn a_trial_that_surely_loses_is_stopped_after_its_first_steps() {
    let folder = folder("slow");
    let processes = processes(&folder);
    let begun = Instant::now();
    let report = processes.run(&request("slow 3.0", Some(2.0))).expect("an outcome");
    assert_eq!((report.ending, report.measured.step_s), (Ending::Stopped, Some(3.0)));
    assert!(begun.elapsed() < Duration::from_secs(2));
    let report = processes.run(&request("slow 3.0", Some(4.0))).expect("an outcome");
    assert_eq!(report.ending, Ending::Timeout);
}

#[test]
fn nothing_of_a_trial_runs_on() {
    let folder = folder("leftovers");
    let processes = processes(&folder);
    // As a killed tuning leaves it.
    let trial = folder.join("trials/0007");
    fs::create_dir_all(&trial).expect("a folder");
    let trial = trial.canonicalize().expect("a folder");
    let shell = |argument: String| {
        let script = ["-c", "while :; do sleep 0.1; done"];
        std::process::Command::new("sh").args(script).arg(argument).spawn().expect("a shell")
    };
    let mut orphan = shell(format!("run.out={}", trial.join("run").display()));
    // As an editor that somebody has opened, with the name of a file beside or of a trial.
    let mut others =
        ["../../trials.jsonl", "trial.toml"].map(|name| shell(trial.join(name).display().to_string()));
    processes.run(&request("finish 1.0", None)).expect("an outcome");
    let begun = Instant::now();
    assert!(!orphan.wait().expect("a child").success() && begun.elapsed() < Duration::from_secs(2));
    for other in &mut others {
        assert!(other.try_wait().expect("a child").is_none(), "it is no trial");
        other.kill().expect("a child");
        other.wait().expect("a child");
    }
}

/// Candidates whose time is their number, and what a trial of each does.
fn candidates(count: usize) -> Vec<TrialCandidate> {
    let candidate = |i: usize| TrialCandidate {
        settings: [("number".to_owned(), i.to_string())].into(),
        predicted: StepFigures { step_s: Some(1.0 + i as f64), ..StepFigures::default() },
        memory: None,
        ranks: 1,
        tokens: 100,
    };
    (1..=count).map(candidate).collect()
}

fn tuning<'a>(
    candidates: &'a [TrialCandidate],
    config: &'a (dyn Fn(usize) -> Result<String, AnyError> + Sync),
    trials: usize,
) -> Tuning<'a> {
    Tuning {
        task: "a test",
        candidates,
        config,
        first: Some(0),
        objective: Objective::Speed,
        constraints: Constraints::default(),
        trials,
        others: &[],
        stop_factor: 1.5,
        seed: 0,
    }
}

fn journal(folder: &Path) -> Journal {
    Journal::open(&folder.join("trials.jsonl")).expect("the file")
}

#[test]
fn failures_are_recorded_and_the_best_of_the_rest_is_found() {
    let folder = folder("mixed");
    let processes = processes(&folder);
    let candidates = candidates(6);
    let config = |index: usize| {
        let what = ["crash", "finish 2.0", "kill", "finish 0.4", "garbage", "finish 3.0"][index];
        Ok(format!("{what}\n"))
    };
    let tuning = tuning(&candidates, &config, 10);
    let mut journal = journal(&folder);
    tune(&tuning, &mut journal, &processes, &mut |_| {}).expect("it ends when nothing is left to try");
    let records = journal.records();
    assert_eq!(records.len(), 6, "every candidate once");
    assert_eq!(records[0].settings["number"], "1", "the planner's first choice comes first");
    assert_eq!(records.iter().filter(|record| !record.outcome.is_measured()).count(), 3);
    let (found, value) = best(&tuning, records).expect("some worked");
    assert_eq!(found.settings["number"], "4");
    assert!((value - 0.004).abs() < 1e-12);
}

#[test]
fn a_full_disk_ends_the_tuning_and_teaches_nothing() {
    let folder = folder("full");
    let processes = processes(&folder);
    let candidates = candidates(2);
    let config = |index: usize| Ok(["finish 1.0\n", "full\n"][index].to_owned());
    let tuning = tuning(&candidates, &config, 2);
    let mut journal = journal(&folder);
    let error = tune(&tuning, &mut journal, &processes, &mut |_| {}).expect_err("the disk is full");
    assert!(matches!(error, TuneError::FullDisk(_)), "{error}");
    assert_eq!(journal.records().len(), 1);
}

/// Asks the tuning to stop in its third trial.
struct Interrupted<'a> {
    processes: &'a Processes,
}

impl Executor for Interrupted<'_> {
    fn run(&self, request: &TrialRequest) -> Result<TrialReport, ExecutorError> {
        self.processes.stop.store(request.trial == 3, Ordering::Relaxed);
        self.processes.run(request)
    }
}

#[test]
fn an_interrupted_tuning_goes_on_with_the_trials_that_it_has() {
    let folder = folder("interrupted");
    let mut processes = processes(&folder);
    processes.deadline = Duration::from_secs(30);
    let candidates = candidates(6);
    let config = |index: usize| Ok(if index == 2 { "hang\n" } else { "finish 1.0\n" }.to_owned());
    let tuning = tuning(&candidates, &config, 5);
    let mut first = journal(&folder);
    let error = tune(&tuning, &mut first, &Interrupted { processes: &processes }, &mut |_| {});
    let error = error.expect_err("it was asked to stop").to_string();
    assert!(error.starts_with("the tuning was stopped; the same command continues"), "{error}");
    let before: Vec<Record> = first.records().to_vec();
    assert_eq!(before.len(), 2);
    drop(first);
    processes.stop.store(false, Ordering::Relaxed);
    processes.deadline = Duration::from_secs(1);
    let mut begun = Vec::new();
    let mut again = journal(&folder);
    tune(&tuning, &mut again, &processes, &mut |event| {
        if let TuneEvent::Begins { trial, .. } = event {
            begun.push(trial);
        }
    })
    .expect("it goes on");
    assert_eq!(begun, [3, 4, 5]);
    assert_eq!(again.records()[..2], before[..]);
    let settings: HashSet<_> = again.records().iter().map(|record| &record.settings).collect();
    assert_eq!((again.records().len(), settings.len()), (5, 5), "none is repeated");
    let other = Tuning { task: "another", ..tuning };
    let error = tune(&other, &mut again, &processes, &mut |_| {}).expect_err("another task");
    assert!(error.to_string().contains("--from"), "{error}");
}

/// Runs two trials at once, which wait for each other.
struct Pairs(std::sync::Barrier);

impl Executor for Pairs {
    fn slots(&self) -> usize {
        2
    }

    fn run(&self, request: &TrialRequest) -> Result<TrialReport, ExecutorError> {
        self.0.wait();
        let measured = StepFigures { step_s: Some(request.candidate as f64 + 1.0), ..StepFigures::default() };
        Ok(TrialReport { ending: Ending::Finished, measured, steps: 1, message: None, wall_s: 0.0 })
    }
}

#[test]
fn trials_run_side_by_side_and_none_twice() {
    let folder = folder("pairs");
    let candidates = candidates(8);
    let config = |_: usize| Ok(String::new());
    let tuning = tuning(&candidates, &config, 8);
    let mut journal = journal(&folder);
    tune(&tuning, &mut journal, &Pairs(std::sync::Barrier::new(2)), &mut |_| {}).expect("all work");
    let settings: HashSet<_> = journal.records().iter().map(|record| &record.settings).collect();
    assert_eq!((journal.records().len(), settings.len()), (8, 8));
}

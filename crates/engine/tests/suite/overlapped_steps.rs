//! Overlapped steps: a run whose host enqueues a step before it reads the previous result has the same results and output.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use kintsugi_checkpoint::CheckpointFolder;
use kintsugi_engine::{
    Event, MemoryChoice, StepReport, TrainError, TrainOptions, TrainOutcome, dataset, train,
};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;

/// A small model on one rank, with these settings.
fn plan(settings: &[&str]) -> Plan {
    let small = [
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.dp=1",
        "model.hidden=32",
        "model.ffn=64",
        "batch.sequence=16",
        "batch.micro=1",
        "batch.global=2",
        "run.steps=9",
        "run.eval_every=0",
        "run.eval_tokens=128",
        "optimizer.warmup=2",
    ];
    ConfigSource::demo().sets(small).sets(settings).plan().expect("a legal config")
}

/// The events of a run, one line each without times, and its outcome.
struct Run {
    lines: Vec<String>,
    outcome: Result<TrainOutcome, TrainError>,
}

fn run(
    plan: &Plan,
    overlap_steps: bool,
    out: Option<&Path>,
    mut on_step: impl FnMut(&StepReport, &TrainOptions),
) -> Run {
    let checkpoints = out.map(CheckpointFolder::of_run);
    let options = TrainOptions {
        overlap_steps: Some(overlap_steps),
        checkpoints,
        ..TrainOptions::new(MemoryChoice::Heap)
    };
    let mut lines = Vec::new();
    let outcome = train(plan, &*dataset(plan).expect("its data"), &options, |event| match event {
        Event::Step(report) => {
            on_step(report, &options);
            lines.push(line(report));
        }
        Event::CheckpointSaved(_) => {}
        Event::RolledBack(rollback) => panic!("{rollback}"),
        Event::CheckpointFailed(failure) => panic!("{failure}"),
        Event::GraphUnavailable(reason) | Event::LibraryReplaced(reason) => panic!("{reason}"),
        Event::Autotuning { .. } => unreachable!("a CPU has nothing to try"),
    });
    Run { lines, outcome: outcome.map(|outcome| outcome.expect("rank 0 is here")) }
}

fn line(report: &StepReport) -> String {
    let timeless = StepReport {
        tokens_per_s: 0.0,
        step_s: 0.0,
        mfu: None,
        checkpoint_s: report.checkpoint_s.map(|_| 0.0),
        ..report.clone()
    };
    // Enough digits to distinguish any two numbers.
    format!("{timeless:?}")
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).expect("a folder for tests");
    folder
}

/// Every file below a folder, by its path from there.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(at).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            if entry.is_dir() {
                open.push(entry);
            } else {
                let name = entry.strip_prefix(folder).expect("inside").to_owned();
                found.insert(name, fs::read(&entry).expect("a file"));
            }
        }
    }
    found
}

#[test]
fn reports_evaluations_and_checkpoints_are_the_same() {
    for settings in [
        &["run.eval_every=3", "run.checkpoint_every=4", "run.keep=9"][..],
        &["run.checkpoint_every=1", "run.keep=9"],
        &["precision.compute=fp16", "run.keep=9", "parallel.pp=2"],
        &["run.max_skipped=1", "run.keep=9"],
    ] {
        let plan = plan(settings);
        let [(sequential, first), (overlapped, second)] = [false, true].map(|overlap_steps| {
            let out = folder(if overlap_steps { "steps-overlapped" } else { "steps-sequential" });
            (run(&plan, overlap_steps, Some(&out), |_, _| {}), files(&out))
        });
        assert_eq!(sequential.lines.len(), 9);
        assert_eq!(sequential.lines, overlapped.lines, "{settings:?}");
        assert!(!first.is_empty() && first == second, "other checkpoints: {settings:?}");
        let [sequential, overlapped] = [sequential, overlapped].map(|run| run.outcome.expect("it trains"));
        assert_eq!(
            (sequential.saves.saved, sequential.validation_loss, sequential.steps),
            (overlapped.saves.saved, overlapped.validation_loss, overlapped.steps)
        );
        assert_eq!(sequential.measured.peak_bytes[0].total, overlapped.measured.peak_bytes[0].total);
    }
}

#[test]
fn the_time_of_a_step_does_not_depend_on_when_the_host_looks() {
    // A CPU has run a step when it is enqueued, so the host looks at the end of each step but the last one step too late.
    // If that counted, the last step would take no time, and the first one the time of two.
    let mut seconds = Vec::new();
    run(&plan(&[]), true, None, |report, _| seconds.push(report.step_s)).outcome.expect("it trains");
    let (last, others) = seconds.split_last().expect("nine steps");
    let shortest = others.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(*last > 0.1 * shortest, "{seconds:?}");
}

#[test]
fn a_run_gives_up_at_the_same_step() {
    for max_skipped in [1, 2, 4] {
        let skipped = format!("run.max_skipped={max_skipped}");
        let plan = plan(&[
            "precision.compute=fp16",
            "optimizer.lr=1e6",
            "optimizer.min_lr=0",
            "optimizer.clip=0",
            "run.eval_every=3",
            &skipped,
        ]);
        let [sequential, overlapped] =
            [false, true].map(|overlap_steps| run(&plan, overlap_steps, None, |_, _| {}));
        assert_eq!(sequential.lines, overlapped.lines);
        assert_eq!(sequential.lines.len(), 1 + max_skipped, "the first update is too large for fp16");
        let [sequential, overlapped] = [sequential, overlapped]
            .map(|run| run.outcome.expect("it ends").failure.expect("nothing finite comes of this"));
        assert_eq!(sequential.to_string(), overlapped.to_string());
    }
}

#[test]
fn a_request_to_stop_ends_the_run_and_saves_it() {
    for settings in [&[][..], &["parallel.pp=2", "parallel.dp=2"], &["run.eval_every=2"]] {
        let plan = plan(&[&["run.steps=1000"], settings].concat());
        let out = folder("steps-stop");
        let (mut steps, mut asked) = (0, None);
        let Run { outcome, .. } = run(&plan, true, Some(&out), |report, options| {
            assert_eq!(report.step, steps + 1, "steps are told of in their order");
            steps = report.step;
            if steps == 3 {
                options.stop.store(true, Ordering::Relaxed);
                asked = Some(steps);
            }
        });
        let outcome = outcome.expect("stopping is not an error");
        assert!(outcome.stopped && outcome.steps == steps && (4..1000).contains(&steps), "{steps} steps");
        assert_eq!((asked, outcome.saves.last.map(|saved| saved.step)), (Some(3), Some(steps)));
    }
}

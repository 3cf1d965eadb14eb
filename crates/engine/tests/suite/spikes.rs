//! After a loss spike a run goes back to a checkpoint and skips the batch. From there on it equals a run whose data never had it.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kintsugi_checkpoint::{Checkpoint, CheckpointFolder, CopyFolder, CopySet, SkippedSamples};
use kintsugi_data::{DataError, Dataset, Split};
use kintsugi_engine::{
    CopiedStart, Event, MemoryChoice, Rollback, Start, StepReport, TrainError, TrainOptions, TrainOutcome,
    WithoutSkipped, dataset, train,
};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_run::Spike;

/// The samples of the batch that has the spike: that of step 13.
const POISONED: Range<u64> = 12 * 4..13 * 4;
const SPIKE: u64 = 13;

/// A small model on eight ranks, with these settings.
fn plan(settings: &[&str]) -> Plan {
    let small = [
        "model.hidden=32",
        "model.ffn=64",
        "model.vocab=200",
        "batch.sequence=8",
        "batch.micro=1",
        "batch.global=4",
        "optimizer.lr=3e-3",
        "run.steps=18",
        "run.checkpoint_every=4",
        "run.eval_every=0",
        "run.on_spike=rollback",
        "run.spike_window=4",
        "run.spike_limit=5",
    ];
    ConfigSource::demo().sets(small).sets(settings).plan().expect("a legal config")
}

/// A dataset with samples of tokens that occur nowhere else.
struct Poisoned<'a>(&'a dyn Dataset);

impl Dataset for Poisoned<'_> {
    fn vocab(&self) -> usize {
        200
    }

    fn floor(&self, _: usize) -> Option<f64> {
        None
    }

    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        self.0.sample(split, index, out)?;
        if POISONED.contains(&index) {
            out.fill(190 + (index % 4) as u32);
        }
        Ok(())
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).expect("a folder for tests");
    folder
}

struct Run {
    reports: Vec<StepReport>,
    rollbacks: Vec<Rollback>,
    outcome: TrainOutcome,
}

/// Trains on the poisoned data. The reports are those that stay: steps that run again replace those before.
fn run(plan: &Plan, options: &TrainOptions, skipped: &SkippedSamples, stops: bool) -> Run {
    let whole = dataset(plan).expect("its data");
    let data = WithoutSkipped { dataset: &Poisoned(&*whole), skipped: skipped.clone() };
    let (mut reports, mut rollbacks) = (Vec::<StepReport>::new(), Vec::new());
    let outcome = train(plan, &data, options, |event| match event {
        Event::Step(report) => reports.push(report.clone()),
        Event::RolledBack(rollback) => {
            assert_eq!(
                reports.last().map(|last| last.step),
                Some(rollback.step),
                "the spike is reported first"
            );
            reports.retain(|report| report.step <= rollback.resumed_after);
            rollbacks.push(rollback.clone());
            options.stop.store(stops, Ordering::Relaxed);
        }
        Event::CheckpointFailed(failure) => panic!("{failure}"),
        Event::CheckpointSaved(_)
        | Event::GraphUnavailable(_)
        | Event::Autotuning { .. }
        | Event::LibraryReplaced(_) => {}
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}")).expect("rank 0 is here");
    Run { reports, rollbacks, outcome }
}

fn options(out: &Path) -> TrainOptions {
    TrainOptions { checkpoints: Some(CheckpointFolder::of_run(out)), ..TrainOptions::new(MemoryChoice::Heap) }
}

/// Losses and gradient norms, for messages.
fn values(reports: &[StepReport]) -> Vec<(f64, f64)> {
    reports.iter().map(|report| (report.loss, report.grad_norm)).collect()
}

/// What must be the same, bit for bit.
fn numbers(reports: &[StepReport]) -> Vec<(u64, u64, u64, u64, u64)> {
    let bits = |r: &StepReport| (r.step, r.loss.to_bits(), r.grad_norm.to_bits(), r.lr.to_bits(), r.tokens);
    reports.iter().map(bits).collect()
}

fn poison() -> SkippedSamples {
    let mut skipped = SkippedSamples::default();
    skipped.add(POISONED);
    skipped
}

const REPLICAS: [&str; 5] =
    ["parallel.tp=1", "parallel.pp=1", "parallel.dp=4", "cluster.per_package=2", "cluster.per_node=2"];

#[test]
fn a_run_after_a_spike_equals_one_that_never_saw_its_batch() {
    let one_rank = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1"];
    for (settings, overlap, resumed_after) in [
        (&[][..], false, 8),
        (&["sharding.zero=3", "precision.compute=bf16", "run.checksum_every=1"], false, 8),
        (&[&REPLICAS[..], &["sharding.preset=zero++", "precision.compute=bf16"]].concat(), false, 8),
        // No good checkpoint: the run begins anew, and its states too.
        (&["run.checkpoint_every=12", "precision.compute=fp16"], false, 0),
        (&one_rank[..], true, 8),
        // Step 12 is good, and the checkpoint of step 11 with it.
        (&["run.checkpoint_every=11"], true, 11),
        (&["run.checkpoint_every=11"], false, 11),
    ] {
        let plan = plan(settings);
        let out = folder("spikes-back");
        let (whole, clean) = (out.join("whole"), out.join("clean"));
        let with_steps = |out: &Path| TrainOptions { overlap_steps: Some(overlap), ..options(out) };
        let poisoned = run(&plan, &with_steps(&whole), &SkippedSamples::default(), false);
        let expected = run(&plan, &with_steps(&clean), &poison(), false);
        assert_eq!(expected.rollbacks, [], "{settings:?} {:?}", values(&expected.reports));
        let [rollback] = &poisoned.rollbacks[..] else {
            panic!("{settings:?} {:?} {:?}", poisoned.rollbacks, values(&poisoned.reports))
        };
        assert_eq!(
            (rollback.step, rollback.resumed_after, rollback.skipped.clone()),
            (SPIKE, resumed_after, POISONED),
            "{settings:?}"
        );
        assert!(matches!(rollback.spike, Spike::Loss(_) | Spike::GradNorm(_)), "{rollback:?}");
        assert_eq!(numbers(&poisoned.reports), numbers(&expected.reports), "{settings:?}");
        assert_eq!(poisoned.reports.last().map(|last| (last.step, last.rollbacks)), Some((18, Some(1))));
        assert_eq!((poisoned.outcome.rollbacks, poisoned.outcome.skipped_samples), (1, 4));
        let files = |out: &Path| {
            let path = CheckpointFolder::of_run(out).of_step(18);
            let ranks = (0..plan.mesh.ranks()).map(|rank| path.join(format!("rank-{rank:05}.safetensors")));
            ranks
                .map(|file| fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())))
                .collect::<Vec<_>>()
        };
        assert!(files(&whole) == files(&clean), "other weights or states: {settings:?}");
    }
}

#[test]
fn a_resumed_run_skips_the_batch_on_any_layout() {
    let (out, clean) = (folder("spikes-resume"), folder("spikes-resume-clean"));
    let first = plan(&[]);
    // The run stops after it went back, before it comes to the batch again.
    let stopped = run(&first, &options(&out), &SkippedSamples::default(), true);
    let step = stopped.outcome.steps;
    assert!(stopped.outcome.stopped && (9..SPIKE).contains(&step), "{:?}", values(&stopped.reports));
    let expected = run(&first, &options(&clean), &poison(), false);
    let resume = |settings: &[&str], from: u64, skipped: SkippedSamples| {
        let path = CheckpointFolder::of_run(&out).of_step(from);
        let start = Start::Checkpoint(Arc::new(Checkpoint::open(&path).expect("a checkpoint")));
        let options = TrainOptions { start, skipped, ..options(&folder("spikes-resumed")) };
        run(&plan(settings), &options, &SkippedSamples::default(), false)
    };
    // The checkpoint after the rollback has the record of it; the one before needs that of the run's folder.
    for (from, skipped) in [(step, SkippedSamples::default()), (8, poison())] {
        let same = resume(&[], from, skipped.clone());
        assert_eq!(same.rollbacks, []);
        assert_eq!(numbers(&same.reports), numbers(&expected.reports[from as usize..]));
        for settings in [
            &["parallel.tp=1", "parallel.pp=1", "parallel.dp=1"][..],
            &["parallel.tp=4", "parallel.pp=1", "parallel.dp=2", "sharding.zero=1", "run.on_spike=continue"],
        ] {
            let other = resume(settings, from, skipped.clone());
            assert_eq!((other.rollbacks.len(), other.reports.len()), (0, 18 - from as usize));
            for (found, expected) in other.reports.iter().zip(&expected.reports[from as usize..]) {
                let difference = (found.loss - expected.loss).abs() / expected.loss;
                assert!(difference <= 1e-5 && found.step == expected.step, "{found:?} {expected:?}");
            }
        }
    }
    // Without a record, the run finds the spike again, and goes back to where it has come from.
    let again = resume(&[], 8, SkippedSamples::default());
    let back: Vec<_> = again.rollbacks.iter().map(|one| (one.step, one.resumed_after)).collect();
    assert_eq!(back, [(SPIKE, 8)]);
    assert_eq!(numbers(&again.reports), numbers(&expected.reports[8..]));
}

#[test]
fn a_run_that_may_not_go_back_any_more_ends_and_saves_no_spike() {
    let out = folder("spikes-end");
    let ended = run(&plan(&["run.max_rollbacks=0"]), &options(&out), &SkippedSamples::default(), false);
    let failure = ended.outcome.failure.expect("a spike");
    assert!(matches!(failure, TrainError::Spike { step: SPIKE, rollbacks: 0, .. }), "{failure}");
    assert_eq!(CheckpointFolder::of_run(&out).list().expect("checkpoints")[0].0, 12);
}

#[test]
fn steps_that_are_not_finite_are_skipped_until_the_run_gives_up() {
    let overflows =
        ["precision.compute=fp16", "precision.loss_scale=1e9", "run.max_skipped=2", "run.max_rollbacks=2"];
    let out = folder("spikes-not-finite");
    let ended = run(&plan(&overflows), &options(&out), &SkippedSamples::default(), false);
    let failure = ended.outcome.failure.expect("nothing finite");
    assert!(matches!(failure, TrainError::NotFinite { steps: 2, step: 2, .. }), "{failure}");
    let skipped: Vec<_> =
        ended.rollbacks.iter().map(|one| (one.resumed_after, one.skipped.clone())).collect();
    assert_eq!(skipped, [(0, 0..8), (0, 8..16)]);
}

#[test]
fn a_run_that_began_with_copies_goes_back_to_the_checkpoint_before_them() {
    let plan = plan(&["run.replicate_every=5", "cluster.per_node=4"]);
    let [alone, disturbed] = ["spikes-alone", "spikes-copies"].map(folder);
    let undisturbed = run(&plan, &options(&alone), &SkippedSamples::default(), false);
    assert_eq!(undisturbed.rollbacks[0].resumed_after, 8);
    let copies = CopyFolder::new(&disturbed, &plan);
    (0..plan.mesh.ranks()).for_each(|rank| copies.reserve(&plan, rank).expect("there is room"));
    let first = TrainOptions { copies: Some(copies.clone()), ..options(&disturbed) };
    let whole = dataset(&plan).expect("its data");
    train(&plan, &Poisoned(&*whole), &first, |event| {
        if let Event::Step(report) = event {
            first.stop.store(report.step >= 10, Ordering::Relaxed);
        }
    })
    .expect("it trains up to the spike");
    // As if it had been killed.
    let checkpoints = CheckpointFolder::of_run(&disturbed);
    for (_, path) in checkpoints.list().expect("a folder").into_iter().filter(|(step, _)| *step > 8) {
        fs::remove_dir_all(path).expect("it was saved");
    }
    let found = vec![copies.whole(|_| true); plan.mesh.ranks()];
    let set = CopySet::newest(&plan, &found, 0).expect("all states are copied");
    assert_eq!(set.progress.step, 10);
    let start = Start::Copies(Arc::new(CopiedStart { folder: copies, set, origin: Start::Seed }));
    let again = TrainOptions { start, ..options(&disturbed) };
    let restarted = run(&plan, &again, &SkippedSamples::default(), false);
    assert_eq!(restarted.rollbacks.len(), undisturbed.rollbacks.len());
    assert_eq!(restarted.rollbacks[0].resumed_after, 8, "the checkpoint before the copies");
    assert_eq!(numbers(&restarted.reports), numbers(&undisturbed.reports[8..]));
    assert_eq!(restarted.outcome.measured.comm_bytes, undisturbed.outcome.measured.comm_bytes);
}

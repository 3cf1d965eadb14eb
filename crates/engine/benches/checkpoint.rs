//! The cost of checkpoints: how long training pauses compared with a synchronous save, how much slower steps are while one is
//! written, and how fast one is loaded compared with reading its files.
//!
//! `cargo bench -p kintsugi-engine --bench checkpoint [-- FOLDER [--cold]]`; `--cold` empties the page cache first (root).

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use kintsugi_checkpoint::{Checkpoint, CheckpointFolder};
use kintsugi_engine::{
    Event, Job, MemoryChoice, SaveStatistics, StepReport, TrainOptions, dataset, run_ranks, train,
};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_rank::Purpose;

/// GPT-2 small, 1.5 GB of weights and states, with short samples so that a step is shorter than a save.
const SETTINGS: [&str; 13] = [
    "model.preset=gpt2-124m",
    "batch.sequence=64",
    "batch.micro=1",
    "batch.global=1",
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp=1",
    "sharding.zero=0",
    "run.steps=24",
    "run.checkpoint_every=8",
    "run.keep=1",
    "run.eval_every=0",
    "optimizer.warmup=2",
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let cold = arguments.iter().any(|argument| argument == "--cold");
    let out = arguments
        .iter()
        .find(|argument| !argument.starts_with("--"))
        .map_or("target/checkpoint", String::as_str);
    let out = PathBuf::from(out);
    fs::create_dir_all(&out).expect("a folder to write to");
    let plan = ConfigSource::demo().sets(SETTINGS).plan().expect("a legal config");
    let path = saving(&plan, &out);
    loading(&plan, &path, cold);
    fs::remove_dir_all(&out).expect("it can be removed");
}

/// Trains with a checkpoint every few steps. Returns the last one.
fn saving(plan: &Plan, out: &Path) -> PathBuf {
    let checkpoints = Some(CheckpointFolder::of_run(out));
    let options = TrainOptions { checkpoints, ..TrainOptions::new(MemoryChoice::Heap) };
    // Steps, and whether a checkpoint was being written while each ran.
    let mut steps: Vec<(StepReport, bool)> = Vec::new();
    let mut writing = false;
    let outcome = train(plan, &*dataset(plan).expect("its data"), &options, |event| match event {
        Event::Step(report) => {
            steps.push((report.clone(), writing));
            writing |= report.checkpoint_s.is_some();
        }
        Event::CheckpointSaved(saved) => {
            println!("step {}: written in {:.3} s", saved.step, saved.seconds);
            writing = false;
        }
        Event::CheckpointFailed(failure) => panic!("{failure}"),
        Event::RolledBack(rollback) => panic!("{rollback}"),
        Event::GraphUnavailable(reason) | Event::LibraryReplaced(reason) => panic!("{reason}"),
        Event::Autotuning { .. } => unreachable!("a CPU has nothing to try"),
    });
    let SaveStatistics { last, .. } = outcome.expect("it trains").expect("rank 0 is here").saves;
    let last = last.expect("it is saved");
    let mean = |seconds: Vec<f64>| seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
    let of = |wanted: bool| {
        steps[1..].iter().filter(|step| step.1 == wanted).map(|step| step.0.step_s).collect::<Vec<_>>()
    };
    let blocked: Vec<f64> = steps.iter().filter_map(|step| step.0.checkpoint_s).collect();
    // Nothing else ran while the last checkpoint was written, so its time is that of a synchronous save.
    let synchronous = last.seconds + blocked[blocked.len() - 1];
    println!(
        "{:.2} GB; blocked {blocked:.3?} s; a save that is waited for {synchronous:.3} s",
        last.bytes as f64 / 1e9
    );
    println!(
        "blocked / waited for: {:.1} %",
        100.0 * blocked[1..].iter().fold(0.0, |a, &b| f64::max(a, b)) / synchronous
    );
    println!("a step: {:.3} s, and {:.3} s while a checkpoint is written", mean(of(false)), mean(of(true)));
    last.path
}

/// Reads the files as bytes, then loads them into a rank.
fn loading(plan: &Plan, path: &Path, cold: bool) {
    let empty_cache = || {
        if cold {
            fs::write("/proc/sys/vm/drop_caches", "1").expect("only root empties the page cache");
        }
    };
    empty_cache();
    let (bytes, reading) = timed(|| read_all(path));
    println!("reading the files: {:.2} GB/s", bytes as f64 / 1e9 / reading);
    empty_cache();
    let (checkpoint, opening) = timed(|| Checkpoint::open(path).expect("it is whole"));
    let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
    let loaded = run_ranks(Purpose::Training, &job, &job.world(), |worker| {
        Ok(timed(|| worker.rank.load(&checkpoint, checkpoint.stored_tensors()).expect("all is there")).1)
    });
    let loading = loaded.expect("no rank fails")[0];
    let all = bytes as f64 / 1e9 / (opening + loading);
    println!("checking {opening:.2} s, loading {loading:.2} s: {all:.2} GB/s in all");
}

fn read_all(path: &Path) -> u64 {
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    for entry in fs::read_dir(path).expect("a checkpoint") {
        let mut file = File::open(entry.expect("an entry").path()).expect("a file");
        loop {
            let read = file.read(&mut buffer).expect("it can be read");
            bytes += read as u64;
            if read == 0 {
                break;
            }
        }
    }
    bytes
}

fn timed<T>(body: impl FnOnce() -> T) -> (T, f64) {
    let begun = Instant::now();
    let result = body();
    (result, begun.elapsed().as_secs_f64())
}

//! Whole runs on a GPU: the results are bit-identical with and without a graph, and with and without overlapped steps, and the
//! times of steps are the device's.
//!
//! The tests need a GPU. Without one they say so and pass.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kintsugi_comm::Connection;
use kintsugi_engine::{Event, MemoryChoice, TrainOptions, dataset, device, train};
use kintsugi_gpu::CUDA;
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Coverage, predict};
use kintsugi_testing::{Need, skip};

/// A small model on one GPU with cuDNN's attention, two micro-batches per step and several evaluations.
fn plan(settings: &[&str]) -> Plan {
    let small = [
        "run.device=cuda",
        "run.deterministic=true",
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.dp=1",
        "model.hidden=256",
        "model.heads=4",
        "model.ffn=512",
        "batch.sequence=128",
        "batch.micro=4",
        "batch.global=8",
        "run.steps=20",
        "run.eval_every=7",
        "optimizer.warmup=2",
    ];
    ConfigSource::demo().sets(small).sets(settings).plan().expect("a legal config")
}

/// A lock on the GPU, so that the runs of this process take turns. While several ran, a graph capture was found invalid,
/// presumably because a run that ends waits for the whole GPU. Without a GPU, returns `None` and prints why.
fn lock_gpu() -> Option<MutexGuard<'static, ()>> {
    static GPU: Mutex<()> = Mutex::new(());
    match CUDA.devices() {
        Ok(0) => skip(Need::Gpu, "the driver shows no device"),
        Err(error) => skip(Need::Gpu, error),
        Ok(_) => return Some(GPU.lock().unwrap_or_else(PoisonError::into_inner)),
    }
    None
}

/// Loss, norm, scale and validation loss of every step, bit for bit, and how many steps were replayed.
fn run(plan: &Plan, overlap_steps: bool) -> (Vec<[u64; 4]>, u64) {
    let mut bits = Vec::new();
    let outcome =
        train(plan, &*dataset(plan).expect("its data"), &options(plan, overlap_steps), |event| match event {
            Event::Step(step) => {
                assert_eq!(step.step, 1 + bits.len() as u64, "steps are reported in order");
                let numbers =
                    [step.loss, step.grad_norm, step.loss_scale, step.validation_loss.unwrap_or(0.0)];
                bits.push(numbers.map(f64::to_bits));
                // The first step loads kernels and chooses between them, which waits.
                assert!(
                    step.step == 1 || step.host_waits == Some(0),
                    "step {}: {:?}",
                    step.step,
                    step.host_waits
                );
            }
            Event::GraphUnavailable(reason) | Event::LibraryReplaced(reason) => panic!("{reason}"),
            Event::Autotuning { .. } => {}
            Event::RolledBack(rollback) => panic!("{rollback}"),
            Event::CheckpointSaved(_) | Event::CheckpointFailed(_) => unreachable!("nothing is saved"),
        });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}")).expect("rank 0 is here");
    assert_eq!((outcome.steps, bits.len()), (plan.run.steps, plan.run.steps as usize));
    (bits, outcome.replayed)
}

fn options(plan: &Plan, overlap_steps: bool) -> TrainOptions {
    let stages = predict(plan, device(plan, Connection::Threads), Coverage::ShortStep).stages;
    let memory = MemoryChoice::Slab(stages.iter().map(|memory| memory.reserved).collect());
    TrainOptions { overlap_steps: Some(overlap_steps), ..TrainOptions::new(memory) }
}

#[test]
fn steps_that_are_read_late_or_replayed_have_the_same_bits() {
    for settings in [
        &["precision.compute=fp32"][..],
        &["precision.compute=bf16"],
        &["precision.compute=fp16"],
        &["precision.compute=bf16", "memory.recompute=full", "batch.global=4"],
        &["precision.compute=bf16", "model.family=llama", "model.kv_heads=2", "model.tied=false"],
    ] {
        let [eager, graph] =
            ["run.graph=false", "run.graph=true"].map(|graph| plan(&[settings, &[graph]].concat()));
        let _legal_without_a_card = [&eager, &graph].map(|plan| options(plan, false));
        let Some(_turn) = lock_gpu() else { continue };
        let (expected, none) = run(&eager, false);
        assert_eq!(none, 0);
        assert_eq!(run(&eager, true).0, expected, "overlapped steps, {settings:?}");
        for overlap_steps in [false, true] {
            let (found, replayed) = run(&graph, overlap_steps);
            assert_eq!(found, expected, "replayed, overlapped {overlap_steps}, {settings:?}");
            // The first step loads kernels, the next two are the same, and then two are captured.
            assert!(replayed >= 10, "{replayed} replayed, overlapped {overlap_steps}, {settings:?}");
        }
    }
}

#[test]
fn tuned_products_are_replayed_once_they_are_chosen() {
    let plan = plan(&["precision.compute=bf16", "run.deterministic=false", "run.steps=40"]);
    if let Some(_turn) = lock_gpu() {
        let (bits, replayed) = run(&plan, true);
        let [first, last] = [bits[0][0], bits[39][0]].map(f64::from_bits);
        // All are chosen in the first step.
        assert!(replayed >= 25 && last < first, "{replayed} replayed, loss {first} to {last}");
    }
}

/// All steps do the same work. The host enqueues many operations a step here, so it looks at the end of a step late.
#[test]
fn the_last_of_equal_steps_takes_as_long_as_the_others() {
    for graph in ["run.graph=false", "run.graph=true"] {
        let plan = plan(&[
            "precision.compute=bf16",
            "model.hidden=1024",
            "model.heads=16",
            "model.ffn=4096",
            "model.layers=24",
            "batch.sequence=512",
            "batch.micro=8",
            "batch.global=32",
            "run.steps=12",
            "run.eval_every=0",
            graph,
        ]);
        assert_eq!(plan.micro_batches(), 4);
        let (options, mut seconds) = (options(&plan, true), Vec::new());
        let Some(_turn) = lock_gpu() else { continue };
        let outcome = train(&plan, &*dataset(&plan).expect("its data"), &options, |event| {
            if let Event::Step(report) = event {
                seconds.push(report.step_s);
            }
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
        let last = seconds[11];
        // The first steps load kernels, choose between them and are captured.
        let mut others = seconds[5..11].to_vec();
        others.sort_by(f64::total_cmp);
        let median = others[3];
        assert!(last > 0.9 * median && last < 1.5 * median, "{graph}: {seconds:?}");
    }
}

#[test]
fn a_replayed_run_stops_when_asked_to() {
    let plan = plan(&["precision.compute=bf16", "run.steps=1000", "run.eval_every=0"]);
    let (options, mut steps) = (options(&plan, true), 0);
    let Some(_turn) = lock_gpu() else { return };
    let outcome = train(&plan, &*dataset(&plan).expect("its data"), &options, |event| {
        if let Event::Step(report) = event {
            steps = report.step;
            options.stop.store(steps >= 12, Ordering::Relaxed);
        }
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}")).expect("rank 0 is here");
    assert!(
        outcome.stopped && outcome.replayed > 0,
        "{} steps, {} replayed",
        outcome.steps,
        outcome.replayed
    );
    assert!(outcome.steps == steps && (13..1000).contains(&steps), "{steps} steps");
}

//! Other optimizers than `AdamW`, and groups of parameters, give twenty steps with the losses and the weights of PyTorch's SGD and
//! `AdamW` and of lion-pytorch.
//!
//! The fixtures are made by `scripts/make-optimizer-fixtures`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use kintsugi_engine::{Job, MemoryChoice, Worker, run_ranks};
use kintsugi_plan::Plan;
use kintsugi_rank::{Purpose, StoredTensor, UnitValues, assemble};
use kintsugi_tensor::ops::control;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::transformers::{Batches, Fixture, assert_close, fixtures};

/// What another library computes with an optimizer.
#[derive(Deserialize)]
struct Case {
    /// The keys of `[optimizer]`.
    optimizer: Value,
    losses: Vec<f64>,
    /// The first elements of some parameters after some steps, counted from 1.
    weights: BTreeMap<usize, BTreeMap<String, Vec<f64>>>,
}

fn cases() -> BTreeMap<String, Case> {
    let path = fixtures().join("llama/optimizers.json");
    serde_json::from_slice(&std::fs::read(path).expect("the fixture is there")).expect("the fixture is JSON")
}

/// The losses of a rank, and its part of the weights after the steps of the case.
type Seen = (Vec<f64>, Vec<Vec<UnitValues>>);

fn train(fixture: &Fixture, plan: &Plan, case: &Case) -> Vec<Seen> {
    let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
    let windows = fixture.windows();
    run_ranks(Purpose::Training, &job, &job.world(), |worker| {
        worker.rank.load(&fixture.folder, &[StoredTensor::Weights]).expect("the fixture has all weights");
        let (program, step) = (worker.program(plan), Cell::new(0));
        let (micro, per_step) = (plan.batch.micro, plan.batch.global);
        let mut batches = Batches {
            windows: &windows,
            starts: vec![],
            micro,
            per_step,
            step: &step,
            tokens: vec![],
            targets: vec![],
        };
        let mut seen = Seen::default();
        for i in 0..case.losses.len() {
            step.set(i);
            worker.run(&program, &mut batches, |_, _| {})?;
            seen.0.push(worker.rank.control(control::LOSS));
            if case.weights.contains_key(&(i + 1)) {
                seen.1.push(worker.rank.weights());
            }
        }
        Ok(seen)
    })
    .expect("no rank fails")
}

/// Every tensor of a rank's parameters, in fp32.
fn stored(worker: &Worker, plan: &Plan, stored: StoredTensor) -> BTreeMap<String, Vec<f32>> {
    let placed = plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed);
    let values = placed.map(|placed| {
        let mut bytes = vec![0; 4 * placed.range.len()];
        worker.rank.download(placed.parameter.unit, stored, &placed.range, &mut bytes);
        let values = bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number));
        (placed.parameter.name(), values.collect())
    });
    values.collect()
}

#[test]
fn frozen_weights_stay_and_the_others_move_as_beside_a_rate_of_zero() {
    let fixture = Fixture::open("llama");
    let windows = fixture.windows();
    // Without clipping and decay, a rate of zero changes nothing for the others.
    let run = |way: &str, layout: &[&str]| {
        let groups =
            ["table.*", "layer.0.*"].map(|pattern| format!("{{ parameters = \"{pattern}\", {way} }}"));
        let groups = format!("optimizer.groups=[{}]", groups.join(", "));
        let common = ["batch.micro=1", "optimizer.clip=0", "optimizer.weight_decay=0", &groups];
        let plan = fixture.plan_with(&json!({ "lr": 1e-2 }), &[&common[..], layout].concat());
        let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
        let ranks = run_ranks(Purpose::Training, &job, &job.world(), |worker| {
            worker.rank.load(&fixture.folder, &[StoredTensor::Weights]).expect("the fixture has all weights");
            let (program, step) = (worker.program(&plan), Cell::new(0));
            let (micro, per_step) = (plan.batch.micro, plan.batch.global);
            let mut batches = Batches {
                windows: &windows,
                starts: vec![],
                micro,
                per_step,
                step: &step,
                tokens: vec![],
                targets: vec![],
            };
            let before = worker.rank.weights();
            for i in 0..3 {
                step.set(i);
                worker.run(&program, &mut batches, |_, _| {})?;
            }
            Ok((before, worker.rank.weights()))
        });
        let (before, after): (Vec<_>, Vec<_>) = ranks.expect("no rank fails").into_iter().unzip();
        [before, after].map(|pieces| assemble(&plan, &pieces.concat()).whole)
    };
    let [before, expected] = run("lr_factor = 0.0", &[]);
    assert_eq!(run("frozen = true", &[])[1], expected);
    assert!(before.iter().all(|(name, weights)| {
        let frozen = name.starts_with("table.") || name.starts_with("layer.0.");
        (weights == &expected[name]) == frozen
    }));
    let [_, divided] = run("frozen = true", &["parallel.tp=2", "parallel.pp=2"]);
    for (name, weights) in &expected {
        let [ours, theirs] = [&divided[name], weights]
            .map(|weights| weights.iter().map(|&weight| f64::from(weight)).collect::<Vec<_>>());
        assert_close(name, &ours, &theirs);
    }
}

#[test]
fn the_average_of_the_weights_begins_with_them_and_follows() {
    const EMA: f64 = 0.75;
    let fixture = Fixture::open("llama");
    let windows = fixture.windows();
    for optimizer in [json!({ "lr": 1e-2 }), json!({ "lr": 1e-2, "name": "muon" })] {
        let plan = fixture.plan_with(&optimizer, &["batch.micro=4", &format!("optimizer.ema={EMA}")]);
        let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
        run_ranks(Purpose::Training, &job, &job.world(), |worker| {
            worker.rank.load(&fixture.folder, &[StoredTensor::Weights]).expect("the fixture has all weights");
            let mut expected = stored(worker, &plan, StoredTensor::Weights);
            assert_eq!(stored(worker, &plan, StoredTensor::Average), expected);
            let (program, step) = (worker.program(&plan), Cell::new(0));
            let (micro, per_step) = (plan.batch.micro, plan.batch.global);
            let (starts, tokens, targets) = (vec![], vec![], vec![]);
            let mut batches =
                Batches { windows: &windows, starts, micro, per_step, step: &step, tokens, targets };
            for i in 0..3 {
                step.set(i);
                worker.run(&program, &mut batches, |_, _| {})?;
                let weights = stored(worker, &plan, StoredTensor::Weights);
                for (name, expected) in &mut expected {
                    for (average, weight) in expected.iter_mut().zip(&weights[name]) {
                        *average = (EMA * f64::from(*average) + (1.0 - EMA) * f64::from(*weight)) as f32;
                    }
                }
                for (name, found) in stored(worker, &plan, StoredTensor::Average) {
                    let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<_>>();
                    assert_close(&name, &wide(&found), &wide(&expected[&name]));
                }
            }
            Ok(())
        })
        .expect("no rank fails");
    }
}

#[test]
fn twenty_steps_have_the_losses_and_weights_of_other_libraries() {
    let fixture = Fixture::open("llama");
    for (name, case) in cases() {
        for layout in [
            &["batch.micro=4"][..],
            &["parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true", "batch.micro=2"],
        ] {
            let plan = fixture.plan_with(&case.optimizer, layout);
            let ranks = train(&fixture, &plan, &case);
            let what = format!("{name}, {layout:?}");
            assert_close(&format!("{what}: losses"), &ranks[0].0, &case.losses);
            for (number, (step, expected)) in case.weights.iter().enumerate() {
                let pieces: Vec<UnitValues> =
                    ranks.iter().flat_map(|(_, seen)| seen[number].clone()).collect();
                let whole = assemble(&plan, &pieces).whole;
                for (parameter, expected) in expected {
                    let ours: Vec<f64> = whole[parameter].iter().copied().map(f64::from).collect();
                    let what = format!("{what}: {parameter} after step {step}");
                    assert_close(&what, &ours[..expected.len()], expected);
                }
            }
        }
    }
}

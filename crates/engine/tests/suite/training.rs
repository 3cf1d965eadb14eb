//! Whole runs: repeated runs are bit-identical, and every rank detects a failure.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kintsugi_comm::Connection;
use kintsugi_data::{MicroBatch, Sampler, Split, TokenFileInfo, TokenType, TokenWriter};
use kintsugi_engine::verify::{Fault, record};
use kintsugi_engine::{
    Event, Job, MemoryChoice, StepReport, TrainError, TrainOptions, dataset, run_ranks, train,
};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Plan, Unit};
use kintsugi_rank::{NonFiniteTensor, Purpose, StoredTensor, TokenSource, Tokens, assemble};
use kintsugi_tensor::ops::control;

/// A small model on eight ranks, with these settings.
fn plan(settings: &[&str]) -> Plan {
    let small = [
        "model.hidden=32",
        "model.ffn=64",
        "batch.sequence=16",
        "batch.micro=1",
        "batch.global=8",
        "run.steps=6",
        "run.eval_every=3",
        "run.eval_tokens=512",
        "optimizer.warmup=2",
    ];
    ConfigSource::demo().sets(small).sets(settings).plan().expect("a legal config")
}

fn reports(plan: &Plan) -> Vec<StepReport> {
    let mut reports = Vec::new();
    let options = TrainOptions::new(MemoryChoice::Heap);
    train(plan, &*dataset(plan).expect("its data"), &options, |event| reports.extend(step(event)))
        .expect("it trains");
    reports
}

fn step(event: &Event) -> Option<StepReport> {
    if let Event::Step(report) = event { Some(report.clone()) } else { None }
}

struct Ones(Vec<u32>);

impl TokenSource for Ones {
    fn batch(&mut self, _micro: usize) -> Option<Tokens<'_>> {
        Some(Tokens { inputs: &self.0, targets: &self.0, starts: &[] })
    }
}

#[test]
fn two_runs_with_one_seed_are_bit_identical() {
    for settings in [
        &["sharding.zero=3"][..],
        &["precision.compute=bf16", "parallel.sequence_parallel=true"],
        &ZERO_PLUS_PLUS,
    ] {
        let bits = |reports: Vec<StepReport>| -> Vec<[u64; 3]> {
            let numbers =
                |r: &StepReport| [r.loss, r.grad_norm, r.validation_loss.unwrap_or(0.0)].map(f64::to_bits);
            reports.iter().map(numbers).collect()
        };
        let plan = plan(settings);
        assert_eq!(bits(reports(&plan)), bits(reports(&plan)));
    }
    let other = reports(&plan(&["run.seed=2"]));
    assert_ne!(reports(&plan(&[]))[0].loss.to_bits(), other[0].loss.to_bits(), "another seed is another run");
}

#[test]
fn loaded_weights_are_the_weights() {
    let one =
        plan(&["parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "sharding.zero=0", "model.hidden=128"]);
    let weights = record(&one, MemoryChoice::Heap, Connection::Threads, None)
        .expect("it runs")
        .expect("rank 0 is here")
        .weights;
    let other = plan(&["sharding.zero=3", "parallel.sequence_parallel=true", "model.hidden=128"]);
    let job = Job::new(Arc::new(other.clone()), MemoryChoice::Heap);
    let ranks = run_ranks(Purpose::Training, &job, &job.world(), |worker| {
        worker.rank.load(&weights, &[StoredTensor::Weights]).expect("all is there");
        Ok(worker.rank.weights())
    });
    let pieces: Vec<_> = ranks.expect("no rank fails").into_iter().flatten().collect();
    assert_eq!(assemble(&other, &pieces).whole, weights);
}

/// Four replicas on two nodes, with codes.
const ZERO_PLUS_PLUS: [&str; 5] =
    ["parallel.tp=1", "parallel.pp=2", "parallel.dp=4", "cluster.per_node=2", "sharding.preset=zero++"];

/// Skip, skipped steps in a row, loss scale and updates of every rank after three steps, and whether its weights are the same.
fn after_three_steps(plan: &Plan, fault: Option<Fault>) -> Vec<([f64; 4], bool)> {
    let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
    let world = match fault {
        Some(fault) => fault.in_world(job.world(), plan),
        None => job.world(),
    };
    let ranks = run_ranks(Purpose::Training, &job, &world, |worker| {
        worker.rank.initialise(1);
        let before: Vec<_> = worker.rank.weights().into_iter().map(|piece| piece.values).collect();
        let program = worker.program(plan);
        for _ in 0..3 {
            worker.run(&program, &mut Ones(vec![1; plan.rows()]), |_, _| {})?;
        }
        let after: Vec<_> = worker.rank.weights().into_iter().map(|piece| piece.values).collect();
        let slots = [control::SKIP, control::SKIPPED_IN_A_ROW, control::LOSS_SCALE, control::UPDATES];
        Ok((slots.map(|slot| worker.rank.control(slot)), before == after))
    });
    ranks.expect("no rank fails")
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_and_moves_every_scale_alike() {
    for layout in [&[][..], &ZERO_PLUS_PLUS] {
        let plan = plan(&[&["precision.compute=fp16", "run.max_skipped=100"], layout].concat());
        for (rank, state) in after_three_steps(&plan, Some(Fault::Overflow)).into_iter().enumerate() {
            assert_eq!(state, ([1.0, 3.0, 65536.0 / 8.0, 0.0], true), "rank {rank}, {layout:?}");
        }
    }
}

/// Quantisation does not hide numbers that are not finite. Weights that a refresh replaces by codes stay the same, too.
#[test]
fn gradients_that_overflow_before_they_are_quantised_skip_the_step() {
    let overflow = ["precision.compute=fp16", "precision.loss_scale=1e30", "run.max_skipped=100"];
    let refreshed = ["sharding.weights=node", "sharding.quantize_refresh=int8"];
    for more in [&[][..], &refreshed, &["sharding.quantize_gradients=int8", "sharding.reduce=step"]] {
        let plan = plan(&[&overflow, &ZERO_PLUS_PLUS[..], more].concat());
        for (rank, ([skip, skipped, _, updates], same)) in
            after_three_steps(&plan, None).into_iter().enumerate()
        {
            assert_eq!(([skip, skipped, updates], same), ([1.0, 3.0, 0.0], true), "rank {rank}, {more:?}");
        }
    }
}

#[test]
fn weights_that_are_not_finite_stop_the_run_and_are_named() {
    let plan = plan(&[
        "precision.compute=fp16",
        "optimizer.lr=1e6",
        "optimizer.min_lr=0",
        "optimizer.clip=0",
        "run.max_skipped=3",
    ]);
    let error =
        train(&plan, &*dataset(&plan).expect("its data"), &TrainOptions::new(MemoryChoice::Heap), |_| {})
            .expect("it ends")
            .expect("rank 0 is here")
            .failure
            .expect("nothing finite comes of this");
    let TrainError::NotFinite { steps: 3, step, first: Some((rank, bad)) } = error else {
        panic!("{error}");
    };
    // The first update is larger than fp16's largest number, so every weight is infinite from then on.
    assert_eq!((step, rank, bad.what, bad.unit), (4, 0, NonFiniteTensor::Weights, Unit::Table), "{error}");
}

#[test]
fn the_rank_and_the_unit_that_went_bad_first_are_named() {
    // Without ZeRO, whose refresh would send non-finite weights to the next replica.
    let plan = plan(&["sharding.zero=0"]);
    let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
    let (bad_rank, bad_unit) = (5, Unit::Layer(3));
    let found = run_ranks(Purpose::Training, &job, &job.world(), |worker| {
        worker.rank.initialise(1);
        if worker.number == bad_rank {
            let mut whole =
                record(&self::plan(&["run.steps=1"]), MemoryChoice::Heap, Connection::Threads, None)
                    .expect("it runs")
                    .expect("rank 0 is here")
                    .weights;
            whole
                .get_mut("layer.3.mlp_in_weight")
                .expect("a parameter")
                .iter_mut()
                .for_each(|w| *w *= f32::NAN);
            worker.rank.load(&whole, &[StoredTensor::Weights]).expect("all is there");
        }
        worker.run(&worker.program(&plan), &mut Ones(vec![1; plan.rows()]), |_, _| {})?;
        assert!(worker.rank.control(control::SKIP) > 0.0);
        Ok(worker
            .rank
            .first_non_finite()
            .filter(|bad| bad.what == NonFiniteTensor::Weights)
            .map(|bad| bad.unit))
    });
    let found = found.expect("a skipped step is not a failure");
    let named: Vec<usize> = (0..found.len()).filter(|&rank| found[rank].is_some()).collect();
    assert_eq!((named, found[bad_rank]), (vec![bad_rank], Some(bad_unit)));
}

#[test]
fn a_rank_that_panics_takes_the_job_down_with_its_number_and_op() {
    let plan = plan(&[]);
    let job = Job::new(Arc::new(plan.clone()), MemoryChoice::Heap);
    let error = run_ranks(Purpose::Training, &job, &job.world(), |worker| {
        worker.rank.initialise(1);
        let (number, program) = (worker.number, worker.program(&plan));
        worker.run(&program, &mut Ones(vec![1; plan.rows()]), |_, op| {
            assert!(!(number == 6 && op.to_string().starts_with("backward layer 2")), "a cosmic ray");
        })?;
        Ok(())
    })
    .expect_err("rank 6 panics");
    assert_eq!(error.to_string(), "rank 6 failed in backward layer 2, micro-batch 0: a cosmic ray");
}

#[test]
fn a_request_to_stop_ends_every_rank_after_the_same_step() {
    for evaluation in ["run.eval_every=0", "run.eval_every=1"] {
        let plan = plan(&["run.steps=1000", evaluation]);
        let options = TrainOptions::new(MemoryChoice::Heap);
        let mut steps = 0;
        let outcome = train(&plan, &*dataset(&plan).expect("its data"), &options, |event| {
            steps = step(event).expect("nothing is saved").step;
            if steps == 3 {
                options.stop.store(true, Ordering::Relaxed);
            }
        })
        .expect("stopping is not an error")
        .expect("rank 0 is here");
        assert!(outcome.stopped && outcome.steps == steps && (4..1000).contains(&steps), "{steps} steps");
    }
}

#[test]
fn a_bad_token_ends_a_run_before_the_step_that_needs_it() {
    const TOKENS: u32 = 4096;
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("training-one-bad-token");
    let mut writer = TokenWriter::create(&path, TokenType::U16).expect("a new file");
    let mut ids = vec![1; TOKENS as usize];
    ids[TOKENS as usize / 2] = 60_000;
    let mut bytes = Vec::new();
    TokenType::U16.write(&ids, &mut bytes);
    writer.append(&bytes, &[TOKENS], true).expect("a document");
    let tokens = u64::from(TOKENS);
    let about = TokenFileInfo {
        vocab: 97,
        tokenizer: "none".to_owned(),
        end_of_document: None,
        documents: 1,
        tokens,
        validation: None,
    };
    writer.finish(&about).expect("whole files");

    let source = format!("data.source={}", path.display());
    let with = |steps: u64, stages: u64, replicas: u64| {
        let [steps, pp, dp] = [("run.steps", steps), ("parallel.pp", stages), ("parallel.dp", replicas)]
            .map(|(key, value)| format!("{key}={value}"));
        plan(&["parallel.tp=1", &pp, &dp, "run.eval_every=0", "data.split=0", &source, &steps])
    };
    let (plan, mut batch) = (with(1, 1, 1), MicroBatch::default());
    let (files, sampler) = (dataset(&plan).expect("the file"), Sampler::new(16, 8, 1, 1));
    let mut is_bad =
        |step| (0..8).any(|micro| sampler.batch(&*files, Split::Train, step, 0, micro, &mut batch).is_err());
    let bad = (1..100).find(|&step| is_bad(step)).expect("every token is read within an epoch");
    assert_eq!(reports(&with(bad, 1, 1)).len() as u64, bad);
    // Only one of several ranks reads the broken data. All ranks end after the previous step, also with overlapped steps.
    for (late, (stages, replicas)) in
        [false, true].into_iter().flat_map(|late| [(late, (1, 1)), (late, (2, 2))])
    {
        let options = TrainOptions { overlap_steps: Some(late), ..TrainOptions::new(MemoryChoice::Heap) };
        let plan = with(bad + 5, stages, replicas);
        let outcome = train(&plan, &*dataset(&plan).expect("its data"), &options, |_| {});
        let outcome = outcome.expect("the steps before are whole").expect("rank 0 is here");
        let error = outcome.failure.expect("it is read").to_string();
        assert!(outcome.stopped && outcome.steps == bad && error.contains("60000"), "{error}");
    }
}

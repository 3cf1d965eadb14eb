//! A resumed run equals an uninterrupted one: bit for bit with the same layout, to rounding with another.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kintsugi_checkpoint::{Checkpoint, CheckpointFolder, write};
use kintsugi_engine::{Event, MemoryChoice, Start, StepReport, TrainError, TrainOptions, dataset, train};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_rank::{Elements, Store, StoredTensor};
use kintsugi_testing::cases;

/// An empty folder for one test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::remove_dir_all(&folder).ok();
    fs::create_dir_all(&folder).expect("a folder for tests");
    folder
}

/// A small model on eight ranks, with these settings.
fn plan(settings: &[&str]) -> Plan {
    let small = [
        "model.hidden=32",
        "model.ffn=64",
        "model.vocab=200",
        "batch.sequence=8",
        "batch.micro=1",
        "batch.global=4",
        "run.steps=6",
        "run.checkpoint_every=3",
        "run.keep=9",
        "optimizer.warmup=2",
    ];
    ConfigSource::demo().sets(small).sets(settings).plan().expect("a legal config")
}

/// Trains from a checkpoint, or from the seed; saves into `out`.
fn run(plan: &Plan, from: Option<&Path>, out: &Path) -> Vec<StepReport> {
    let start = from.map_or(Start::Seed, |path| {
        Start::Checkpoint(Arc::new(Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"))))
    });
    let checkpoints = Some(CheckpointFolder::of_run(out));
    let options = TrainOptions { start, checkpoints, ..TrainOptions::new(MemoryChoice::Heap) };
    let mut reports = Vec::new();
    let outcome = train(plan, &*dataset(plan).expect("its data"), &options, |event| match event {
        Event::Step(report) => reports.push(report.clone()),
        Event::CheckpointSaved(saved) => assert!(saved.left.is_none(), "{saved:?}"),
        Event::CheckpointFailed(failure) => panic!("{failure}"),
        Event::RolledBack(rollback) => panic!("{rollback}"),
        Event::GraphUnavailable(reason) | Event::LibraryReplaced(reason) => panic!("{reason}"),
        Event::Autotuning { .. } => unreachable!("a CPU has nothing to try"),
    });
    assert_eq!(outcome.expect("it trains").expect("rank 0 is here").saves.failed, 0);
    reports
}

/// The files of a checkpoint by name.
fn files(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(path).expect("a checkpoint").map(|entry| entry.expect("an entry").path());
    let read = |path: PathBuf| {
        (path.file_name().expect("a name").to_string_lossy().into_owned(), fs::read(&path).expect("a file"))
    };
    entries.map(read).collect()
}

/// The embedding and a layer between others.
const FROZEN: &str = "optimizer.groups=[{ parameters = \"table.*\", frozen = true }, { parameters = \"positions.*\", \
                      frozen = true }, { parameters = \"layer.1.*\", frozen = true }]";

/// Eight replicas on two nodes of two packages.
const EIGHT_REPLICAS: [&str; 6] = [
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp=8",
    "batch.global=8",
    "cluster.per_package=2",
    "cluster.per_node=4",
];

#[test]
fn on_the_same_layout_not_a_bit_is_different() {
    for settings in [
        &["sharding.zero=0"][..],
        &["sharding.zero=2", "precision.compute=bf16", "precision.states=bf16"],
        &["sharding.zero=1", "optimizer.name=lion", "precision.states=bf16"],
        &["sharding.zero=3", "optimizer.name=sgd", "precision.compute=bf16"],
        &["sharding.zero=3", "precision.compute=fp16", "parallel.schedule=zero-bubble"],
        &["sharding.zero=3", "precision.compute=bf16", "optimizer.ema=0.9", FROZEN],
        &[
            "sharding.zero=1",
            "precision.compute=bf16",
            "model.family=llama",
            "model.kv_heads=2",
            "model.tied=false",
        ],
        &[&EIGHT_REPLICAS[..], &["sharding.preset=zero++", "precision.compute=bf16"]].concat(),
        &[&EIGHT_REPLICAS[..], &["sharding.preset=three-level", "sharding.quantize_weights=int8"]].concat(),
        &[
            &EIGHT_REPLICAS[..],
            &["sharding.zero=1", "sharding.quantize_weights=int8", "precision.compute=fp16"],
        ]
        .concat(),
    ] {
        let plan = plan(settings);
        let (whole, parts) = (folder("resume-whole"), folder("resume-parts"));
        let uninterrupted = run(&plan, None, &whole);
        let resumed = run(&plan, Some(&CheckpointFolder::of_run(&whole).of_step(3)), &parts);
        let numbers = |reports: &[StepReport]| -> Vec<_> {
            reports
                .iter()
                .map(|r| (r.step, r.loss.to_bits(), r.grad_norm.to_bits(), r.lr.to_bits(), r.tokens))
                .collect()
        };
        assert_eq!(numbers(&uninterrupted[3..]), numbers(&resumed), "{settings:?}");
        let [first, second] = [&whole, &parts].map(|out| files(&CheckpointFolder::of_run(out).of_step(6)));
        let differing: Vec<&String> =
            first.keys().filter(|&name| first.get(name) != second.get(name)).collect();
        assert!(differing.is_empty(), "other files at the end: {differing:?}, {settings:?}");
        assert_eq!(first.len(), 9, "a file per rank, and the manifest");
    }
}

/// A small linear congruential generator: the same layouts on every run.
struct Choices(u64);

impl Choices {
    fn of<'a>(&mut self, options: &[&'a str]) -> &'a str {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        options[(self.0 >> 33) as usize % options.len()]
    }

    /// A random layout of a model, legal or not.
    fn layout(&mut self, model: &str, optimizer: &str) -> String {
        let mut text = format!(
            "[model]\npreset = \"demo\"\nlayers = 4\nhidden = 32\nffn = 64\nheads = 4\nvocab = 200\n{model}\n\
             [optimizer]\nwarmup = 2\n{optimizer}\n[run]\nsteps = 4\ncheckpoint_every = 2\n"
        );
        let schedule = self.of(&["gpipe", "1f1b", "interleaved", "zero-bubble"]);
        let chunks = if schedule == "interleaved" { "2" } else { "1" };
        let (tp, pp, dp) =
            (self.of(&["1", "2", "4"]), self.of(&["1", "2", "3", "4"]), self.of(&["1", "2", "3", "4", "4"]));
        write!(
            text,
            "[parallel]\ntp = {tp}\ncp = {}\ncp_attention = \"{}\"\npp = {pp}\ndp = {dp}\nschedule = \"{schedule}\"\nvirtual_stages = {chunks}\n\
             sequence_parallel = {}\n[batch]\nsequence = 8\nmicro = {}\nglobal = 12\n[sharding]\n{}\n\
             [cluster]\nper_package = {tp}\nper_node = {}\n[memory]\nrecompute = \"{}\"\nattention = \"{}\"\n",
            self.of(&["1", "1", "2"]),
            self.of(&["gather", "ring", "all-to-all"]),
            self.of(&["true", "false"]),
            self.of(&["1", "2", "3"]),
            self.of(&[
                "zero = 0",
                "zero = 1",
                "zero = 2",
                "zero = 3",
                "zero = 3\ncollectives = \"hierarchical\"",
                "preset = \"mics\"",
                "preset = \"zero++\"\nquantize_weights = \"none\"\nquantize_gradients = \"none\"",
                "gradients = \"node\"\nstates = \"cluster\"",
            ]),
            2 * tp.parse::<usize>().expect("a number"),
            self.of(&["none", "selective", "full"]),
            self.of(&["flash", "plain"]),
        )
        .expect("a string");
        text
    }

    /// The next legal one.
    fn legal(&mut self, model: &str, optimizer: &str) -> (String, Plan) {
        loop {
            let text = self.layout(model, optimizer);
            match ConfigSource::text(&text).plan() {
                Ok(plan) if plan.mesh.ranks() <= 12 => return (text, plan),
                _ => {}
            }
        }
    }
}

#[test]
fn on_any_other_layout_the_curve_is_the_same() {
    let mut choices = Choices(11);
    for _ in 0..cases(12, 40) {
        let model = choices.of(&[
            "family = \"gpt\"",
            "family = \"neox\"\ntied = false",
            "family = \"llama\"\nkv_heads = 4",
        ]);
        let optimizer = choices.of(&[
            "",
            "name = \"lion\"",
            "name = \"muon\"",
            "name = \"sgd\"\nnesterov = true",
            "groups = [{ parameters = \"layer.1.*\", frozen = true }]",
        ]);
        let ((first_text, first), (second_text, second)) =
            (choices.legal(model, optimizer), choices.legal(model, optimizer));
        let (whole, parts) = (folder("reshard-whole"), folder("reshard-parts"));
        let uninterrupted = run(&first, None, &whole);
        let resumed = run(&second, Some(&CheckpointFolder::of_run(&whole).of_step(2)), &parts);
        assert_eq!(resumed.len(), 2);
        for (expected, found) in uninterrupted[2..].iter().zip(&resumed) {
            let relative = (expected.loss - found.loss).abs() / expected.loss;
            assert!(
                relative <= 1e-5
                    && expected.step == found.step
                    && expected.lr.to_bits() == found.lr.to_bits(),
                "{expected:?}\n{found:?}\n{first_text}\n{second_text}"
            );
        }
    }
}

#[test]
fn an_optimizer_with_other_states_is_refused() {
    let out = folder("resume-optimizer");
    let first = plan(&["optimizer.name=sgd"]);
    run(&first, None, &out);
    let checkpoint = Checkpoint::open(&CheckpointFolder::of_run(&out).of_step(3)).expect("it is whole");
    let refused =
        |settings: &[&str]| checkpoint.batches_consumed(&plan(settings)).err().map(|error| error.to_string());
    assert_eq!(refused(&["optimizer.name=sgd", "optimizer.nesterov=true"]), None);
    let sentence = "it was trained with optimizer.name = \"sgd\" and momentum = 0.9, and optimizer.name = \"adamw\" has \
                    other states; use the same optimizer, or start from the weights alone by model.init";
    assert!(refused(&[]).expect("refused").ends_with(sentence), "{:?}", refused(&[]));
    let without = refused(&["optimizer.name=sgd", "optimizer.momentum=0"]).expect("refused");
    assert!(without.contains("and optimizer.name = \"sgd\" and momentum = 0 has other states"), "{without}");
}

#[test]
fn what_was_frozen_stays_frozen() {
    let out = folder("resume-frozen");
    run(&plan(&[FROZEN]), None, &out);
    let checkpoint = Checkpoint::open(&CheckpointFolder::of_run(&out).of_step(3)).expect("it is whole");
    let refused = |groups: &str| {
        let groups = format!("optimizer.groups=[{groups}]");
        checkpoint.batches_consumed(&plan(&[&groups])).err().map(|error| error.to_string())
    };
    let sentence = "it was trained with layer.1 frozen and has no states of it; freeze it again, or start from the weights alone \
                    by model.init";
    let embedding =
        "{ parameters = \"table.*\", frozen = true }, { parameters = \"positions.*\", frozen = true }";
    assert!(refused(embedding).expect("refused").ends_with(sentence), "{:?}", refused(embedding));
    assert_eq!(refused(&format!("{embedding}, {{ parameters = \"layer.*\", frozen = true }}")), None);
}

/// All stored tensors of a checkpoint.
fn contents(checkpoint: &Checkpoint, plan: &Plan) -> BTreeMap<(String, StoredTensor), Vec<u32>> {
    let parameters = plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed).map(|p| p.parameter);
    let all = parameters
        .flat_map(|parameter| plan.stored_tensors().into_iter().map(move |stored| (parameter, stored)));
    let all = all.filter(|(parameter, stored)| plan.stores(parameter, *stored));
    all.map(|(parameter, stored)| {
        let mut values = vec![0.0; parameter.valid_elements()];
        checkpoint.read(Elements::of(&parameter, stored), &mut values).expect("all is there");
        ((parameter.name(), stored), values.into_iter().map(f32::to_bits).collect())
    })
    .collect()
}

#[test]
fn cut_anew_it_holds_the_same_numbers() {
    for optimizer in ["optimizer.name=adamw", "optimizer.name=muon", "optimizer.ema=0.75", FROZEN] {
        let out = folder("reshard-write");
        let common = [optimizer, "precision.states=bf16"];
        let layout = ["parallel.tp=2", "parallel.pp=2", "sharding.zero=1"];
        let first = plan(&[&layout[..], &common].concat());
        run(&first, None, &out);
        let original = Checkpoint::open(&CheckpointFolder::of_run(&out).of_step(6)).expect("it is whole");
        let before = contents(&original, &first);
        assert!(
            before
                .iter()
                .all(|(key, values)| key.1 == StoredTensor::Weights || values.iter().any(|&bits| bits != 0))
        );
        for settings in [
            ["parallel.tp=4", "parallel.pp=1", "parallel.dp=1"],
            ["parallel.tp=1", "parallel.pp=3", "parallel.dp=2"],
        ] {
            let other = plan(&[&settings[..], &common].concat());
            let path = out.join(format!("cut-{}", settings[0]));
            let cut_to =
                || write(&path, &other, &original, &other.stored_tensors(), original.progress(), None);
            cut_to().expect("it is written");
            let cut = Checkpoint::open(&path).expect("it is whole");
            assert_eq!((cut.progress(), contents(&cut, &other)), (original.progress(), before.clone()));
            let again = cut_to().expect_err("what is there stays");
            assert!(again.to_string().ends_with("it already exists"));
        }
    }
}

/// Four replicas on two nodes add in the same order if their sums are level by level. Without clipping, whose norm is added in
/// another order, nothing else depends on the placement.
#[test]
fn from_any_placement_to_any_other_not_a_bit_is_different() {
    let placements = [
        "sharding.zero=0",
        "sharding.zero=1",
        "sharding.zero=3",
        "sharding.preset=mics",
        "sharding.preset=zero++ sharding.quantize_weights=none sharding.quantize_gradients=none",
        "sharding.gradients=node",
        "sharding.weights=node sharding.gradients=node",
    ];
    let plan = |placement: &str| {
        let common = "parallel.tp=1 parallel.pp=1 parallel.dp=4 cluster.per_node=2 optimizer.clip=0 \
                      sharding.collectives=hierarchical";
        let settings = [common, placement].join(" ");
        plan(&settings.split_whitespace().collect::<Vec<_>>())
    };
    let end = |out: &Path, plan: &Plan| {
        let checkpoint = Checkpoint::open(&CheckpointFolder::of_run(out).of_step(6)).expect("it is whole");
        contents(&checkpoint, plan)
    };
    let out = |number: usize| folder(&format!("placement-{number}"));
    let folders: Vec<PathBuf> = (0..placements.len()).map(out).collect();
    for (placement, out) in placements.iter().zip(&folders) {
        run(&plan(placement), None, out);
    }
    let expected = end(&folders[0], &plan(placements[0]));
    for (number, placement) in placements.iter().enumerate() {
        let from = (number + 1) % placements.len();
        let (to, out) = (plan(placement), folder("placement-resumed"));
        assert_eq!(end(&folders[number], &to), expected, "{placement}");
        run(&to, Some(&CheckpointFolder::of_run(&folders[from]).of_step(3)), &out);
        assert_eq!(end(&out, &to), expected, "from {} to {placement}", placements[from]);
    }
}

#[test]
fn a_checkpoint_goes_on_in_another_precision() {
    let out = folder("resume-precision");
    run(&plan(&["precision.compute=fp16", "precision.states=bf16"]), None, &out);
    let path = CheckpointFolder::of_run(&out).of_step(3);
    let losses = |settings: &[&str]| run(&plan(settings), Some(&path), &folder("resume-precision-other"));
    let same = losses(&["precision.compute=fp16", "precision.states=bf16"]);
    for settings in [&["precision.compute=fp32"][..], &["precision.compute=bf16"]] {
        let other = losses(settings);
        assert_eq!(other[0].loss_scale.to_bits(), 1_f64.to_bits(), "a scale is for fp16");
        assert!((other[0].loss - same[0].loss).abs() < 0.02, "{} and {}", other[0].loss, same[0].loss);
    }
}

/// A checkpoint has the exact weights, so a run goes on from it with other codes or without.
#[test]
fn a_checkpoint_goes_on_with_other_codes() {
    let out = folder("resume-codes");
    let placed = |more: &[&str]| plan(&[&EIGHT_REPLICAS, more].concat());
    let three_levels = ["sharding.preset=three-level", "sharding.quantize_weights=int8"];
    let quantized = run(&placed(&three_levels), None, &out);
    let path = CheckpointFolder::of_run(&out).of_step(3);
    for settings in [
        &["sharding.zero=0"][..],
        &["sharding.zero=3"],
        &["sharding.preset=zero++", "sharding.quantize_block=64"],
    ] {
        let other = run(&placed(settings), Some(&path), &folder("resume-codes-other"));
        let (expected, found) = (quantized[3].loss, other[0].loss);
        assert!((expected - found).abs() < 0.01 * expected, "{expected} and {found}, {settings:?}");
    }
}

#[test]
fn a_run_that_does_not_fit_its_checkpoint_is_refused() {
    let out = folder("resume-refused");
    run(&plan(&[]), None, &out);
    let path = CheckpointFolder::of_run(&out).of_step(3);
    let refused = |settings: &[&str]| {
        let start = Start::Checkpoint(Arc::new(Checkpoint::open(&path).expect("it is whole")));
        let options = TrainOptions { start, ..TrainOptions::new(MemoryChoice::Heap) };
        let plan = plan(settings);
        match train(&plan, &*dataset(&plan).expect("its data"), &options, |_| {}) {
            Err(TrainError::Start(error)) => error.cause.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        refused(&["model.hidden=64"]),
        "it has model.hidden = 32, but this run has 64; the model must be the same"
    );
    let positions = "it has model.positions = 8, but this run has 16; the model must be the same";
    assert_eq!(refused(&["batch.sequence=16"]), positions);
    let sequence = "it was trained with batch.sequence = 8; with 4 its position in the data is unknown";
    assert_eq!(refused(&["batch.sequence=4", "model.positions=8"]), sequence);
    assert_eq!(refused(&["run.steps=3"]), "it is already at step 3; run.steps = 3 leaves nothing to train");
    let batch = "it has seen 12 samples, which is not a multiple of batch.global = 8; use 4";
    assert_eq!(refused(&["batch.global=8"]), batch);
}

#[test]
fn a_run_that_nobody_hears_of_any_more_ends_and_names_no_further_checkpoint() {
    let folder = CheckpointFolder::of_run(&folder("resume-deaf"));
    let plan = plan(&["run.steps=100000", "run.checkpoint_every=1"]);
    let options = TrainOptions { checkpoints: Some(folder.clone()), ..TrainOptions::new(MemoryChoice::Heap) };
    let listen = |event: &Event| match event {
        Event::Step(report) if report.step == 3 => panic!("the third step is not written down"),
        _ => {}
    };
    assert!(
        catch_unwind(AssertUnwindSafe(|| train(
            &plan,
            &*dataset(&plan).expect("its data"),
            &options,
            listen
        )))
        .is_err()
    );
    let named: Vec<u64> = folder.list().expect("checkpoints").into_iter().map(|(step, _)| step).collect();
    assert!(named.iter().all(|&step| step < 3), "{named:?}");
}

#[test]
fn a_run_that_gives_up_leaves_what_it_had_unless_that_is_bad() {
    let saved = |name: &str, settings: &[&str]| {
        let folder = CheckpointFolder::of_run(&folder(name));
        let plan = plan(
            &[&["precision.compute=fp16", "run.max_skipped=2", "run.checkpoint_every=0"], settings].concat(),
        );
        let options =
            TrainOptions { checkpoints: Some(folder.clone()), ..TrainOptions::new(MemoryChoice::Heap) };
        let outcome = train(&plan, &*dataset(&plan).expect("its data"), &options, |_| {});
        let failure = outcome.expect("it ends").expect("rank 0 is here").failure;
        assert!(matches!(failure, Some(TrainError::NotFinite { .. })), "{failure:?}");
        folder.list().expect("checkpoints").into_iter().map(|(step, _)| step).collect::<Vec<_>>()
    };
    assert_eq!(saved("gives-up-gradients", &["precision.loss_scale=1e9"]), [2]);
    let diverges = ["optimizer.lr=1e6", "optimizer.min_lr=0", "optimizer.clip=0"];
    assert_eq!(saved("gives-up-weights", &diverges), Vec::<u64>::new());
}

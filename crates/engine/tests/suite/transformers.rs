//! Hugging Face weights give the same logits, loss and twenty AdamW steps as the transformers library.
//!
//! The fixtures are made by `scripts/make-fixtures`.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_checkpoint::huggingface::HuggingFaceFolder;
use kintsugi_comm::Solo;
use kintsugi_engine::{Job, MemoryChoice, run_ranks};
use kintsugi_model::{Context, Shape, Weights, embedding, layer};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::parameters::{ParameterKind, UnitLayout};
use kintsugi_plan::{Plan, Unit};
use kintsugi_rank::{Elements, Purpose, Store, StoredTensor, TokenSource, Tokens};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{Linear, Norm, control};
use kintsugi_tensor::{Backend, Buffer, Category, DType};
use serde_json::Value;

const TOLERANCE: f64 = 1e-4;

/// The folder of all fixtures.
pub(crate) fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures")
}

/// The names of all fixtures.
fn names() -> Vec<String> {
    let folder = std::fs::read_dir(fixtures()).expect("the folder is there");
    folder.map(|entry| entry.expect("an entry").file_name().into_string().expect("a plain name")).collect()
}

/// A folder that transformers saved, and what transformers computes with it.
pub(crate) struct Fixture {
    pub(crate) folder: HuggingFaceFolder,
    expected: Value,
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Self {
        let path = fixtures().join(name);
        let expected = std::fs::read(path.join("expected.json")).expect("the fixture is there");
        let expected = serde_json::from_slice(&expected).expect("the fixture is JSON");
        Fixture { folder: HuggingFaceFolder::open(&path).expect(name), expected }
    }

    fn numbers(&self, field: &str) -> Vec<f64> {
        let list = self.expected[field].as_array().expect(field);
        list.iter().map(|number| number.as_f64().expect(field)).collect()
    }

    /// Samples with one token more than a sequence.
    pub(crate) fn windows(&self) -> Vec<Vec<u32>> {
        serde_json::from_value(self.expected["windows"].clone()).expect("lists of tokens")
    }

    /// The plan of the folder's model, with the optimizer of the fixture.
    fn plan(&self, settings: &[&str]) -> Plan {
        self.plan_with(&self.expected["optimizer"], settings)
    }

    /// The plan of the folder's model, with these keys of `[optimizer]`.
    pub(crate) fn plan_with(&self, optimizer: &Value, settings: &[&str]) -> Plan {
        let optimizer = optimizer.as_object().expect("a table").iter();
        let optimizer = optimizer.map(|(key, value)| format!("optimizer.{key}={}", as_toml(value)));
        let text = format!("batch = {{ sequence = {}, global = 4 }}", self.windows()[0].len() - 1);
        let source =
            ConfigSource::text(text).sets(optimizer).set("optimizer.schedule=constant").sets(settings);
        let source = source.with_init_model(self.folder.model()).expect("nothing is given twice");
        source.plan().expect("a legal config")
    }
}

/// A value as TOML, whose tables are not those of JSON.
fn as_toml(value: &Value) -> String {
    let joined = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Object(table) => {
            let entries = table.iter().map(|(key, value)| format!("{key} = {}", as_toml(value)));
            format!("{{ {} }}", joined(entries.collect()))
        }
        Value::Array(list) => format!("[{}]", joined(list.iter().map(as_toml).collect())),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.to_string(),
    }
}

/// A unit's weights on one rank.
fn unit(backend: &dyn Backend, folder: &HuggingFaceFolder, layout: &UnitLayout) -> Buffer {
    let mut flat = vec![0.0; layout.len];
    for placed in &layout.placed {
        let valid = placed.parameter.valid_elements();
        let values = &mut flat[placed.range.clone()][..valid];
        folder.read(Elements::of(&placed.parameter, StoredTensor::Weights), values).expect("it is there");
    }
    let buffer = backend.allocate(flat.len(), DType::F32, Category::Weights);
    backend.upload(&flat, buffer.view());
    buffer
}

fn logits(fixture: &Fixture) -> Vec<f32> {
    let plan = fixture.plan(&[]);
    let backend = CpuBackend::new(Rc::new(Heap::default()), 1);
    let shape = Shape::new(&plan, plan.mesh.coordinate(0));
    let ctx = Context { backend: &backend, tensor: &Solo, context: &Solo, shape: &shape, starts: None };
    let load = |name: Unit| {
        let layout = plan.layout(name);
        (unit(&backend, &fixture.folder, &layout), layout)
    };
    let tokens: Vec<u32> = fixture.numbers("tokens").into_iter().map(|token| token as u32).collect();
    let ids = backend.allocate(tokens.len(), DType::U32, Category::Activations);
    backend.upload_tokens(&tokens, ids.view());

    let (table, positions) = (load(Unit::Table), plan.units().contains(&Unit::Positions));
    let positions = positions.then(|| load(Unit::Positions));
    let positions = positions.as_ref().map(|(flat, layout)| Weights::new(flat.view(), layout));
    let table_weights = Weights::new(table.0.view(), &table.1);
    let mut x = embedding::forward(&ctx, ids.view(), &table_weights, positions.as_ref());
    for i in 0..plan.model.layers {
        let (flat, layout) = load(Unit::Layer(i));
        let starts = plan.window(i).map(|window| {
            let starts = window_starts(tokens.len(), window);
            let buffer = backend.allocate(starts.len(), DType::U32, Category::Activations);
            backend.upload_tokens(&starts, buffer.view());
            buffer
        });
        let ctx = Context { starts: starts.as_ref().map(Buffer::view), ..ctx };
        x = layer::evaluate(&ctx, x, &Weights::new(flat.view(), &layout)).0;
    }

    let (flat, layout) = load(Unit::Head);
    let head = Weights::new(flat.view(), &layout);
    let activation = |len| backend.allocate(len, DType::F32, Category::Activations);
    let (rows, width, vocab) = (tokens.len(), plan.model.hidden, plan.model.vocab);
    let (normed, statistics) = (activation(rows * width), activation(2 * rows));
    backend.norm(Norm {
        x: x.view(),
        weight: head.get(ParameterKind::FinalNormWeight),
        bias: head.find(ParameterKind::FinalNormBias),
        out: normed.view(),
        statistics: statistics.view(),
        epsilon: plan.model.norm_eps,
        rows,
        width,
    });
    let out = activation(rows * vocab);
    backend.linear(Linear {
        x: normed.view(),
        weight: head.find(ParameterKind::Output).unwrap_or_else(|| table_weights.get(ParameterKind::Table)),
        bias: None,
        gelu: None,
        residual: None,
        out: out.view(),
        rows,
        inputs: width,
        outputs: vocab,
        float8: None,
    });
    let mut logits = backend.read(out.view());
    if let Some(cap) = plan.model.logit_soft_cap {
        for logit in &mut logits {
            *logit = cap as f32 * (*logit / cap as f32).tanh();
        }
    }
    logits
}

/// The first token that each token of a sample attends to.
fn window_starts(sequence: usize, window: usize) -> Vec<u32> {
    (0..sequence).map(|token| (token + 1).saturating_sub(window) as u32).collect()
}

/// Repeats the fixture's batches.
pub(crate) struct Batches<'a> {
    pub(crate) windows: &'a [Vec<u32>],
    /// The first tokens that those of a micro-batch attend to, if layers have a window.
    pub(crate) starts: Vec<u32>,
    /// Samples per micro-batch. A step has `per_step` micro-batches.
    pub(crate) micro: usize,
    pub(crate) per_step: usize,
    pub(crate) step: &'a Cell<usize>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) targets: Vec<u32>,
}

impl TokenSource for Batches<'_> {
    fn batch(&mut self, micro: usize) -> Option<Tokens<'_>> {
        let first = self.step.get() * self.per_step + micro * self.micro;
        let sample = |i: usize| &self.windows[(first + i) % self.windows.len()];
        self.tokens = (0..self.micro).flat_map(|i| sample(i)[..sample(i).len() - 1].to_vec()).collect();
        self.targets = (0..self.micro).flat_map(|i| sample(i)[1..].to_vec()).collect();
        Some(Tokens { inputs: &self.tokens, targets: &self.targets, starts: &self.starts })
    }
}

/// The losses of as many steps as the fixture has.
fn losses(fixture: &Fixture, settings: &[&str]) -> Vec<f64> {
    let plan = Arc::new(fixture.plan(settings));
    let job = Job::new(Arc::clone(&plan), MemoryChoice::Heap);
    let (windows, steps) = (fixture.windows(), fixture.numbers("losses").len());
    let ranks = run_ranks(Purpose::Training, &job, &job.world(), |worker| {
        worker.rank.load(&fixture.folder, &[StoredTensor::Weights]).expect("the fixture has all weights");
        let (program, step) = (worker.program(&plan), Cell::new(0));
        let (micro, per_step) = (plan.batch.micro, plan.batch.global);
        let sample = plan.any_window().map_or(vec![], |window| window_starts(plan.batch.sequence, window));
        let starts = sample.repeat(micro);
        let (tokens, targets) = (vec![], vec![]);
        let mut batches =
            Batches { windows: &windows, starts, micro, per_step, step: &step, tokens, targets };
        let run = |i| {
            step.set(i);
            worker.run(&program, &mut batches, |_, _| {}).expect("no transfer fails");
            worker.rank.control(control::LOSS)
        };
        Ok((0..steps).map(run).collect::<Vec<f64>>())
    });
    ranks.expect("no rank fails").swap_remove(0)
}

pub(crate) fn assert_close(what: &str, ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst <= TOLERANCE, "{what} differ by {worst:e}");
    println!("{what}: at most {worst:.1e} apart");
}

#[test]
fn logits_are_those_of_transformers() {
    for name in names() {
        let fixture = Fixture::open(&name);
        let ours: Vec<f64> = logits(&fixture).into_iter().map(f64::from).collect();
        assert_close(&format!("{name}: logits"), &ours, &fixture.numbers("logits"));
    }
}

#[test]
fn twenty_steps_have_the_losses_of_transformers() {
    for name in names() {
        let fixture = Fixture::open(&name);
        let theirs = fixture.numbers("losses");
        let first = fixture.expected["loss"].as_f64().expect("a number");
        let mut layouts = vec![&["batch.micro=4"][..], &["parallel.pp=2", "batch.micro=1"]];
        if fixture.folder.model().kv_heads > 1 {
            layouts.push(&["parallel.tp=2", "parallel.sequence_parallel=true", "batch.micro=2"]);
        }
        for layout in layouts {
            let ours = losses(&fixture, layout);
            assert_close(&format!("{name}, {layout:?}: loss"), &ours[..1], &[first]);
            assert_close(&format!("{name}, {layout:?}: losses"), &ours, &theirs);
        }
    }
}

//! A small model on one rank, in f64, whose memory holds NaN wherever nothing has been written.

use std::cell::Cell;
use std::rc::Rc;

use kintsugi_comm::Communicator;
use kintsugi_model::{Context, Gradients, Shape, Weights};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::parameters::UnitLayout;
use kintsugi_tensor::cpu::memory::Slab;
use kintsugi_tensor::cpu::{CpuBackend, workspace_bytes};
use kintsugi_tensor::{Backend, Buffer, Category, DType, Memory, View};

/// Sizes differ wherever they may, the vocabulary has padding, and a sequence has two whole tiles of attention and
/// a part of a third.
const CONFIG: &str = "
    model = { layers = 1, hidden = 12, heads = 4, head_dim = 8, ffn = 10, vocab = 130, vocab_multiple = 32 }
    batch = { sequence = 150, micro = 2, global = 4 }
";

/// The three families, grouped heads in two of them, both of GPT-NeoX's residuals and of GELU's forms, and Llama's norms with the other
/// activation.
pub const MODELS: [&[&str]; 5] = [
    &["model.family=gpt"],
    &["model.family=neox", "model.kv_heads=2"],
    &["model.family=neox", "model.parallel_residual=false", "model.activation=gelu-exact"],
    &["model.family=llama", "model.kv_heads=2"],
    &["model.family=llama", "model.activation=gelu"],
];

/// The plan of the small model under these settings.
pub fn plan(sets: &[&[&str]]) -> Plan {
    let plan = ConfigSource::text(CONFIG).sets(sets.concat()).plan();
    plan.unwrap_or_else(|error| panic!("{sets:?}: {error}"))
}

/// The shape of a part of a plan, in f64.
pub fn shape(plan: &Plan, part: usize) -> Shape {
    Shape { compute: DType::F64, ..Shape::new(plan, part) }
}

/// A rank's device.
pub struct Lab {
    backend: CpuBackend,
}

impl Lab {
    pub fn new() -> Self {
        const BUFFERS: u64 = 8 << 20;
        let memory: Rc<dyn Memory> = Rc::new(Slab::new(workspace_bytes(1) + BUFFERS).unwrap());
        let backend = CpuBackend::new(Rc::clone(&memory), 1);
        let all = backend.allocate(BUFFERS as usize / 8, DType::F64, Category::Activations);
        backend.fill(f64::NAN, all.view());
        Lab { backend }
    }

    pub fn context<'a>(&'a self, tensor: &'a dyn Communicator, shape: &'a Shape) -> Context<'a> {
        Context { backend: &self.backend, tensor, shape, starts: None }
    }

    pub fn buffer(&self, values: &[f64]) -> Buffer {
        let buffer = self.backend.allocate(values.len(), DType::F64, Category::Activations);
        // An upload takes f32; only a fill keeps all of a number.
        for (i, &value) in values.iter().enumerate() {
            self.backend.fill(value, buffer.slice(i..i + 1));
        }
        buffer
    }

    pub fn tokens(&self, tokens: &[u32]) -> Buffer {
        let buffer = self.backend.allocate(tokens.len(), DType::U32, Category::Activations);
        self.backend.upload_tokens(tokens, buffer.view());
        buffer
    }

    pub fn values(&self, view: View) -> Vec<f64> {
        (0..view.len()).map(|i| self.backend.read_scalar(view, i)).collect()
    }

    /// A unit with these weights and a gradient that is yet to be written.
    pub fn unit<'a>(&self, layout: &'a UnitLayout, weights: &[f64]) -> UnitInLab<'a> {
        let gradient = self.buffer(&vec![f64::NAN; layout.len]);
        UnitInLab { layout, weights: self.buffer(weights), gradient, written: Cell::new(0) }
    }
}

/// A unit's weights and gradient.
pub struct UnitInLab<'a> {
    layout: &'a UnitLayout,
    weights: Buffer,
    gradient: Buffer,
    written: Cell<u32>,
}

impl UnitInLab<'_> {
    pub fn weights(&self) -> Weights<'_> {
        Weights::new(self.weights.view(), self.layout)
    }

    pub fn gradients(&self) -> Gradients<'_> {
        Gradients::new(self.gradient.view(), self.layout, &self.written)
    }

    /// The gradients of all parameters, without the padding of the buffer.
    pub fn gradient(&self) -> View<'_> {
        let end = self.layout.placed.last().map_or(0, |placed| placed.range.end);
        self.gradient.slice(0..end)
    }
}

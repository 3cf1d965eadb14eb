//! A small model on one rank, in f64. Memory is filled with NaN until it is written.

use std::rc::Rc;

use kintsugi_comm::{Communicator, Solo};
use kintsugi_model::{Context, Gradients, Shape, Weights, WrittenParameters};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::parameters::UnitLayout;
use kintsugi_plan::{Axis, Coordinate, Plan, Unit};
use kintsugi_tensor::cpu::memory::Slab;
use kintsugi_tensor::cpu::{CpuBackend, workspace_bytes};
use kintsugi_tensor::{Backend, Buffer, Category, DType, Memory, View};

/// Sizes differ where possible, the vocabulary has padding, and a sequence has two whole attention tiles and a part of
/// a third.
const CONFIG: &str = "
    model = { layers = 1, hidden = 12, heads = 4, head_dim = 8, ffn = 10, vocab = 130, vocab_multiple = 32 }
    batch = { sequence = 150, micro = 2, global = 4 }
";

/// Families that cover the features: grouped heads, both residual forms of GPT-NeoX, both forms of GELU, Llama's norms with the
/// other activation, biases of query, key and value only, norms of queries and keys, a layer without rotation, a sliding window, and the norms of OLMo 2, and Gemma 2's norms,
/// gates, scaled embeddings and soft caps.
pub const MODELS: [&[&str]; 11] = [
    &["model.family=gpt"],
    &["model.family=neox", "model.kv_heads=2"],
    &["model.family=neox", "model.parallel_residual=false", "model.activation=gelu-exact"],
    &["model.family=llama", "model.kv_heads=2"],
    &["model.family=llama", "model.activation=gelu"],
    &["model.family=qwen2", "model.kv_heads=2"],
    &["model.family=qwen3", "model.kv_heads=2"],
    &["model.family=smollm3", "model.no_rotary_every=1"],
    &["model.family=mistral", "model.kv_heads=2", "model.sliding_window=70"],
    &["model.family=gemma2", "model.kv_heads=2", "model.score_width=5", "model.score_soft_cap=1.5"],
    &["model.family=olmo2", "model.kv_heads=2"],
];

/// The plan of the small model with these settings.
pub fn plan(sets: &[&[&str]]) -> Plan {
    let plan = ConfigSource::text(CONFIG).sets(sets.concat()).plan();
    plan.unwrap_or_else(|error| panic!("{sets:?}: {error}"))
}

/// The shape of tensor-parallel part `part` of a plan, in f64.
pub fn shape(plan: &Plan, part: usize) -> Shape {
    let at = Coordinate::of_stage(0).with(Axis::Tensor, part);
    Shape { compute: DType::F64, ..Shape::new(plan, at) }
}

/// The first token that each token of the layer attends to, if the layer has a window.
pub fn window_starts(shape: &Shape) -> Option<Vec<u32>> {
    let window = shape.attention_of(Unit::Layer(0)).scores.window?;
    Some((0..shape.rows).map(|row| (row % shape.sequence + 1).saturating_sub(window) as u32).collect())
}

/// A rank's backend.
pub struct TestRank {
    backend: CpuBackend,
}

impl TestRank {
    pub fn new() -> Self {
        const BUFFERS: u64 = 8 << 20;
        let memory: Rc<dyn Memory> = Rc::new(Slab::new(workspace_bytes(1) + BUFFERS).unwrap());
        let backend = CpuBackend::new(Rc::clone(&memory), 1);
        let all = backend.allocate(BUFFERS as usize / 8, DType::F64, Category::Activations);
        backend.fill(f64::NAN, all.view());
        TestRank { backend }
    }

    pub fn context<'a>(&'a self, tensor: &'a dyn Communicator, shape: &'a Shape) -> Context<'a> {
        Context { backend: &self.backend, tensor, context: &Solo, shape, starts: None }
    }

    pub fn buffer(&self, values: &[f64]) -> Buffer {
        let buffer = self.backend.allocate(values.len(), DType::F64, Category::Activations);
        // Uploads round to f32; a fill does not.
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

    /// A unit with these weights and an unwritten gradient.
    pub fn unit<'a>(&self, layout: &'a UnitLayout, weights: &[f64]) -> UnitBuffers<'a> {
        let gradient = self.buffer(&vec![f64::NAN; layout.len]);
        UnitBuffers {
            layout,
            weights: self.buffer(weights),
            gradient,
            written: WrittenParameters::new(layout),
        }
    }
}

/// A unit's weights and gradient.
pub struct UnitBuffers<'a> {
    layout: &'a UnitLayout,
    weights: Buffer,
    gradient: Buffer,
    written: WrittenParameters,
}

impl UnitBuffers<'_> {
    pub fn weights(&self) -> Weights<'_> {
        Weights::new(self.weights.view(), self.layout)
    }

    pub fn gradients(&self) -> Gradients<'_> {
        Gradients::new(Some(self.gradient.view()), self.layout, &self.written)
    }

    /// The gradients of a unit that is frozen.
    pub fn no_gradients(&self) -> Gradients<'_> {
        Gradients::new(None, self.layout, &self.written)
    }

    /// The gradients of all parameters, without the buffer's padding.
    pub fn gradient(&self) -> View<'_> {
        let end = self.layout.placed.last().map_or(0, |placed| placed.range.end);
        self.gradient.slice(0..end)
    }
}

//! The shapes to measure: the products and the attention of models that people train on one device.

use kintsugi_spec::ModelSpec;
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::AttentionShape;

use super::kernels;

/// Which of a layer's three products, for a layer of `inputs` and `outputs` over `rows` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Tokens.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
    /// Which product.
    pub pass: Pass,
}

/// The three products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Of the forward.
    Forward,
    /// The gradient of its input.
    Input,
    /// The gradient of its weight.
    Weight,
}

/// The size of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Tokens.
    pub rows: usize,
    /// Features.
    pub width: usize,
}

/// All that is measured.
#[derive(Clone, Debug)]
pub struct Shapes {
    /// Type of the numbers.
    pub dtype: DType,
    /// The product that warms the device up.
    pub warm: ProductShape,
    /// Products.
    pub products: Vec<ProductShape>,
    /// Attentions.
    pub attention: Vec<AttentionShape>,
    /// At which size other kernels are measured, and what is fused behind products; `None` measures neither.
    pub kernels: Option<Rows>,
    /// Numbers that are copied to see how fast bytes move: far more than any cache holds.
    pub copied: usize,
}

impl Shapes {
    /// The products and attentions of these models, with `rows` tokens at a time each, whole and cut into `parts`.
    pub fn of(
        models: &[ModelSpec],
        parts: &[usize],
        rows: &[usize],
        sequences: &[usize],
        dtype: DType,
    ) -> Self {
        let mut shapes = Shapes {
            dtype,
            warm: ProductShape { rows: rows[0], inputs: 1024, outputs: 1024, pass: Pass::Forward },
            products: Vec::new(),
            attention: Vec::new(),
            kernels: None,
            copied: 1 << 26,
        };
        for model in models {
            let warm =
                ProductShape { rows: rows[0], inputs: model.ffn, outputs: model.ffn, pass: Pass::Forward };
            shapes.warm = if warm.inputs > shapes.warm.inputs { warm } else { shapes.warm };
            for &rows in rows {
                for &parts in parts.iter().filter(|&&parts| model.heads % parts == 0) {
                    shapes.add_products(model, rows, parts);
                }
            }
            for &sequence in sequences {
                shapes.add_attention(model, sequence);
            }
        }
        shapes
    }

    /// Measurements in all: every product, and both passes of every attention, in a burst and sustained, and
    /// the two that move bytes.
    pub fn count(&self) -> usize {
        let kernels = if self.kernels.is_some() { kernels::COUNT } else { 0 };
        2 * (self.products.len() + 2 * self.attention.len()) + 2 + kernels
    }

    fn add_products(&mut self, model: &ModelSpec, rows: usize, parts: usize) {
        let ModelSpec { hidden, heads, kv_heads, head_dim, ffn, .. } = *model;
        let layers = [
            (hidden, (heads + 2 * kv_heads) * head_dim / parts),
            (heads * head_dim / parts, hidden),
            (hidden, ffn / parts),
            (ffn / parts, hidden),
            (hidden, model.padded_vocab(parts) / parts),
        ];
        for (inputs, outputs) in layers {
            for pass in [Pass::Forward, Pass::Input, Pass::Weight] {
                let shape = ProductShape { rows, inputs, outputs, pass };
                if !self.products.contains(&shape) {
                    self.products.push(shape);
                }
            }
        }
    }

    /// About sixteen thousand tokens, as many samples as that is.
    fn add_attention(&mut self, model: &ModelSpec, sequence: usize) {
        let ModelSpec { heads, kv_heads, head_dim, .. } = *model;
        let batch = (16_384 / sequence).max(1);
        let shape = AttentionShape { batch, sequence, heads, kv_heads, head_dim };
        let known = |other: &AttentionShape| (other.head_dim, other.sequence) == (head_dim, sequence);
        if !self.attention.iter().any(known) {
            self.attention.push(shape);
        }
    }
}

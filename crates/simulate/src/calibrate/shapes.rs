//! What is measured: the products and the attention of the models that people train on one device.

use kintsugi_spec::ModelSpec;
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::AttentionShape;

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
    /// Numbers that are copied to see how fast bytes move: far more than any cache holds.
    pub copied: usize,
}

impl Shapes {
    /// The products and attentions of these models, with `rows` tokens at a time each.
    pub fn of(models: &[ModelSpec], rows: &[usize], sequences: &[usize], dtype: DType) -> Self {
        let mut shapes = Shapes {
            dtype,
            warm: ProductShape { rows: rows[0], inputs: 1024, outputs: 1024, pass: Pass::Forward },
            products: Vec::new(),
            attention: Vec::new(),
            copied: 1 << 26,
        };
        for model in models {
            let warm =
                ProductShape { rows: rows[0], inputs: model.ffn, outputs: model.ffn, pass: Pass::Forward };
            shapes.warm = if warm.inputs > shapes.warm.inputs { warm } else { shapes.warm };
            for &rows in rows {
                shapes.add_products(model, rows);
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
        2 * (self.products.len() + 2 * self.attention.len()) + 2
    }

    fn add_products(&mut self, model: &ModelSpec, rows: usize) {
        let ModelSpec { hidden, heads, kv_heads, head_dim, ffn, .. } = *model;
        let layers = [
            (hidden, (heads + 2 * kv_heads) * head_dim),
            (heads * head_dim, hidden),
            (hidden, ffn),
            (ffn, hidden),
            (hidden, model.padded_vocab(1)),
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

//! The shapes to measure: the products and the attention of models that fit on one device.

use kintsugi_spec::ModelSpec;
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{AttentionShape, Scores};

use super::kernels;
use super::products::ProductTypes;

/// One of the three products of a layer with `inputs` and `outputs` features over `rows` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Tokens.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
    /// Which product.
    pub pass: LinearProduct,
    /// Layers of the model that run this product, each with its own weights.
    pub layers: usize,
}

/// The three products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearProduct {
    /// The forward.
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

/// Everything that is measured.
#[derive(Clone, Debug)]
pub struct Shapes {
    /// Types of the numbers. Everything is measured in each of them.
    pub dtypes: Vec<DType>,
    /// Whether weight gradients are in that type, too, instead of in its accumulator type.
    pub narrow_gradients: bool,
    /// The product that warms the device up.
    pub warm: ProductShape,
    /// The products.
    pub products: Vec<ProductShape>,
    /// The attention shapes.
    pub attention: Vec<AttentionShape>,
    /// The size at which other kernels and epilogues are measured; `None` to measure neither.
    pub kernels: Option<Rows>,
    /// The length of a copy to measure the memory bandwidth: far larger than any cache.
    pub copied: usize,
}

impl Shapes {
    /// The products and attention shapes of these models, with `rows` tokens each, whole and split into `parts`, in each type.
    pub fn of(
        models: &[ModelSpec],
        parts: &[usize],
        rows: &[usize],
        sequences: &[usize],
        dtypes: &[DType],
    ) -> Self {
        let mut shapes = Shapes {
            dtypes: dtypes.to_vec(),
            narrow_gradients: false,
            warm: ProductShape {
                rows: rows[0],
                inputs: 1024,
                outputs: 1024,
                pass: LinearProduct::Forward,
                layers: 1,
            },
            products: Vec::new(),
            attention: Vec::new(),
            kernels: None,
            copied: 1 << 26,
        };
        for model in models {
            let warm = ProductShape { inputs: model.ffn, outputs: model.ffn, ..shapes.warm };
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

    /// The types of a product whose factors have this type.
    pub(super) fn product_types(&self, factors: DType) -> ProductTypes {
        ProductTypes {
            factors,
            gradient: if self.narrow_gradients { factors } else { factors.accumulator() },
        }
    }

    /// Number of measurements: each product and each attention pass twice (burst and sustained), memory bandwidth, launch
    /// time, and the other kernels if they are measured.
    pub fn count(&self) -> usize {
        let types = self.dtypes.len();
        let kernels = if self.kernels.is_some() { kernels::count(&self.dtypes) } else { 0 };
        2 * types * (self.products.len() + 2 * self.attention.len()) + 2 + kernels
    }

    fn add_products(&mut self, model: &ModelSpec, rows: usize, parts: usize) {
        let ModelSpec { layers, hidden, heads, kv_heads, head_dim, ffn, .. } = *model;
        let products = [
            (layers, hidden, (heads + 2 * kv_heads) * head_dim / parts),
            (layers, heads * head_dim / parts, hidden),
            (layers, hidden, ffn / parts),
            (layers, ffn / parts, hidden),
            (1, hidden, model.padded_vocab(parts) / parts),
        ];
        for (layers, inputs, outputs) in products {
            for pass in [LinearProduct::Forward, LinearProduct::Input, LinearProduct::Weight] {
                let shape = ProductShape { rows, inputs, outputs, pass, layers };
                let known = |other: &ProductShape| ProductShape { layers, ..*other } == shape;
                if !self.products.iter().any(known) {
                    self.products.push(shape);
                }
            }
        }
    }

    /// As many samples as make about sixteen thousand tokens.
    fn add_attention(&mut self, model: &ModelSpec, sequence: usize) {
        let ModelSpec { heads, kv_heads, head_dim, .. } = *model;
        let batch = (16_384 / sequence).max(1);
        let shape = AttentionShape { batch, sequence, heads, kv_heads, head_dim, scores: Scores::PLAIN };
        let known = |other: &AttentionShape| (other.head_dim, other.sequence) == (head_dim, sequence);
        if !self.attention.iter().any(known) {
            self.attention.push(shape);
        }
    }
}

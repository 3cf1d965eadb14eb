//! Kintsugi's portable kernels, compiled for gfx90a and executed by the interpreter, beside the CPU backend.
//!
//! Without AMD's compiler the tests say so and pass.

mod activation;
mod attention;
mod attention_tensors;
mod columns;
mod compilers;
mod elementwise;
mod embedding;
mod faults;
mod loss;
mod matrix;
mod mfma_attention;
mod mfma_slices;
mod norm;
mod optimizer;
mod quantize;
mod rotary;
mod slice_tensors;
mod support;
mod wide_access;

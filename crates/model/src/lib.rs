//! The transformer: the forward and backward of every block, for any backend and tensor-parallel group.
//!
//! A block does not depend on pipelines, sharding or schedules. It takes its whole weights, saves the activations for its
//! backward in a struct, and runs its own tensor-parallel collectives (Megatron's `f` and `g`, arXiv 1909.08053, or their
//! sequence-parallel forms, arXiv 2205.05198) and context-parallel ones.
#![forbid(unsafe_code)]

mod attention;
mod context;
mod context_attention;
mod float8;
mod kv_cache;
mod mlp;
mod query_key_norm;
mod residual;
mod rows;
mod shape;
mod weights;

pub mod embedding;
pub mod head;
pub mod layer;

pub use context::Context;
pub use kv_cache::KvCache;
pub use shape::{Shape, compute_type};
pub use weights::{Gradients, Weights, WrittenParameters};

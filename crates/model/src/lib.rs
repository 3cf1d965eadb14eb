//! The transformer, written once: every block's forward and backward side by side, against a backend and a group.
//!
//! A block knows nothing of pipelines, sharding or schedules. It is given its weights whole, says what it keeps for
//! its backward in a named struct, and runs its own tensor-parallel collectives (Megatron's `f` and `g`, arXiv
//! 1909.08053, or their sequence-parallel forms, arXiv 2205.05198).
#![forbid(unsafe_code)]

mod attention;
mod cache;
mod context;
mod mlp;
mod shape;
mod stream;
mod weights;

pub mod embedding;
pub mod head;
pub mod layer;

pub use cache::Cache;
pub use context::Context;
pub use shape::{Shape, compute_type};
pub use weights::{Gradients, Weights};

//! One suite of operations for every device: each runs on the same numbers on a device and on the CPU, and the results must agree.
//!
//! A file has the operations of one topic. Tests run them on shapes that are known to be special; [`suite`] draws shapes at
//! random, for `kintsugi doctor --self-test`.
#![forbid(unsafe_code)]

pub mod attention;
pub mod cached_attention;
mod comparison;
mod draw;
pub mod elementwise;
pub mod loss;
pub mod norm;
pub mod products;
pub mod quantize;
pub mod step;
mod suite;
pub mod tables;
mod test_backend;

pub use comparison::{Comparison, compare, distance, tolerance};
pub use suite::{Case, suite};
pub use test_backend::{COMPUTE, TestBackend, gradient, gradient_types, random};

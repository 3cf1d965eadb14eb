//! Checks that every layout trains the same model: compares losses, gradients and weights with those of one rank.
//!
//! Adam hides a constant factor in the gradient, so losses alone prove little. `verify` compares the whole gradient of every
//! parameter at the first step, before clipping, and the gradient norm at every step. Copies of a parameter on several ranks
//! must be bit-identical.

mod compare;
mod fault;
mod faulty_world;
mod layouts;
mod noise;
mod record;
mod weight_bounds;

pub use compare::{Bounds, Difference, ParameterBound, WeightBound, compare, worse};
pub use fault::Fault;
pub use layouts::{Layout, layouts, nccl_layouts};
pub use record::{Recording, Reference, record, record_reference};

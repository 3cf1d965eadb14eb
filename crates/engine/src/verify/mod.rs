//! Shows that every layout trains the same model: losses, gradients and weights against one rank.
//!
//! Adam hides a constant factor in the gradient, so losses alone prove little: the whole gradient of every parameter
//! is compared at the first step, before clipping, and the norm at every step. What several ranks hold alike must be the
//! same bits on all of them.

mod compare;
mod fault;
mod layouts;
mod record;

pub use compare::{Bounds, Difference, WeightBound, compare, worse};
pub use fault::Fault;
pub use layouts::{Layout, layouts};
pub use record::{Recording, record};

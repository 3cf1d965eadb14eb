//! Kintsugi's portable kernels, compiled for gfx90a and executed by the interpreter, beside the CPU backend.
//!
//! Without AMD's compiler the tests say so and pass.

mod elementwise;
mod loss;
mod norm;
mod support;

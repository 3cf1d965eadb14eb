//! Every operation of the CUDA backend against the CPU backend, on the same numbers.
//!
//! The tests need a GPU. Without one they say so and pass.

mod amd_machines;
mod attention;
mod attention_rates;
mod cached_attention;
mod elementwise;
mod float8;
mod launches;
mod loss;
mod memory;
mod norm;
mod products;
mod quantize;
mod replay;
mod side_stream;
mod step;
mod tables;
mod test_backend;

//! Every operation of the CUDA backend against the CPU's, on the same numbers.
//!
//! The tests need a card. Where there is none they say so and pass.

mod attention;
mod attention_rates;
mod cached_attention;
mod elementwise;
mod lab;
mod launches;
mod loss;
mod memory;
mod norm;
mod products;
mod quantize;
mod replay;
mod step;
mod tables;

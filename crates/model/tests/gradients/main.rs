//! The written-out backward passes against finite differences, against each other, and over two ranks against one.
//!
//! Everything is in f64 and goes through the crate's public functions, as a rank calls them.

mod ends;
mod lab;
mod layer;
mod numbers;
mod tensor_parallel;

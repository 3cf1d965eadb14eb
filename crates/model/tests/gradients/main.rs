//! The hand-written backward passes against finite differences, against each other, and two ranks against one.
//!
//! Everything is in f64 and uses the crate's public functions, as a rank does.

mod ends;
mod layer;
mod numbers;
mod tensor_parallel;
mod test_rank;

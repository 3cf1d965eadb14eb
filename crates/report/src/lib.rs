//! What people look at: TensorBoard's event files.
#![forbid(unsafe_code)]

pub mod tensorboard;

//! The built binary, as a person or a script meets it.

mod help;
mod mistakes;
mod plan;
mod support;
mod train;
mod verify;

//! The built binary, as a person or a script meets it.

mod help;
mod mistakes;
mod plan;
mod prepare;
mod support;
mod train;
mod verify;

//! The built binary, as a person or a script meets it.

mod convert;
mod faults;
mod formats;
mod generate;
mod help;
mod mistakes;
mod plan;
mod prepare;
mod resume;
mod search;
mod support;
mod tokenizers;
mod train;
mod verify;

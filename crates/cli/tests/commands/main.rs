//! The built binary, as a person or a script meets it.

mod convert;
mod documents;
mod evaluation;
mod faults;
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
mod weights;

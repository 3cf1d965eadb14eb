//! The built binary, as a person or a script meets it.

mod convert;
mod data_errors;
mod documents;
mod evaluation;
mod faults;
mod foreign;
mod foreign_tokenizers;
mod formats;
mod generate;
mod help;
mod limits;
mod mistakes;
mod notes;
mod nothing_lost;
mod plan;
mod prepare;
mod resume;
mod search;
mod signals;
mod streams;
mod support;
mod thread_limits;
mod tokenizers;
mod train;
mod verify;
mod weights;

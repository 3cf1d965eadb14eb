//! The built binary, as a person or a script meets it.

mod convert;
mod faults;
mod foreign;
mod generate;
mod help;
mod limits;
mod mistakes;
mod notes;
mod plan;
mod prepare;
mod resume;
mod search;
mod streams;
mod support;
mod train;
mod verify;

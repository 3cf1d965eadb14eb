//! Copies of states in the memory of nodes (`run.replicate_every`): their files, and which of them a restarted run begins with.
//!
//! A rank writes its own states and those of the same rank of the previous node into files of a file system in memory. It has two sets of
//! these files and writes them in turns. A set counts when every rank has all of it, which is known when the next step has ended, so the
//! other set is not written before.
//!
//! A record beside each file says what it has. It is removed before the file is written, and comes back at the end.

mod files;
mod set;
mod writer;

pub use files::{CopyFolder, CopyRecord};
pub use set::{CopyPass, CopySet};
pub use writer::CopyWriter;

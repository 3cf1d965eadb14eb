//! Checkpoints: every rank writes its own shards, a manifest says which slice of which parameter lies where, and any
//! layout reads them back.
//!
//! A checkpoint is whole or absent: it is written under another name, synced, and renamed. What can break afterwards
//! is found by checksums before a single number is used.
#![forbid(unsafe_code)]

mod aside;
mod checkpoint;
mod error;
mod files;
mod folder;
mod header;
mod lock;
mod manifest;
mod paths;
mod prune;
mod record;
mod resume;
mod save;
mod seeded;
mod shard;
mod slice;
#[cfg(test)]
mod tests;
mod tokenizer;
mod unfinished;
mod weights;
mod write;

pub mod convert;
pub mod huggingface;

pub use checkpoint::Checkpoint;
pub use error::CheckpointError;
pub use folder::{Folder, find};
pub use lock::RunLock;
pub use manifest::{Manifest, Progress};
pub use paths::with_absolute_paths;
pub use save::{SaveFailure, Saved, Saver, Writer, WriterEnded, saver};
pub use shard::snapshot_bytes;
pub use weights::WeightsFolder;
pub use write::write;

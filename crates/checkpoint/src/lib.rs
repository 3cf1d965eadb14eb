//! Checkpoints: every rank writes its own shard, a manifest records where each slice of each parameter is, and any layout can
//! read them.
//!
//! A checkpoint is complete or absent: it is written under a temporary name, synced, and renamed. Checksums detect later
//! corruption before any value is used.
#![forbid(unsafe_code)]

mod aside;
mod checkpoint;
mod checks;
mod copies;
mod error;
mod files;
mod find;
mod folder;
mod header;
mod lock;
mod manifest;
mod paths;
mod record;
mod resume;
mod save;
mod shard;
mod shard_record;
mod slice;
mod spike_record;
mod temporary_folder;
#[cfg(test)]
mod tests;
mod tokenizer;
mod weights;
mod write;

pub mod convert;
pub mod huggingface;

pub use aside::Continued;
pub use checkpoint::{Checkpoint, SlicePlace, TensorPlace};
pub use copies::{CopyFolder, CopyPass, CopyRecord, CopySet, CopyWriter};
pub use error::CheckpointError;
pub use find::{device_of_run, find};
pub use folder::CheckpointFolder;
pub use lock::RunLock;
pub use manifest::{FileRecord, Manifest, RunProgress};
pub use paths::with_absolute_paths;
pub use save::{CheckpointInfo, CheckpointSaver, CheckpointWriter, SaveFailure, WriterEnded, saver};
pub use shard::snapshot_bytes;
pub use shard_record::{SHARED_FOLDER_DELAY, ShardRecords};
pub use slice::Slice;
pub use spike_record::{SkippedSamples, SpikeRecord};
pub use weights::WeightsFolder;
pub use write::write;

//! Writes a checkpoint from any store for any layout, without running ranks: conversion and resharding.

use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use kintsugi_plan::Plan;
use kintsugi_rank::{Elements, Store, StoreError, StoredTensor};
use safetensors::tensor::Dtype;

use crate::files::SyncedFile;
use crate::manifest::{FileRecord, MANIFEST};
use crate::shard::{Shard, ShardTensor};
use crate::temporary_folder::TemporaryFolder;
use crate::{CheckpointError, Manifest, RunProgress, tokenizer};

/// Elements in memory at a time.
const CHUNK: usize = 1 << 18;

/// Writes the parameters of `store` as the checkpoint `path`, sharded for the ranks of `plan`, with a copy of the tokenizer in
/// the folder `tokenizer`. The checkpoint is complete or absent, and existing files are never overwritten.
pub fn write(
    path: &Path,
    plan: &Plan,
    store: &dyn Store,
    stored: &[StoredTensor],
    progress: &RunProgress,
    tokenizer: Option<&Path>,
) -> Result<(), CheckpointError> {
    let io = |error: std::io::Error| CheckpointError::new(path, error);
    let unfinished = TemporaryFolder::begin(path)?;
    let folder = unfinished.path();
    let shards: Vec<Shard> = (0..plan.mesh.ranks()).map(|rank| Shard::new(plan, rank, stored)).collect();
    let mut records = Vec::new();
    for shard in &shards {
        let mut file = SyncedFile::create(&folder.join(&shard.name)).map_err(io)?;
        file.write(&shard.header).map_err(io)?;
        for tensor in &shard.tensors {
            let read = |error: StoreError| CheckpointError::new(path, error);
            for start in (0..tensor.slice.len).step_by(CHUNK) {
                let chunk = start..(start + CHUNK).min(tensor.slice.len);
                file.write(&encode(&read_chunk(store, tensor, chunk).map_err(read)?, tensor.dtype))
                    .map_err(io)?;
            }
        }
        let (bytes, checksum) = file.finish().map_err(io)?;
        records.push(FileRecord { name: shard.name.clone(), bytes, checksum });
    }
    let mut file = SyncedFile::create(&folder.join(MANIFEST)).map_err(io)?;
    file.write(&Manifest::new(plan, &shards, records, stored, progress).encode()).map_err(io)?;
    file.finish().map_err(io)?;
    tokenizer.map_or(Ok(()), |from| tokenizer::copy(from, folder))?;
    unfinished.publish()
}

fn read_chunk(store: &dyn Store, tensor: &ShardTensor, chunk: Range<usize>) -> Result<Vec<f32>, StoreError> {
    let mut values = vec![0.0; chunk.len()];
    let first = chunk.start;
    let (parameter, stored) = (&tensor.parameter, tensor.slice.stored);
    for (start, run) in tensor.slice.runs(parameter.shape[1], chunk) {
        let to = &mut values[run.start - first..run.end - first];
        store.read(Elements { parameter, stored, start }, to)?;
    }
    Ok(values)
}

/// Numbers in the encoding of the file.
pub(crate) fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

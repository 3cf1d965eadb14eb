//! A checkpoint made from any store, at any layout, with no rank running: conversion and resharding.

use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use kintsugi_plan::Plan;
use kintsugi_rank::{Elements, Kept, Store, StoreError};
use safetensors::tensor::Dtype;

use crate::files::Durable;
use crate::manifest::{FileRecord, MANIFEST};
use crate::shard::{Piece, Shard};
use crate::unfinished::Unfinished;
use crate::{CheckpointError, Manifest, Progress, tokenizer, with_absolute_paths};

/// Elements that are in memory at a time.
const CHUNK: usize = 1 << 18;

/// Writes what `store` has as the checkpoint `path`, cut for the ranks of `plan`, with a copy of the tokenizer that a
/// folder has. It is whole or absent, and what is there already stays.
pub fn write(
    path: &Path,
    plan: &Plan,
    store: &dyn Store,
    kept: &[Kept],
    progress: &Progress,
    tokenizer: Option<&Path>,
) -> Result<(), CheckpointError> {
    let io = |error: std::io::Error| CheckpointError::new(path, error);
    let unfinished = Unfinished::begin(path)?;
    let folder = unfinished.path();
    let shards: Vec<Shard> = (0..plan.mesh.ranks()).map(|rank| Shard::new(plan, rank, kept)).collect();
    let mut records = Vec::new();
    for shard in &shards {
        let mut file = Durable::create(&folder.join(&shard.name)).map_err(io)?;
        file.write(&shard.header).map_err(io)?;
        for piece in &shard.pieces {
            let read = |error: StoreError| CheckpointError::new(path, error);
            for start in (0..piece.slice.len).step_by(CHUNK) {
                let chunk = start..(start + CHUNK).min(piece.slice.len);
                file.write(&encode(&read_chunk(store, piece, chunk).map_err(read)?, piece.dtype))
                    .map_err(io)?;
            }
        }
        let (bytes, checksum) = file.finish().map_err(io)?;
        records.push(FileRecord { name: shard.name.clone(), bytes, checksum });
    }
    let mut file = Durable::create(&folder.join(MANIFEST)).map_err(io)?;
    file.write(&manifest(plan, &shards, records, kept, progress).encode()).map_err(io)?;
    file.finish().map_err(io)?;
    tokenizer.map_or(Ok(()), |from| tokenizer::copy(from, folder))?;
    unfinished.publish()
}

/// The manifest of shards that have been written.
pub(crate) fn manifest(
    plan: &Plan,
    shards: &[Shard],
    files: Vec<FileRecord>,
    kept: &[Kept],
    progress: &Progress,
) -> Manifest {
    let slices = shards.iter().flat_map(|shard| &shard.pieces).map(|piece| piece.slice.clone());
    let plan = with_absolute_paths(plan);
    Manifest {
        progress: progress.clone(),
        config: plan.to_toml(),
        plan,
        kept: kept.to_vec(),
        files,
        slices: slices.collect(),
    }
}

fn read_chunk(store: &dyn Store, piece: &Piece, chunk: Range<usize>) -> Result<Vec<f32>, StoreError> {
    let mut values = vec![0.0; chunk.len()];
    let first = chunk.start;
    let (parameter, kept) = (&piece.parameter, piece.slice.kept);
    for (start, run) in piece.slice.runs(parameter.shape[1], chunk) {
        let to = &mut values[run.start - first..run.end - first];
        store.read(Elements { parameter, kept, start }, to)?;
    }
    Ok(values)
}

/// Numbers as a file has them.
pub(crate) fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

//! Writes a Hugging Face folder from any store. The transformers library can load it.
//!
//! Tensors are written one after the other, in pieces of bounded size. Only GPT-2's matrices, which are stored by columns,
//! are in memory as a whole, one at a time.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use kintsugi_plan::Compute;
use kintsugi_plan::parameters::Parameter;
use kintsugi_rank::{Elements, Store, StoredTensor};
use kintsugi_spec::ModelSpec;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value, json};

use super::describe::describe;
use super::families;
use super::folder::CONFIG;
use super::names::{TensorLocation, TensorPart, all_parameters, location};
use super::tensors::{INDEX, SINGLE};
use crate::files::{SyncedFile, write_json};
use crate::temporary_folder::TemporaryFolder;
use crate::write::encode;
use crate::{CheckpointError, header, tokenizer};

/// How a folder is written.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The type of the weights.
    pub dtype: Compute,
    /// The largest size of a file of weights.
    pub file_bytes: u64,
    /// A folder whose tokenizer is copied.
    pub like: Option<PathBuf>,
    /// The token that ends a text, if it is known.
    pub end_of_document: Option<u32>,
    /// Whether numbers outside the range of the type may be written as infinity.
    pub non_finite: bool,
}

impl ExportOptions {
    /// The default file size of the transformers library.
    pub const FILE_BYTES: u64 = 5_000_000_000;
}

/// Elements in memory at a time.
const CHUNK: usize = 1 << 18;

/// Writes the weights of `store` as the folder `path`. The folder is complete or absent, and existing files are never
/// overwritten.
pub fn export(
    path: &Path,
    model: &ModelSpec,
    store: &dyn Store,
    options: &ExportOptions,
) -> Result<(), CheckpointError> {
    let mut description =
        describe(model, options.dtype).map_err(|error| CheckpointError::new(path, error))?;
    let unfinished = TemporaryFolder::begin(path)?;
    let folder = unfinished.path();
    if let Some(like) = &options.like {
        tokenizer::copy(like, folder)?;
        description.extend(tokenizer::special_tokens(like));
    }
    if let Some(end) = options.end_of_document {
        tokenizer::set_end(folder, &mut description, end)?;
    }
    write_json(&folder.join(CONFIG), &Value::Object(description))?;
    write_weights(folder, model, store, options)?;
    unfinished.publish()
}

/// A tensor of the folder, and the parameters in it.
struct ExportedTensor {
    name: String,
    shape: Vec<usize>,
    parts: Vec<(Parameter, TensorLocation)>,
}

impl ExportedTensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

fn exported(model: &ModelSpec) -> Vec<ExportedTensor> {
    let model = &ModelSpec { vocab_multiple: 1, ..model.clone() };
    let mut exported: Vec<ExportedTensor> = Vec::new();
    for parameter in all_parameters(model) {
        let location = location(model, families::of(model.family).base, parameter.unit, parameter.kind);
        match exported.last_mut() {
            Some(last) if last.name == location.name => last.parts.push((parameter, location)),
            _ => {
                let shape = location.tensor_shape(&parameter);
                exported.push(ExportedTensor {
                    name: location.name.clone(),
                    shape,
                    parts: vec![(parameter, location)],
                });
            }
        }
    }
    exported
}

fn write_weights(
    folder: &Path,
    model: &ModelSpec,
    store: &dyn Store,
    options: &ExportOptions,
) -> Result<(), CheckpointError> {
    let dtype = match options.dtype {
        Compute::Fp32 => Dtype::F32,
        Compute::Bf16 => Dtype::BF16,
        Compute::Fp16 => Dtype::F16,
    };
    let width = dtype.bitsize() as u64 / 8;
    let files = cut(exported(model), options.file_bytes / width);
    let (mut weight_map, mut total) = (Map::new(), 0);
    for (i, exported) in files.iter().enumerate() {
        let name = match files.len() {
            1 => SINGLE.to_owned(),
            many => format!("model-{:05}-of-{many:05}.safetensors", i + 1),
        };
        write_file(&folder.join(&name), exported, store, dtype, options.non_finite)?;
        for exported in exported {
            total += exported.elements() as u64 * width;
            weight_map.insert(exported.name.clone(), name.clone().into());
        }
    }
    if files.len() > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_json(&folder.join(INDEX), &index)?;
    }
    Ok(())
}

/// Distributes tensors over files of up to `elements` elements. A tensor is never divided.
fn cut(exported: Vec<ExportedTensor>, elements: u64) -> Vec<Vec<ExportedTensor>> {
    let mut files: Vec<Vec<ExportedTensor>> = vec![Vec::new()];
    let mut filled = 0;
    for exported in exported {
        let more = exported.elements() as u64;
        if filled > 0 && filled + more > elements {
            files.push(Vec::new());
            filled = 0;
        }
        filled += more;
        files.last_mut().expect("there is a first file").push(exported);
    }
    files
}

fn write_file(
    path: &Path,
    exported: &[ExportedTensor],
    store: &dyn Store,
    dtype: Dtype,
    non_finite: bool,
) -> Result<(), CheckpointError> {
    let mut end = 0;
    let infos = exported.iter().map(|exported| {
        let start = end;
        end += exported.elements() * dtype.bitsize() / 8;
        (
            exported.name.clone(),
            TensorInfo { dtype, shape: exported.shape.clone(), data_offsets: (start, end) },
        )
    });
    // The transformers library rejects a file without a `format` field.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let header = header::encode(Some(format), infos.collect());
    let io = |error: std::io::Error| CheckpointError::new(path, error);
    let mut file = SyncedFile::create(path).map_err(io)?;
    file.write(&header).map_err(io)?;
    for exported in exported {
        write_tensor(exported, store, &mut |values| {
            if !non_finite && let Some(value) = beyond(values, dtype) {
                let problem = format!("the value {value:e} is infinite in {dtype}");
                return Err(CheckpointError::new(Path::new(&exported.name), problem));
            }
            file.write(&encode(values, dtype)).map_err(io)
        })?;
    }
    file.finish().map(|_| ()).map_err(io)
}

/// The first number outside the range of the type.
fn beyond(values: &[f32], dtype: Dtype) -> Option<f32> {
    let fits = |value: f32| match dtype {
        Dtype::BF16 => bf16::from_f32(value).is_finite(),
        Dtype::F16 => f16::from_f32(value).is_finite(),
        _ => true,
    };
    values.iter().copied().find(|&value| !fits(value))
}

/// Passes the numbers of a tensor to `write`, in the order of the file.
fn write_tensor(
    exported: &ExportedTensor,
    store: &dyn Store,
    write: &mut dyn FnMut(&[f32]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut values = Vec::new();
    let read = |parameter: &Parameter, start: usize, len: usize, values: &mut Vec<f32>| {
        let before = values.len();
        values.resize(before + len, 0.0);
        store
            .read(Elements { parameter, stored: StoredTensor::Weights, start }, &mut values[before..])
            .map_err(|error| CheckpointError::new(Path::new(&exported.name), error))
    };
    let (first, location) = &exported.parts[0];
    if location.transposed {
        for (parameter, _) in &exported.parts {
            read(parameter, 0, parameter.valid_elements(), &mut values)?;
        }
        return write_transposed(&values, first.shape[1], write);
    }
    if let TensorPart::ThirdOfHeads { head_dim, .. } = location.part {
        let head = head_dim * first.shape[1];
        for start in (0..first.valid_elements()).step_by(head) {
            values.clear();
            for (parameter, _) in &exported.parts {
                read(parameter, start, head, &mut values)?;
            }
            write(&values)?;
        }
        return Ok(());
    }
    for (parameter, location) in &exported.parts {
        let len = parameter.valid_elements();
        for start in (0..len).step_by(CHUNK) {
            values.clear();
            read(parameter, start, CHUNK.min(len - start), &mut values)?;
            if location.offset != 0.0 {
                for value in &mut values {
                    *value -= location.offset;
                }
            }
            write(&values)?;
        }
    }
    Ok(())
}

/// Passes a matrix of `columns` columns to `write`, column by column.
fn write_transposed(
    values: &[f32],
    columns: usize,
    write: &mut dyn FnMut(&[f32]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    // Several columns at a time, to use every number of a cache line.
    const SOME: usize = 16;
    let rows = values.len() / columns;
    let mut transposed = vec![0.0; SOME.min(columns) * rows];
    for first in (0..columns).step_by(SOME) {
        let some = SOME.min(columns - first);
        for (row, values) in values.chunks_exact(columns).enumerate() {
            for (i, &value) in values[first..first + some].iter().enumerate() {
                transposed[i * rows + row] = value;
            }
        }
        write(&transposed[..some * rows])?;
    }
    Ok(())
}

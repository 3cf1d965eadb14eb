//! A Hugging Face folder made from any store: what transformers loads as it is.
//!
//! Tensors are written one after the other, a bounded piece at a time; only GPT-2's matrices, which lie by columns there,
//! are in memory whole, one at a time.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use kintsugi_plan::Compute;
use kintsugi_plan::parameters::Parameter;
use kintsugi_rank::{Elements, Kept, Store};
use kintsugi_spec::ModelSpec;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value, json};

use super::describe::describe;
use super::folder::CONFIG;
use super::names::{Part, Place, all_parameters, base, place};
use super::tensors::{INDEX, SINGLE};
use crate::files::{Durable, write_json};
use crate::unfinished::Unfinished;
use crate::write::encode;
use crate::{CheckpointError, header, tokenizer};

/// How a folder is written.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The type of the weights.
    pub dtype: Compute,
    /// The size above which weights go into several files.
    pub file_bytes: u64,
    /// A folder whose tokenizer is copied along.
    pub like: Option<PathBuf>,
    /// The token that ends a text, where it is known.
    pub end_of_document: Option<u32>,
    /// Whether numbers may be written that the type cannot hold, which become infinite.
    pub non_finite: bool,
}

impl ExportOptions {
    /// The size of files that transformers cuts a model into.
    pub const FILE_BYTES: u64 = 5_000_000_000;
}

/// Elements that are in memory at a time.
const CHUNK: usize = 1 << 18;

/// Writes the weights of `store` as the folder `path`. It is whole or absent, and what is there already stays.
pub fn export(
    path: &Path,
    model: &ModelSpec,
    store: &dyn Store,
    options: &ExportOptions,
) -> Result<(), CheckpointError> {
    let mut description = describe(model, options.dtype)
        .map_err(|reason| CheckpointError::new(path, format!("Hugging Face has no such model: {reason}")))?;
    let unfinished = Unfinished::begin(path)?;
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
struct Output {
    name: String,
    shape: Vec<usize>,
    parts: Vec<(Parameter, Place)>,
}

impl Output {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

fn outputs(model: &ModelSpec) -> Vec<Output> {
    let model = &ModelSpec { vocab_multiple: 1, ..model.clone() };
    let mut outputs: Vec<Output> = Vec::new();
    for parameter in all_parameters(model) {
        let place = place(model, base(model.family), parameter.unit, parameter.slot);
        match outputs.last_mut() {
            Some(last) if last.name == place.name => last.parts.push((parameter, place)),
            _ => {
                let shape = place.tensor_shape(&parameter);
                outputs.push(Output { name: place.name.clone(), shape, parts: vec![(parameter, place)] });
            }
        }
    }
    outputs
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
    let files = cut(outputs(model), options.file_bytes / width);
    let (mut weight_map, mut total) = (Map::new(), 0);
    for (i, outputs) in files.iter().enumerate() {
        let name = match files.len() {
            1 => SINGLE.to_owned(),
            many => format!("model-{:05}-of-{many:05}.safetensors", i + 1),
        };
        write_file(&folder.join(&name), outputs, store, dtype, options.non_finite)?;
        for output in outputs {
            total += output.elements() as u64 * width;
            weight_map.insert(output.name.clone(), name.clone().into());
        }
    }
    if files.len() > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_json(&folder.join(INDEX), &index)?;
    }
    Ok(())
}

/// Fills one file after the other with up to so many elements; a tensor is never cut.
fn cut(outputs: Vec<Output>, elements: u64) -> Vec<Vec<Output>> {
    let mut files: Vec<Vec<Output>> = vec![Vec::new()];
    let mut filled = 0;
    for output in outputs {
        let more = output.elements() as u64;
        if filled > 0 && filled + more > elements {
            files.push(Vec::new());
            filled = 0;
        }
        filled += more;
        files.last_mut().expect("there is a first file").push(output);
    }
    files
}

fn write_file(
    path: &Path,
    outputs: &[Output],
    store: &dyn Store,
    dtype: Dtype,
    non_finite: bool,
) -> Result<(), CheckpointError> {
    let mut end = 0;
    let infos = outputs.iter().map(|output| {
        let start = end;
        end += output.elements() * dtype.bitsize() / 8;
        (output.name.clone(), TensorInfo { dtype, shape: output.shape.clone(), data_offsets: (start, end) })
    });
    // transformers refuses a file that does not say what wrote it.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let header = header::encode(Some(format), infos.collect());
    let io = |error: std::io::Error| CheckpointError::new(path, error);
    let mut file = Durable::create(path).map_err(io)?;
    file.write(&header).map_err(io)?;
    for output in outputs {
        write_tensor(output, store, &mut |values| {
            if !non_finite && let Some(value) = beyond(values, dtype) {
                let problem = format!("it has the value {value:e}, which is infinite in {dtype}");
                return Err(CheckpointError::new(Path::new(&output.name), problem));
            }
            file.write(&encode(values, dtype)).map_err(io)
        })?;
    }
    file.finish().map(|_| ()).map_err(io)
}

/// The first number that the type cannot hold.
fn beyond(values: &[f32], dtype: Dtype) -> Option<f32> {
    let fits = |value: f32| match dtype {
        Dtype::BF16 => bf16::from_f32(value).is_finite(),
        Dtype::F16 => f16::from_f32(value).is_finite(),
        _ => true,
    };
    values.iter().copied().find(|&value| !fits(value))
}

/// Hands out a tensor's numbers in the order of the file.
fn write_tensor(
    output: &Output,
    store: &dyn Store,
    write: &mut dyn FnMut(&[f32]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut values = Vec::new();
    let read = |parameter: &Parameter, start: usize, len: usize, values: &mut Vec<f32>| {
        let before = values.len();
        values.resize(before + len, 0.0);
        store
            .read(Elements { parameter, kept: Kept::Weights, start }, &mut values[before..])
            .map_err(|error| CheckpointError::new(Path::new(&output.name), error))
    };
    let (first, place) = &output.parts[0];
    if place.transposed {
        for (parameter, _) in &output.parts {
            read(parameter, 0, parameter.valid_elements(), &mut values)?;
        }
        return write_turned(&values, first.shape[1], write);
    }
    if let Part::ThirdOfHeads { head_dim, .. } = place.part {
        let head = head_dim * first.shape[1];
        for start in (0..first.valid_elements()).step_by(head) {
            values.clear();
            for (parameter, _) in &output.parts {
                read(parameter, start, head, &mut values)?;
            }
            write(&values)?;
        }
        return Ok(());
    }
    for (parameter, _) in &output.parts {
        let len = parameter.valid_elements();
        for start in (0..len).step_by(CHUNK) {
            values.clear();
            read(parameter, start, CHUNK.min(len - start), &mut values)?;
            write(&values)?;
        }
    }
    Ok(())
}

/// Hands out a matrix of so many columns by its columns.
fn write_turned(
    values: &[f32],
    columns: usize,
    write: &mut dyn FnMut(&[f32]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    // Some columns at a time: one by one, every number would be fetched from memory with its neighbours in vain.
    const SOME: usize = 16;
    let rows = values.len() / columns;
    let mut turned = vec![0.0; SOME.min(columns) * rows];
    for first in (0..columns).step_by(SOME) {
        let some = SOME.min(columns - first);
        for (row, values) in values.chunks_exact(columns).enumerate() {
            for (i, &value) in values[first..first + some].iter().enumerate() {
                turned[i * rows + row] = value;
            }
        }
        write(&turned[..some * rows])?;
    }
    Ok(())
}

//! Tensors in safetensors files, by name: a checked header, and reads at offsets.
//!
//! Headers are checked against the length of the file, so that arbitrary bytes are an error and never a large allocation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use kintsugi_spec::input;
use safetensors::Dtype;
use serde::Deserialize;

use crate::files::ManyFiles;
use crate::{CheckpointError, header};

/// The tensors of a folder.
#[derive(Debug)]
pub(super) struct Tensors {
    files: ManyFiles,
    by_name: BTreeMap<String, Tensor>,
}

/// The location of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    /// Its dims.
    pub shape: Vec<usize>,
    dtype: Dtype,
    file: usize,
    /// Offset in the file.
    offset: u64,
}

/// The weights of a model in a single file.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index that maps tensors to files.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// The same two files in PyTorch's pickle format, which is not read because loading it can run code.
const PICKLED: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

impl Tensors {
    /// Reads the headers of all files.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        let mut tensors = Tensors { files: ManyFiles::default(), by_name: BTreeMap::new() };
        let pickled = PICKLED.iter().find(|name| folder.join(name).exists());
        if let (Some(name), false, false) = (pickled, single.exists(), index.exists()) {
            let problem = format!("it has {name} but no {SINGLE}; only safetensors files are read");
            return Err(CheckpointError::new(folder, problem));
        }
        if single.exists() || !index.exists() {
            tensors.add_file(single, |_| true)?;
            return Ok(tensors);
        }
        let map = weight_map(&index)?;
        for file in map.values().collect::<BTreeSet<_>>() {
            // If a tensor is in several files, the index decides which one is used.
            tensors.add_file(folder.join(file), |name| map.get(name).is_none_or(|mapped| mapped == file))?;
        }
        match map.iter().find(|&(name, _)| !tensors.by_name.contains_key(name)) {
            Some((missing, file)) => {
                let problem = format!("it lists {missing} in {file}, but the file does not have it");
                Err(CheckpointError::new(&index, problem))
            }
            None => Ok(tensors),
        }
    }

    /// All names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// The file that a tensor is in.
    pub fn path(&self, tensor: &Tensor) -> &Path {
        &self.files.paths[tensor.file]
    }

    /// Checks that the element type of a tensor is supported.
    pub fn check_type(&self, name: &str, tensor: &Tensor) -> Result<(), CheckpointError> {
        if matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Ok(());
        }
        let problem = format!("{name} has type {}; F32, F16 and BF16 are supported", tensor.dtype);
        Err(CheckpointError::new(self.path(tensor), problem))
    }

    /// Reads elements from `start` on. The type of the tensor must have been checked.
    pub fn read(&self, tensor: &Tensor, start: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let offset = tensor.offset + (start * tensor.dtype.bitsize() / 8) as u64;
        self.files.read(tensor.file, tensor.dtype, offset, out)
    }

    /// Adds the tensors of a file that `wanted` selects. Fails if another file has the same tensor.
    fn add_file(&mut self, path: PathBuf, wanted: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
        let number = self.files.paths.len();
        let (metadata, data) = header::read(&path)?;
        for (name, info) in metadata.tensors().into_iter().filter(|(name, _)| wanted(name)) {
            let offset = data + info.data_offsets.0 as u64;
            let tensor = Tensor { shape: info.shape.clone(), dtype: info.dtype, file: number, offset };
            if let Some(other) = self.by_name.insert(name.clone(), tensor) {
                let other = self.path(&other).display();
                let problem = format!("{name} is also in {other}; {INDEX} does not say which file to use");
                return Err(CheckpointError::new(&path, problem));
            }
        }
        self.files.paths.push(path);
        Ok(())
    }
}

/// The index of a model in several files.
#[derive(Deserialize)]
struct WeightIndex {
    weight_map: BTreeMap<String, String>,
}

/// The file of each tensor, according to the index.
fn weight_map(path: &Path) -> Result<BTreeMap<String, String>, CheckpointError> {
    let text = input::bytes(path, input::MAX_WRITTEN_BY_PROGRAMS)
        .map_err(|error| CheckpointError::new(path, error))?;
    let index: WeightIndex = serde_json::from_slice(&text)
        .map_err(|error| CheckpointError::new(path, format!("is not an index: {error}")))?;
    for (name, file) in &index.weight_map {
        let mut parts = Path::new(file).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(CheckpointError::new(
                path,
                format!("it lists {name} in {file:?}, which is not a file of this folder"),
            ));
        }
    }
    Ok(index.weight_map)
}

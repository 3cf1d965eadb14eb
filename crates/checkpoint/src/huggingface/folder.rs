//! A Hugging Face folder as a store of whole parameters.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kintsugi_plan::parameters::Parameter;
use kintsugi_rank::{Elements, Store, StoreError, StoredTensor};
use kintsugi_spec::ModelSpec;

use super::names::{TensorLocation, TensorPart, all_parameters, is_ignored, location};
use super::tensors::{Tensor, Tensors};
use super::{config, families};
use crate::CheckpointError;

/// A folder that has been checked: it has every parameter of the model, in the right shape.
#[derive(Debug)]
pub struct HuggingFaceFolder {
    path: PathBuf,
    model: ModelSpec,
    tensors: Tensors,
    /// The prefix of all tensor names except the head's.
    base: &'static str,
    /// A cache of transposed tensors. Without it, a part of a tensor that is stored by columns would be read number by
    /// number.
    transposed: Mutex<Vec<(String, Arc<Vec<f32>>)>>,
}

/// The file that describes the model.
pub(super) const CONFIG: &str = "config.json";
/// The most elements in the cache of transposed tensors, without the newest one. Several ranks read at the same time.
const MAX_TRANSPOSED: usize = 1 << 26;

impl HuggingFaceFolder {
    /// Whether a folder looks like a Hugging Face folder.
    pub fn is_one(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// The model of a folder. Does not read its weights.
    pub fn read_model(path: &Path) -> Result<ModelSpec, CheckpointError> {
        config::read(&path.join(CONFIG))
    }

    /// Opens a folder and checks it. Weights are read later, in pieces.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let model = Self::read_model(path)?;
        let tensors = Tensors::open(path)?;
        let base = families::of(model.family).base;
        // Models that were saved without their head have tensor names without the prefix.
        let base = if tensors.names().any(|name| name.starts_with(base)) { base } else { "" };
        let folder =
            HuggingFaceFolder { path: path.to_owned(), model, tensors, base, transposed: Mutex::default() };
        folder.check()?;
        Ok(folder)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model.
    pub fn model(&self) -> &ModelSpec {
        &self.model
    }

    fn check(&self) -> Result<(), CheckpointError> {
        let mut unknown: BTreeSet<&str> = self.tensors.names().collect();
        for parameter in all_parameters(&self.model) {
            let location = self.location(&parameter);
            let tensor = self.tensors.get(&location.name).ok_or_else(|| {
                CheckpointError::new(&self.path, format!("its weights have no tensor {}", location.name))
            })?;
            let expected = location.tensor_shape(&parameter);
            if tensor.shape != expected {
                let problem = format!(
                    "{} has shape {:?}, but config.json describes {expected:?}",
                    location.name, tensor.shape
                );
                return Err(CheckpointError::new(self.tensors.path(tensor), problem));
            }
            self.tensors.check_type(&location.name, tensor)?;
            unknown.remove(location.name.as_str());
        }
        match unknown.into_iter().find(|name| !is_ignored(&self.model, name)) {
            Some(name) => {
                let problem =
                    format!("its weights have a tensor {name} that the model of config.json does not have");
                Err(CheckpointError::new(&self.path, problem))
            }
            None => Ok(()),
        }
    }

    fn location(&self, parameter: &Parameter) -> TensorLocation {
        location(&self.model, self.base, parameter.unit, parameter.kind)
    }

    fn tensor(&self, location: &TensorLocation) -> Result<&Tensor, StoreError> {
        let missing = || StoreError::new(format!("{} has no tensor {}", self.path.display(), location.name));
        self.tensors.get(&location.name).ok_or_else(missing)
    }

    /// The number of elements that the tensor has for a parameter of `columns` columns, or 0 if its own columns differ.
    fn elements(&self, location: &TensorLocation, columns: usize) -> Result<usize, StoreError> {
        let tensor = self.tensor(location)?;
        let width = match (tensor.shape.len(), location.transposed) {
            (1, _) => 1,
            (_, false) => tensor.shape[1],
            (_, true) => tensor.shape[0],
        };
        let rows = tensor.shape.iter().product::<usize>() / width.max(1);
        Ok(if width == columns { location.part.rows_of(rows) * columns } else { 0 })
    }

    /// Reads elements of a tensor, or of its transpose if it is stored by columns.
    fn read_tensor(
        &self,
        location: &TensorLocation,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), StoreError> {
        let tensor = self.tensor(location)?;
        if location.transposed {
            out.copy_from_slice(&self.transposed(&location.name, tensor)?[start..start + out.len()]);
            return Ok(());
        }
        self.tensors.read(tensor, start, out).map_err(StoreError::new)?;
        if location.offset != 0.0 {
            for value in &mut *out {
                *value += location.offset;
            }
        }
        Ok(())
    }

    fn transposed(&self, name: &str, tensor: &Tensor) -> Result<Arc<Vec<f32>>, StoreError> {
        // Holds the lock while reading: other threads usually need the same tensor.
        let mut transposed = self.transposed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = transposed.iter().position(|(have, _)| have == name) {
            let found = transposed.remove(i);
            transposed.push(found);
        } else {
            let values = self.transpose(tensor).map_err(StoreError::new)?;
            let mut kept: usize = transposed.iter().map(|(_, values)| values.len()).sum();
            while kept > MAX_TRANSPOSED.saturating_sub(values.len()) && !transposed.is_empty() {
                kept -= transposed.remove(0).1.len();
            }
            transposed.push((name.to_owned(), Arc::new(values)));
        }
        Ok(Arc::clone(&transposed.last().expect("it has just been pushed").1))
    }

    /// Reads a matrix `[rows, columns]` row by row and transposes it to `[columns, rows]`.
    fn transpose(&self, tensor: &Tensor) -> Result<Vec<f32>, CheckpointError> {
        const ROWS: usize = 16;
        let (rows, columns) = (tensor.shape[0], tensor.shape[1]);
        let mut transposed = vec![0.0; rows * columns];
        let mut some = vec![0.0; ROWS.min(rows) * columns];
        for first in (0..rows).step_by(ROWS) {
            let here = ROWS.min(rows - first);
            let some = &mut some[..here * columns];
            self.tensors.read(tensor, first * columns, some)?;
            for (column, transposed) in transposed.chunks_exact_mut(rows).enumerate() {
                for (row, to) in transposed[first..first + here].iter_mut().enumerate() {
                    *to = some[row * columns + column];
                }
            }
        }
        Ok(transposed)
    }
}

impl Store for HuggingFaceFolder {
    /// A folder has no optimizer states: they are zero, as at the start of a run.
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let Elements { parameter, stored, start } = elements;
        if stored != StoredTensor::Weights {
            out.fill(0.0);
            return Ok(());
        }
        let location = self.location(parameter);
        let columns = parameter.shape[1];
        let end = start + out.len();
        if end > self.elements(&location, columns)? {
            let name = parameter.name();
            let folder = self.path.display();
            return Err(StoreError::new(format!("{name} is larger than {} in {folder}", location.name)));
        }
        match location.part {
            TensorPart::Whole => self.read_tensor(&location, start, out),
            TensorPart::Rows { first, .. } => self.read_tensor(&location, first * columns + start, out),
            TensorPart::ThirdOfHeads { third, head_dim } => {
                let head = head_dim * columns;
                let mut rest = out;
                for run in runs(start..end, head) {
                    let (here, after) = rest.split_at_mut(run.len());
                    let at = (3 * (run.start / head) + third) * head + run.start % head;
                    self.read_tensor(&location, at, here)?;
                    rest = after;
                }
                Ok(())
            }
        }
    }
}

/// Splits a range at the multiples of `length`.
fn runs(range: Range<usize>, length: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let run = start..range.end.min((start / length + 1) * length);
        start = run.end;
        (!run.is_empty()).then_some(run)
    })
}

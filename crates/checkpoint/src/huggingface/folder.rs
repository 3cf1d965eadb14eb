//! A Hugging Face folder as a store of whole parameters.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kintsugi_plan::parameters::Parameter;
use kintsugi_rank::{Elements, Kept, Store, StoreError};
use kintsugi_spec::ModelSpec;

use super::config;
use super::names::{Part, Place, all_parameters, base, is_ignored, place};
use super::tensors::{Tensor, Tensors};
use crate::CheckpointError;

/// A folder that has been checked: every parameter of the model is there, in its shape.
#[derive(Debug)]
pub struct HuggingFaceFolder {
    path: PathBuf,
    model: ModelSpec,
    tensors: Tensors,
    /// What the names of all tensors but the head's start with.
    base: &'static str,
    /// Tensors that lie by columns, turned: a part of one would otherwise be read number by number.
    turned: Mutex<Vec<(String, Arc<Vec<f32>>)>>,
}

/// The file that describes the model.
pub(super) const CONFIG: &str = "config.json";
/// Elements of turned tensors that are kept, the last one aside: several ranks read at the same time.
const TURNED: usize = 1 << 26;

impl HuggingFaceFolder {
    /// Whether a folder looks like one of Hugging Face's.
    pub fn is_one(path: &Path) -> bool {
        path.join(CONFIG).is_file()
    }

    /// The model of a folder; its weights are not looked at.
    pub fn read_model(path: &Path) -> Result<ModelSpec, CheckpointError> {
        config::read(&path.join(CONFIG))
    }

    /// Opens a folder and checks it; weights are read later, piece by piece.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let model = Self::read_model(path)?;
        let tensors = Tensors::open(path)?;
        let base = base(model.family);
        // Models that were saved without their head have names without the base.
        let base = if tensors.names().any(|name| name.starts_with(base)) { base } else { "" };
        let folder =
            HuggingFaceFolder { path: path.to_owned(), model, tensors, base, turned: Mutex::default() };
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
            let place = self.place(&parameter);
            let tensor = self.tensors.get(&place.name).ok_or_else(|| {
                CheckpointError::new(&self.path, format!("its weights have no tensor {}", place.name))
            })?;
            let expected = place.tensor_shape(&parameter);
            if tensor.shape != expected {
                let problem = format!(
                    "{} has shape {:?}, where config.json means {expected:?}",
                    place.name, tensor.shape
                );
                return Err(CheckpointError::new(self.tensors.path(tensor), problem));
            }
            self.tensors.check_type(&place.name, tensor)?;
            unknown.remove(place.name.as_str());
        }
        match unknown.into_iter().find(|name| !is_ignored(&self.model, name)) {
            Some(name) => {
                let problem = format!("its weights have a tensor {name}, which config.json says nothing of");
                Err(CheckpointError::new(&self.path, problem))
            }
            None => Ok(()),
        }
    }

    fn place(&self, parameter: &Parameter) -> Place {
        place(&self.model, self.base, parameter.unit, parameter.slot)
    }

    fn tensor(&self, place: &Place) -> Result<&Tensor, StoreError> {
        let missing = || StoreError::new(format!("{} has no tensor {}", self.path.display(), place.name));
        self.tensors.get(&place.name).ok_or_else(missing)
    }

    /// The elements that a parameter of so many columns may have; none where the columns are not the tensor's.
    fn elements(&self, place: &Place, columns: usize) -> Result<usize, StoreError> {
        let tensor = self.tensor(place)?;
        let parts = if place.part == Part::Whole { 1 } else { 3 };
        let width = match (tensor.shape.len(), place.transposed) {
            (1, _) => 1,
            (_, false) => tensor.shape[1],
            (_, true) => tensor.shape[0],
        };
        let all: usize = tensor.shape.iter().product();
        Ok(if width == columns { all / parts } else { 0 })
    }

    /// Reads elements of a tensor as it lies, or of a turned one.
    fn read_tensor(&self, place: &Place, start: usize, out: &mut [f32]) -> Result<(), StoreError> {
        let tensor = self.tensor(place)?;
        if place.transposed {
            out.copy_from_slice(&self.turned(&place.name, tensor)?[start..start + out.len()]);
            return Ok(());
        }
        self.tensors.read(tensor, start, out).map_err(StoreError::new)
    }

    fn turned(&self, name: &str, tensor: &Tensor) -> Result<Arc<Vec<f32>>, StoreError> {
        // Whoever comes second waits for the first, who reads the same tensor more often than not.
        let mut turned = self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = turned.iter().position(|(have, _)| have == name) {
            let found = turned.remove(i);
            turned.push(found);
        } else {
            let values = self.turn(tensor).map_err(StoreError::new)?;
            let mut kept: usize = turned.iter().map(|(_, values)| values.len()).sum();
            while kept > TURNED.saturating_sub(values.len()) && !turned.is_empty() {
                kept -= turned.remove(0).1.len();
            }
            turned.push((name.to_owned(), Arc::new(values)));
        }
        Ok(Arc::clone(&turned.last().expect("it has just been pushed").1))
    }

    /// A matrix `[rows, columns]` as `[columns, rows]`, read row by row.
    fn turn(&self, tensor: &Tensor) -> Result<Vec<f32>, CheckpointError> {
        const ROWS: usize = 16;
        let (rows, columns) = (tensor.shape[0], tensor.shape[1]);
        let mut turned = vec![0.0; rows * columns];
        let mut some = vec![0.0; ROWS.min(rows) * columns];
        for first in (0..rows).step_by(ROWS) {
            let here = ROWS.min(rows - first);
            let some = &mut some[..here * columns];
            self.tensors.read(tensor, first * columns, some)?;
            for (column, turned) in turned.chunks_exact_mut(rows).enumerate() {
                for (row, to) in turned[first..first + here].iter_mut().enumerate() {
                    *to = some[row * columns + column];
                }
            }
        }
        Ok(turned)
    }
}

impl Store for HuggingFaceFolder {
    /// There are no optimizer states here: they are zero, as at the start of a run.
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let Elements { parameter, kept, start } = elements;
        if kept != Kept::Weights {
            out.fill(0.0);
            return Ok(());
        }
        let place = self.place(parameter);
        let columns = parameter.shape[1];
        let end = start + out.len();
        if end > self.elements(&place, columns)? {
            let name = parameter.name();
            let folder = self.path.display();
            return Err(StoreError::new(format!("{name} is larger than {} in {folder}", place.name)));
        }
        match place.part {
            Part::Whole => self.read_tensor(&place, start, out),
            Part::Third(third) => self.read_tensor(&place, third * parameter.valid_elements() + start, out),
            Part::ThirdOfHeads { third, head_dim } => {
                let head = head_dim * columns;
                let mut rest = out;
                for run in runs(start..end, head) {
                    let (here, after) = rest.split_at_mut(run.len());
                    let at = (3 * (run.start / head) + third) * head + run.start % head;
                    self.read_tensor(&place, at, here)?;
                    rest = after;
                }
                Ok(())
            }
        }
    }
}

/// A range cut at the multiples of `length`.
fn runs(range: Range<usize>, length: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let run = start..range.end.min((start / length + 1) * length);
        start = run.end;
        (!run.is_empty()).then_some(run)
    })
}

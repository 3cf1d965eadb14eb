//! A checkpoint whose files have all been verified, as a store of whole parameters for any layout.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use kintsugi_plan::Plan;
use kintsugi_plan::parameters::{Parameter, parameters};
use kintsugi_rank::{Elements, Store, StoreError, StoredTensor};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata};

use crate::files::ManyFiles;
use crate::folder::step_of;
use crate::manifest::FileRecord;
use crate::slice::{CoverError, Slice, check_cover};
use crate::{CheckpointError, Manifest, RunProgress, files, header};

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: ManyFiles,
    /// The slices of every stored tensor.
    tensors: HashMap<(String, StoredTensor), ShardedTensor>,
}

/// A file that matches its record.
struct CheckedFile {
    path: PathBuf,
    metadata: Metadata,
    /// Offset of its data.
    data: u64,
}

/// A stored tensor of a whole parameter, in slices.
#[derive(Debug, Default)]
struct ShardedTensor {
    columns: usize,
    elements: usize,
    parts: Vec<TensorSlice>,
}

/// Where a stored tensor of a whole parameter is, for readers that map the files themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlace {
    /// Name of the parameter.
    pub parameter: String,
    /// Which tensor of the parameter.
    pub stored: StoredTensor,
    /// Rows, without padding of the vocabulary, and columns; vectors have one column.
    pub shape: [usize; 2],
    /// Its slices. Together they have each element once.
    pub slices: Vec<SlicePlace>,
}

/// Where a slice of a tensor is: little-endian numbers, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePlace {
    /// The file.
    pub file: PathBuf,
    /// The offset of its first byte in the file.
    pub offset: u64,
    /// The type of its numbers: F32, BF16 or F16.
    pub dtype: Dtype,
    /// Which elements of the tensor they are.
    pub slice: Slice,
}

#[derive(Debug)]
struct TensorSlice {
    slice: Slice,
    dtype: Dtype,
    /// Its offset in the file.
    offset: u64,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder. Reads every file once to verify its checksum.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest = Manifest::read(path)?;
        if let (Some(named), step) = (step_of(path), manifest.progress.step)
            && named != step
        {
            let reason = format!(
                "its name says step {named}, but its manifest step {step}; rename the folder or move it away"
            );
            return Err(CheckpointError::new(path, reason));
        }
        let files: Result<Vec<CheckedFile>, CheckpointError> =
            manifest.files.par_iter().map(|record| CheckedFile::new(path, record)).collect();
        let files = files?;
        let tensors = tensors(&manifest, &files).map_err(|error| CheckpointError::new(path, error))?;
        let files = ManyFiles::new(files.into_iter().map(|file| file.path).collect());
        Ok(Checkpoint { path: path.to_owned(), manifest, files, tensors })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The progress of the run.
    pub fn progress(&self) -> &RunProgress {
        &self.manifest.progress
    }

    /// The plan of the run that wrote it, with its model and layout. The plan's cluster, framework and output folder are not
    /// stored and have default values.
    pub fn plan(&self) -> &Plan {
        &self.manifest.plan
    }

    /// The stored tensors, of the parameters that have them. A converted model has only weights.
    pub fn stored_tensors(&self) -> &[StoredTensor] {
        &self.manifest.stored_tensors
    }

    /// Where its tensors are, in the order of the model.
    pub fn places(&self) -> Vec<TensorPlace> {
        let plan = &self.manifest.plan;
        let parameters = plan.units().into_iter().flat_map(|unit| parameters(&plan.model, unit, 1));
        let place = |(parameter, stored): (Parameter, StoredTensor)| {
            let name = parameter.name();
            let parts = &self.tensors[&(name.clone(), stored)].parts;
            let slices = parts.iter().map(|part| SlicePlace {
                file: self.path.join(&self.manifest.files[part.slice.file].name),
                offset: part.offset,
                dtype: part.dtype,
                slice: part.slice.clone(),
            });
            let shape = [parameter.valid_rows, parameter.shape[1]];
            TensorPlace { parameter: name, stored, shape, slices: slices.collect() }
        };
        let stored = &self.manifest.stored_tensors;
        let tensors = |parameter| stored.iter().map(move |&stored| (parameter, stored));
        let has = |(parameter, stored): &(Parameter, StoredTensor)| plan.stores(parameter, *stored);
        parameters.flat_map(tensors).filter(has).map(place).collect()
    }

    /// The whole configuration of the run that wrote it, as TOML.
    pub fn config(&self) -> &str {
        &self.manifest.config
    }

    /// The elements of all its tensors.
    pub fn elements(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.elements as u64).sum()
    }

    /// Bytes of its files, without the manifest.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }
}

impl Store for Checkpoint {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let Elements { parameter, stored, start } = elements;
        let name = parameter.name();
        // The average of frozen weights is the weights.
        let is_own_average = stored == StoredTensor::Average && self.plan().is_frozen(parameter.unit);
        let stored = if is_own_average { StoredTensor::Weights } else { stored };
        let failed = |reason: String| StoreError::new(format!("{}: {reason}", self.path.display()));
        let tensor = self.tensors.get(&(name.clone(), stored));
        let tensor = tensor.ok_or_else(|| failed(format!("it has no {} of {name}", stored.name())))?;
        let (elements, columns) = (parameter.valid_elements(), parameter.shape[1]);
        if (tensor.elements, tensor.columns) != (elements, columns) {
            let found = format!("{} elements in {} columns", tensor.elements, tensor.columns);
            return Err(failed(format!("its {name} has {found}, but should have {elements} in {columns}")));
        }
        let wanted = start..start + out.len();
        for part in &tensor.parts {
            let overlap = part.slice.overlap(columns, &wanted);
            if overlap.is_empty() {
                continue;
            }
            let read = |to: &mut [f32]| part.read(&self.files, overlap.start, to).map_err(StoreError::new);
            if part.slice.width() == columns {
                let at = part.slice.start + overlap.start - start;
                read(&mut out[at..at + overlap.len()])?;
                continue;
            }
            // Reads a strip of columns at once and then copies it row by row.
            let mut numbers = vec![0.0; overlap.len()];
            read(&mut numbers)?;
            for (at, run) in part.slice.runs(columns, overlap.clone()) {
                let from = &numbers[run.start - overlap.start..run.end - overlap.start];
                out[at - start..at - start + run.len()].copy_from_slice(from);
            }
        }
        Ok(())
    }
}

impl TensorSlice {
    /// Reads elements of the slice, from `first` on.
    fn read(&self, files: &ManyFiles, first: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        let offset = self.offset + (first * self.dtype.bitsize() / 8) as u64;
        files.read(self.slice.file, self.dtype, offset, out)
    }
}

impl CheckedFile {
    /// Checks a file against its record.
    fn new(folder: &Path, record: &FileRecord) -> Result<Self, CheckpointError> {
        let path = folder.join(&record.name);
        let wrong = |reason: String| CheckpointError::new(&path, reason);
        let (bytes, checksum) = files::measure(&path).map_err(|error| CheckpointError::new(&path, error))?;
        if bytes != record.bytes {
            return Err(wrong(format!("it has {bytes} bytes, but should have {}", record.bytes)));
        }
        if checksum != record.checksum {
            return Err(wrong(format!("its checksum is {checksum}, but should be {}", record.checksum)));
        }
        let (metadata, data) = header::read(&path)?;
        Ok(CheckedFile { path, metadata, data })
    }
}

/// Why the files of a checkpoint are not its model.
#[derive(Debug, thiserror::Error)]
enum TensorError {
    #[error("{tensor} of file {file} is listed for two slices")]
    ListedTwice { tensor: String, file: usize },
    #[error("{tensor} is in file {file}, which does not exist")]
    NoFile { tensor: String, file: usize },
    #[error("{tensor} is not in {}", file.display())]
    NotInFile { tensor: String, file: PathBuf },
    #[error("{tensor} is {dtype:?} of {shape:?} and should have {len}")]
    Shape { tensor: String, dtype: Dtype, shape: Vec<usize>, len: usize },
    #[error(transparent)]
    Cover(#[from] CoverError),
    #[error("it has {found} tensors, but its model has {expected}")]
    Count { found: usize, expected: usize },
}

/// Locates every slice in its file. Fails if two slices are in the same place, or if an element of the model is not in exactly
/// one slice.
fn tensors(
    manifest: &Manifest,
    files: &[CheckedFile],
) -> Result<HashMap<(String, StoredTensor), ShardedTensor>, TensorError> {
    let mut tensors: HashMap<(String, StoredTensor), ShardedTensor> = HashMap::new();
    let mut taken = HashSet::new();
    for slice in &manifest.slices {
        let tensor = slice.tensor();
        if !taken.insert((slice.file, tensor.clone())) {
            return Err(TensorError::ListedTwice { tensor, file: slice.file });
        }
        let Some(file) = files.get(slice.file) else {
            return Err(TensorError::NoFile { tensor, file: slice.file });
        };
        let Some(info) = file.metadata.info(&tensor) else {
            return Err(TensorError::NotInFile { tensor, file: file.path.clone() });
        };
        let known = matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
        if !known || info.shape.iter().product::<usize>() != slice.len {
            let (dtype, shape) = (info.dtype, info.shape.clone());
            return Err(TensorError::Shape { tensor, dtype, shape, len: slice.len });
        }
        let offset = file.data + info.data_offsets.0 as u64;
        let part = TensorSlice { slice: slice.clone(), dtype: info.dtype, offset };
        tensors.entry((slice.parameter.clone(), slice.stored)).or_default().parts.push(part);
    }
    let plan = &manifest.plan;
    let parameters = plan.units().into_iter().flat_map(|unit| parameters(&plan.model, unit, 1));
    let mut expected = 0;
    for (parameter, &stored) in
        parameters.flat_map(|parameter| manifest.stored_tensors.iter().map(move |stored| (parameter, stored)))
    {
        if !plan.stores(&parameter, stored) {
            continue;
        }
        let tensor = tensors.entry((parameter.name(), stored)).or_default();
        check_cover(&parameter, &mut tensor.parts.iter().map(|part| &part.slice).collect::<Vec<_>>())?;
        (tensor.columns, tensor.elements) = (parameter.shape[1], parameter.valid_elements());
        expected += 1;
    }
    let found = tensors.len();
    if found == expected { Ok(tensors) } else { Err(TensorError::Count { found, expected }) }
}

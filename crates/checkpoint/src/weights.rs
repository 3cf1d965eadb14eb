//! A folder of weights: a checkpoint, or a Hugging Face folder.

use std::path::Path;

use kintsugi_plan::Plan;
use kintsugi_rank::{Elements, Store, StoreError, StoredTensor};
use kintsugi_spec::ModelSpec;

use crate::huggingface::HuggingFaceFolder;
use crate::manifest::MANIFEST;
use crate::{Checkpoint, CheckpointError, Manifest, find};

/// An open folder of weights.
#[derive(Debug)]
pub enum WeightsFolder {
    /// A Hugging Face folder.
    HuggingFace(Box<HuggingFaceFolder>),
    /// A checkpoint.
    Checkpoint(Box<Checkpoint>),
}

impl WeightsFolder {
    /// Opens a Hugging Face folder, a checkpoint, or the newest checkpoint of a run.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if HuggingFaceFolder::is_one(path) {
            return Ok(WeightsFolder::HuggingFace(Box::new(HuggingFaceFolder::open(path)?)));
        }
        Ok(WeightsFolder::Checkpoint(Box::new(newest(path)?)))
    }

    /// The model in a folder that [`WeightsFolder::open`] accepts. Reads only the description of a Hugging Face folder or a
    /// single checkpoint.
    pub fn read_model(path: &Path) -> Result<ModelSpec, CheckpointError> {
        if HuggingFaceFolder::is_one(path) {
            return HuggingFaceFolder::read_model(path);
        }
        if path.join(MANIFEST).exists() {
            return Ok(Manifest::read(path)?.plan.model);
        }
        Ok(newest(path)?.plan().model.clone())
    }

    /// The model.
    pub fn model(&self) -> &ModelSpec {
        match self {
            WeightsFolder::HuggingFace(folder) => folder.model(),
            WeightsFolder::Checkpoint(checkpoint) => &checkpoint.plan().model,
        }
    }

    /// Fails if a plan has another model. The plan of a Hugging Face folder is made from the folder, so it always matches.
    pub fn check_model(&self, plan: &Plan) -> Result<(), CheckpointError> {
        match self {
            WeightsFolder::HuggingFace(_) => Ok(()),
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.check_model(plan),
        }
    }

    /// The stored tensors, of the parameters that have them.
    pub fn stored_tensors(&self) -> &[StoredTensor] {
        match self {
            WeightsFolder::HuggingFace(_) => &[StoredTensor::Weights],
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.stored_tensors(),
        }
    }
}

impl Store for WeightsFolder {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        match self {
            WeightsFolder::HuggingFace(folder) => folder.read(elements, out),
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.read(elements, out),
        }
    }
}

/// The newest checkpoint. Fails if it is broken, because a user would not notice older weights.
fn newest(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let mut broken = None;
    let found = find(path, |error| broken = broken.take().or_else(|| Some(error.clone())));
    match broken {
        Some(error) => Err(error),
        None => found,
    }
}

//! Weights wherever they come from: a checkpoint, or a folder of Hugging Face's.

use std::path::Path;

use kintsugi_plan::Plan;
use kintsugi_rank::{Elements, Kept, Store, StoreError};
use kintsugi_spec::ModelSpec;

use crate::huggingface::HuggingFaceFolder;
use crate::manifest::MANIFEST;
use crate::{Checkpoint, CheckpointError, Manifest, find};

/// An open folder of weights.
#[derive(Debug)]
pub enum WeightsFolder {
    /// Hugging Face's.
    HuggingFace(Box<HuggingFaceFolder>),
    /// A checkpoint.
    Checkpoint(Box<Checkpoint>),
}

impl WeightsFolder {
    /// Opens what a path means: a Hugging Face folder, a checkpoint, or the newest whole checkpoint of a run.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if HuggingFaceFolder::is_one(path) {
            return Ok(WeightsFolder::HuggingFace(Box::new(HuggingFaceFolder::open(path)?)));
        }
        Ok(WeightsFolder::Checkpoint(Box::new(newest(path)?)))
    }

    /// The model of what a path means. Of a Hugging Face folder and a single checkpoint only the description is read.
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

    /// Refuses a plan of another model. One of a Hugging Face folder's is made from the folder itself.
    pub fn check_model(&self, plan: &Plan) -> Result<(), CheckpointError> {
        match self {
            WeightsFolder::HuggingFace(_) => Ok(()),
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.check_model(plan),
        }
    }

    /// What is kept of every parameter.
    pub fn kept(&self) -> &[Kept] {
        match self {
            WeightsFolder::HuggingFace(_) => &[Kept::Weights],
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.kept(),
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

/// A broken checkpoint is an error here: whoever takes weights from a run would not notice that they are older ones.
fn newest(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let mut broken = None;
    let found = find(path, |error| broken = broken.take().or_else(|| Some(error.clone())));
    match broken {
        Some(error) => Err(error),
        None => found,
    }
}

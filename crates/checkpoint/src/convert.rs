//! Conversion: weights from anywhere into a checkpoint at any layout, or into a Hugging Face folder.

use std::path::{Path, PathBuf};

use kintsugi_plan::config::{self, ConfigError};
use kintsugi_plan::{Compute, Plan};
use kintsugi_rank::{Elements, Finite, Store, StoreError};

use crate::huggingface::{ExportOptions, HuggingFaceFolder, export, parameter_count};
use crate::{CheckpointError, Progress, WeightsFolder, write};

/// What weights are converted into.
#[derive(Clone, Debug)]
pub enum Target {
    /// A Hugging Face folder, its weights of this type.
    HuggingFace(Compute),
    /// A checkpoint, cut for the ranks of this plan.
    Checkpoint(Box<Plan>),
}

/// Writes `from` as the folder `to`, which is whole or absent. Numbers that are not finite are an error unless `non_finite`
/// allows them; `moved` is called with every number of elements that was read.
pub fn convert(
    from: &WeightsFolder,
    to: &Path,
    target: &Target,
    non_finite: bool,
    moved: &(dyn Fn(u64) + Sync),
) -> Result<(), CheckpointError> {
    let watched = Watched { store: from, moved };
    let store: &dyn Store =
        if non_finite { &watched } else { &Finite { store: &watched, compute: Compute::Fp32 } };
    match target {
        Target::HuggingFace(dtype) => {
            let file_bytes = ExportOptions::FILE_BYTES;
            let options = ExportOptions {
                dtype: *dtype,
                file_bytes,
                like: like(from),
                end_of_document: from.end_of_document(),
                non_finite,
            };
            export(to, from.model(), store, &options)
        }
        Target::Checkpoint(plan) => {
            let progress = match from {
                WeightsFolder::HuggingFace(_) => Progress::default(),
                WeightsFolder::Checkpoint(checkpoint) => checkpoint.progress().clone(),
            };
            // It may be moved anywhere, far from its run.
            write(to, plan, store, from.kept(), &progress, from.tokenizer().as_deref())
        }
    }
}

/// Elements that a conversion reads, copies that several ranks have counted once.
pub fn elements(from: &WeightsFolder, target: &Target) -> u64 {
    let kept = match target {
        Target::HuggingFace(_) => 1,
        Target::Checkpoint(_) => from.kept().len() as u64,
    };
    kept * parameter_count(from.model())
}

/// The plan of a checkpoint made from these weights: one rank, unless `sets` say otherwise.
pub fn plan_for(from: &WeightsFolder, sets: &[String]) -> Result<Plan, ConfigError> {
    match from {
        WeightsFolder::HuggingFace(folder) => {
            let model = folder.model();
            let path = toml::Value::from(absolute(folder.path()).display().to_string());
            let text = format!("model.init = {path}\nbatch.sequence = {}", model.positions);
            let text = config::with_model_of_init(Some(&text), "the conversion", sets, model)?;
            config::resolve(Some(&text), "the conversion", sets)
        }
        WeightsFolder::Checkpoint(checkpoint) => {
            // How the run was laid out is not how its checkpoint is.
            let layout = ["parallel", "sharding", "cluster"];
            let sets = [&["run.device=cpu".to_owned()], sets].concat();
            config::resolve_without(&layout, Some(&checkpoint.plan().to_toml()), "the checkpoint", &[], &sets)
        }
    }
}

/// The folder whose tokenizer and special tokens these weights go with, where that is known and still there.
fn like(from: &WeightsFolder) -> Option<PathBuf> {
    let origin = match from {
        WeightsFolder::HuggingFace(folder) => Some(folder.path().to_owned()),
        WeightsFolder::Checkpoint(checkpoint) => checkpoint.plan().init.clone(),
    };
    from.tokenizer().or_else(|| origin.filter(|folder| HuggingFaceFolder::is_one(folder)))
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// A store that tells how much was read.
struct Watched<'a> {
    store: &'a WeightsFolder,
    moved: &'a (dyn Fn(u64) + Sync),
}

impl Store for Watched<'_> {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        self.store.read(elements, out)?;
        (self.moved)(out.len() as u64);
        Ok(())
    }
}

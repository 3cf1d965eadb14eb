//! Converts weights into a checkpoint with any layout, or into a Hugging Face folder.

use std::path::{Path, PathBuf};

use kintsugi_plan::config::{ConfigError, ConfigSource};
use kintsugi_plan::{Compute, Plan};
use kintsugi_rank::{AverageStore, Elements, FiniteStore, Store, StoreError};

use crate::huggingface::{ExportOptions, HuggingFaceFolder, export, parameter_count};
use crate::{CheckpointError, RunProgress, WeightsFolder, write};

/// The target of a conversion.
#[derive(Clone, Debug)]
pub enum ConversionTarget {
    /// A Hugging Face folder with weights of this type.
    HuggingFace(Compute),
    /// A checkpoint, sharded for the ranks of this plan.
    Checkpoint(Box<Plan>),
}

/// What a conversion writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConversionOptions {
    /// The moving average of the weights instead of the weights. Only for a Hugging Face folder.
    pub average: bool,
    /// Also numbers that are not finite.
    pub non_finite: bool,
}

/// Writes `from` as the folder `to`, which is complete or absent. Fails if a number is not finite, unless the options allow it.
/// Calls `moved` with the number of elements after every read.
pub fn convert(
    from: &WeightsFolder,
    to: &Path,
    target: &ConversionTarget,
    ConversionOptions { average, non_finite }: ConversionOptions,
    moved: &(dyn Fn(u64) + Sync),
) -> Result<(), CheckpointError> {
    let counting = CountingStore { store: from, moved };
    let averages = AverageStore { store: &counting };
    let store: &dyn Store = if average { &averages } else { &counting };
    let finite = FiniteStore { store, compute: Compute::Fp32 };
    let store: &dyn Store = if non_finite { store } else { &finite };
    match target {
        ConversionTarget::HuggingFace(dtype) => {
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
        ConversionTarget::Checkpoint(plan) => {
            let progress = match from {
                WeightsFolder::HuggingFace(_) => RunProgress::default(),
                WeightsFolder::Checkpoint(checkpoint) => checkpoint.progress().clone(),
            };
            // Copies the tokenizer, since the checkpoint may be moved away from its run.
            write(to, plan, store, from.stored_tensors(), &progress, from.tokenizer().as_deref())
        }
    }
}

/// The number of elements that a conversion reads. Copies on several ranks count once.
pub fn elements(from: &WeightsFolder, target: &ConversionTarget) -> u64 {
    match (target, from) {
        (ConversionTarget::Checkpoint(_), WeightsFolder::Checkpoint(checkpoint)) => checkpoint.elements(),
        (ConversionTarget::Checkpoint(_) | ConversionTarget::HuggingFace(_), _) => {
            parameter_count(from.model())
        }
    }
}

/// The plan of a checkpoint that is made from these weights. It has one rank unless `sets` change that.
pub fn plan_for(from: &WeightsFolder, sets: &[String]) -> Result<Plan, ConfigError> {
    match from {
        WeightsFolder::HuggingFace(folder) => {
            let model = folder.model();
            let path = toml::Value::from(absolute(folder.path()).display().to_string());
            ConfigSource::text(format!("model.init = {path}"))
                .named("the conversion")
                .sets(sets)
                .with_init_model(model)?
                .plan()
        }
        WeightsFolder::Checkpoint(checkpoint) => {
            // The layout of the run does not apply to the new checkpoint.
            let source = ConfigSource::text(checkpoint.plan().to_toml()).named("the checkpoint");
            let source = source.without(&["parallel", "sharding", "cluster"]);
            source.set("run.device=cpu").sets(sets).plan()
        }
    }
}

/// The folder with the tokenizer and special tokens of these weights, if it is known and still exists.
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

/// A store that reports how many elements were read.
struct CountingStore<'a> {
    store: &'a WeightsFolder,
    moved: &'a (dyn Fn(u64) + Sync),
}

impl Store for CountingStore<'_> {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        self.store.read(elements, out)?;
        (self.moved)(out.len() as u64);
        Ok(())
    }
}

//! Checks the numbers of a manifest before anything uses them. Checksums detect damage, but not a manifest that was edited and
//! given a new checksum. Such a manifest is refused, or it loads; it never causes a panic, a long loop or a huge allocation.

use std::collections::HashSet;

use kintsugi_plan::Plan;
use kintsugi_rank::StoredTensor;

use crate::Manifest;
use crate::manifest::{FileRecord, RunProgress};

/// The most steps of a run, as in a configuration.
const MAX_STEPS: u64 = 1 << 24;

/// The most samples of a step, as in a configuration.
const MAX_GLOBAL_BATCH: u64 = 1 << 32;

/// What cannot be right in a manifest.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContentError {
    #[error("its step {0} is above {MAX_STEPS}")]
    Step(u64),
    #[error("its {name} = {count} is above its step {step}")]
    Count { name: &'static str, count: u64, step: u64 },
    #[error("its samples = {samples} are too many for its step {step}")]
    Samples { samples: u64, step: u64 },
    #[error("its skipped samples are not in order")]
    Skipped,
    #[error("its loss_scale = {0} is not a positive number of fp32")]
    LossScale(f64),
    #[error("it lists no weights")]
    NoWeights,
    #[error("it lists {tensor}, which {optimizer} does not have")]
    ForeignTensor { tensor: &'static str, optimizer: &'static str },
    #[error("it lists {0} tensors of every parameter, some of them twice")]
    RepeatedTensors(usize),
    #[error("it is at step {step}, but has no {missing} of its parameters, so a run cannot resume from it")]
    MissingTensor { step: u64, missing: &'static str },
    #[error("it lists {files} files for {ranks} ranks")]
    TooManyFiles { files: usize, ranks: usize },
    #[error("{0:?} is not the name of a file in its folder")]
    FileName(String),
    #[error("it lists the file {0} twice")]
    RepeatedFile(String),
}

/// Fails at the first number that cannot be right. The plan has been checked when it was read, and the
/// places of slices are checked with the files.
pub(crate) fn check(manifest: &Manifest) -> Result<(), ContentError> {
    check_progress(&manifest.progress)?;
    check_stored_tensors(&manifest.stored_tensors, &manifest.plan, &manifest.progress)?;
    check_files(&manifest.files, manifest.plan.mesh.ranks())
}

fn check_progress(progress: &RunProgress) -> Result<(), ContentError> {
    // JSON has only finite losses, and any of them may be right.
    let RunProgress {
        step,
        samples,
        updates,
        loss_scale,
        good_steps,
        skipped_in_a_row,
        skipped,
        loss_first: _,
        validation_loss: _,
        spikes,
    } = progress;
    let (step, samples, loss_scale) = (*step, *samples, *loss_scale);
    if !spikes.skipped.is_sound() {
        return Err(ContentError::Skipped);
    }
    if step > MAX_STEPS {
        return Err(ContentError::Step(step));
    }
    let counts = [
        ("updates", updates),
        ("good_steps", good_steps),
        ("skipped_in_a_row", skipped_in_a_row),
        ("skipped", skipped),
    ];
    if let Some((name, &count)) = counts.into_iter().find(|(_, count)| **count > step) {
        return Err(ContentError::Count { name, count, step });
    }
    if samples > step * MAX_GLOBAL_BATCH {
        return Err(ContentError::Samples { samples, step });
    }
    // A checkpoint that was converted from other weights is at step 0 and has no loss scale. Devices hold it in fp32.
    let is_scale = (f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(&loss_scale);
    if is_scale || (step == 0 && loss_scale == 0.0) {
        return Ok(());
    }
    Err(ContentError::LossScale(loss_scale))
}

/// Every parameter has its weights alone, as in a converted model, or all tensors. A run that has trained needs its states.
fn check_stored_tensors(
    stored: &[StoredTensor],
    plan: &Plan,
    progress: &RunProgress,
) -> Result<(), ContentError> {
    let all = plan.stored_tensors();
    if let Some(foreign) = stored.iter().find(|tensor| !all.contains(tensor)) {
        let (tensor, optimizer) = (foreign.name(), plan.optimizer.kind.name());
        return Err(ContentError::ForeignTensor { tensor, optimizer });
    }
    let is_listed = |tensor: &StoredTensor| stored.contains(tensor);
    if !is_listed(&StoredTensor::Weights) {
        return Err(ContentError::NoWeights);
    }
    let listed = all.iter().filter(|tensor| is_listed(tensor)).count();
    if listed != stored.len() {
        return Err(ContentError::RepeatedTensors(stored.len()));
    }
    match all.into_iter().find(|tensor| !is_listed(tensor)) {
        Some(missing) if listed > 1 || progress.step > 0 => {
            Err(ContentError::MissingTensor { step: progress.step, missing: missing.name() })
        }
        _ => Ok(()),
    }
}

/// A rank writes one file.
fn check_files(files: &[FileRecord], ranks: usize) -> Result<(), ContentError> {
    if files.len() > ranks {
        return Err(ContentError::TooManyFiles { files: files.len(), ranks });
    }
    let plain = |name: &str| !name.is_empty() && !name.contains(['/', '\\', '\0']) && name != "..";
    let mut names = HashSet::new();
    for FileRecord { name, .. } in files {
        if !plain(name) {
            return Err(ContentError::FileName(name.clone()));
        }
        if !names.insert(name) {
            return Err(ContentError::RepeatedFile(name.clone()));
        }
    }
    Ok(())
}

//! Checks whether a run may resume from a checkpoint, at which samples, and how its data has changed.

use std::path::{Path, PathBuf};

use kintsugi_plan::{Data, DataSource, OptimizerKind, Plan, Unit};
use kintsugi_spec::output::with_suffix;

use crate::paths::relative_to_current_folder;
use crate::{Checkpoint, CheckpointError};

/// Fields of a model that do not affect its parameters or what they compute.
const FREE: [&str; 3] = ["name", "vocab_multiple", "init_std"];

impl Checkpoint {
    /// Fails if a plan has another model.
    pub fn check_model(&self, plan: &Plan) -> Result<(), CheckpointError> {
        let fields = |plan: &Plan| serde_json::to_value(&plan.model).expect("a model has string keys");
        let (ours, theirs) = (fields(plan), fields(self.plan()));
        // Only learned positions are parameters.
        let learned = plan.model.has_learned_positions();
        let free = |key: &str| FREE.contains(&key) || (key == "positions" && !learned);
        for (key, ours) in ours.as_object().expect("a model is an object") {
            let theirs = &theirs[key];
            if free(key) || theirs == ours {
                continue;
            }
            let reason =
                format!("it has model.{key} = {theirs}, but this run has {ours}; the model must be the same");
            return Err(CheckpointError::new(self.path(), reason));
        }
        Ok(())
    }

    /// Whether it is the checkpoint of the plan's last step. Fails if the plan has another model.
    pub fn is_finished(&self, plan: &Plan) -> Result<bool, CheckpointError> {
        self.check_model(plan)?;
        Ok(self.progress().step == plan.run.steps)
    }

    /// The number of global batches of the plan's size that the run has consumed. Fails if the plan cannot resume from here.
    pub fn batches_consumed(&self, plan: &Plan) -> Result<u64, CheckpointError> {
        self.check_model(plan)?;
        let refuse = |reason| Err(CheckpointError::new(self.path(), reason));
        let (step, steps) = (self.progress().step, plan.run.steps);
        if step >= steps {
            return refuse(format!(
                "it is already at step {step}; run.steps = {steps} leaves nothing to train"
            ));
        }
        let (theirs, ours) = (self.plan().batch.sequence, plan.batch.sequence);
        if theirs != ours {
            return refuse(format!(
                "it was trained with batch.sequence = {theirs}; with {ours} its position in the data is unknown"
            ));
        }
        self.check_optimizer(plan)?;
        self.check_frozen(plan)?;
        self.check_split(plan)?;
        let (samples, global) = (self.progress().samples, plan.batch.global as u64);
        if !samples.is_multiple_of(global) {
            return refuse(format!(
                "it has seen {samples} samples, which is not a multiple of batch.global = {global}; use {}",
                self.plan().batch.global
            ));
        }
        Ok(samples / global)
    }

    /// The changes of the plan's data, one sentence each. Training still resumes, but with other samples than an uninterrupted
    /// run.
    pub fn data_changes(&self, plan: &Plan) -> Vec<String> {
        let (before, step) = (self.plan(), self.progress().step);
        let mut changes = Vec::new();
        let mut report = |field: &str, was: String, is: String, meaning: &str| {
            if was != is {
                changes.push(format!("{field} = {is}, but it was {was} up to step {step}: {meaning}"));
            }
        };
        let (was, is) = (before.run.seed.to_string(), plan.run.seed.to_string());
        report("run.seed", was, is, "from now on samples come in another order, and some are repeated");
        let place = format!("it continues at sample {} of the new order", self.progress().samples);
        report("data.source", sources(&before.data), sources(&plan.data), &place);
        if let (Data::Tokens(before), Data::Tokens(now)) = (&before.data, &plan.data)
            && let (Some(was), Some(is)) = (before.split, now.split)
            && shares_a_file(&before.sources, &now.sources)
        {
            let (was, is) = (was.to_string(), is.to_string());
            report(
                "data.split",
                was,
                is,
                "samples that were kept for validation are trained on, and the order of samples changes",
            );
        }
        let own = |plan: &Plan| match &plan.data {
            Data::Tokens(tokens) if !tokens.validation.is_empty() => blend(&tokens.validation),
            _ => "none".to_owned(),
        };
        report(
            "data.validation",
            own(before),
            own(plan),
            "from now on validation losses are measured on other text",
        );
        let [was, is] = [before, plan].map(Plan::masks_documents);
        let visible = if is { "its own document only" } else { "earlier documents too" };
        let visible = format!("from now on a token attends to {visible}");
        report("data.mask_documents", was.to_string(), is.to_string(), &visible);
        changes
    }

    /// Fails if the optimizer of the plan has other states than those in the checkpoint.
    fn check_optimizer(&self, plan: &Plan) -> Result<(), CheckpointError> {
        let (theirs, ours) = (self.plan().optimizer.kind, plan.optimizer.kind);
        let has_states = self.stored_tensors().len() > 1 || self.progress().step > 0;
        if !has_states || (theirs.name() == ours.name() && theirs.states() == ours.states()) {
            return Ok(());
        }
        let (was, is) = (describe(theirs), describe(ours));
        let reason = format!(
            "it was trained with {was}, and {is} has other states; use the same optimizer, or start from the weights alone \
             by model.init"
        );
        Err(CheckpointError::new(self.path(), reason))
    }

    /// Fails if the plan trains a unit that was frozen, whose states the checkpoint does not have.
    fn check_frozen(&self, plan: &Plan) -> Result<(), CheckpointError> {
        let trained_now = |unit: &Unit| self.plan().is_frozen(*unit) && !plan.is_frozen(*unit);
        let Some(unit) = plan.units().into_iter().find(trained_now) else { return Ok(()) };
        let reason = format!(
            "it was trained with {unit} frozen and has no states of it; freeze it again, or start from the weights alone by \
             model.init"
        );
        Err(CheckpointError::new(self.path(), reason))
    }

    /// Fails if the validation split has tokens that the model was trained on.
    fn check_split(&self, plan: &Plan) -> Result<(), CheckpointError> {
        let (Data::Tokens(before), Data::Tokens(now)) = (&self.plan().data, &plan.data) else {
            return Ok(());
        };
        if let Some(file) =
            now.validation.iter().find(|file| shares_a_file(&before.sources, std::slice::from_ref(*file)))
        {
            let reason =
                format!("it was trained on {}, which is now in data.validation", file.path.display());
            return Err(CheckpointError::new(self.path(), reason));
        }
        // Without a value the split is in the token files, which this crate does not read.
        let (Some(was), Some(is)) = (before.split, now.split) else { return Ok(()) };
        if is <= was || !shares_a_file(&before.sources, &now.sources) {
            return Ok(());
        }
        let reason = format!(
            "it was trained with data.split = {was}; with {is} it would be validated on samples that it was trained on"
        );
        Err(CheckpointError::new(self.path(), reason))
    }
}

/// An optimizer in the keys that decide its states.
fn describe(kind: OptimizerKind) -> String {
    let name = format!("optimizer.name = \"{}\"", kind.name());
    match kind {
        OptimizerKind::AdamW { .. } | OptimizerKind::Lion { .. } | OptimizerKind::Muon { .. } => name,
        OptimizerKind::Sgd { momentum, .. } => format!("{name} and momentum = {momentum}"),
    }
}

/// The sources of a dataset as text, with shares instead of weights: 3 and 1 are the same as 6 and 2.
fn sources(data: &Data) -> String {
    match data {
        Data::Demo => "\"demo\"".to_owned(),
        Data::Tokens(tokens) => blend(&tokens.sources),
    }
}

fn blend(sources: &[DataSource]) -> String {
    let whole: f64 = sources.iter().map(|source| source.weight).sum();
    let one = |path: &Path| format!("\"{}\"", relative_to_current_folder(path).display());
    match sources {
        [source] => one(&source.path),
        sources => {
            let share = |weight: f64| (1000.0 * weight / whole).round() / 10.0;
            let parts =
                sources.iter().map(|source| format!("{} % {}", share(source.weight), one(&source.path)));
            parts.collect::<Vec<_>>().join(" and ")
        }
    }
}

fn shares_a_file(one: &[DataSource], other: &[DataSource]) -> bool {
    let files = |sources: &[DataSource]| -> Vec<PathBuf> {
        sources.iter().map(|source| file(&source.path)).collect()
    };
    let others = files(other);
    files(one).iter().any(|file| others.contains(file))
}

/// The canonical path of the token file of a source, if the file still exists.
fn file(source: &Path) -> PathBuf {
    let bin = match source.extension() {
        Some(suffix) if suffix == "bin" || suffix == "idx" => source.with_extension("bin"),
        _ => with_suffix(source, ".bin"),
    };
    bin.canonicalize().unwrap_or(bin)
}

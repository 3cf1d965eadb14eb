//! Whether a run may go on from a checkpoint, and with which samples.

use kintsugi_plan::Plan;
use kintsugi_spec::Family;

use crate::{Checkpoint, CheckpointError};

/// What of a model does not decide its parameters or what they compute.
const FREE: [&str; 2] = ["name", "vocab_multiple"];

impl Checkpoint {
    /// Refuses a plan of another model.
    pub fn check_model(&self, plan: &Plan) -> Result<(), CheckpointError> {
        let fields = |plan: &Plan| serde_json::to_value(&plan.model).expect("a model has string keys");
        let (ours, theirs) = (fields(plan), fields(self.plan()));
        // Only learned positions are parameters.
        let free =
            |key: &str| FREE.contains(&key) || (key == "positions" && plan.model.family != Family::Gpt);
        for (key, ours) in ours.as_object().expect("a model is an object") {
            let theirs = &theirs[key];
            if free(key) || theirs == ours {
                continue;
            }
            let reason =
                format!("it has model.{key} = {theirs}, and this run {ours}; the model must be the same");
            return Err(CheckpointError::new(self.path(), reason));
        }
        Ok(())
    }

    /// Refuses a plan that cannot go on from here; gives how many global batches of the plan's size lie behind.
    pub fn batches_behind(&self, plan: &Plan) -> Result<u64, CheckpointError> {
        self.check_model(plan)?;
        let refuse = |reason| Err(CheckpointError::new(self.path(), reason));
        let (step, steps) = (self.progress().step, plan.run.steps);
        if step >= steps {
            return refuse(format!("it has {step} steps, and run.steps = {steps} asks for no more"));
        }
        let (theirs, ours) = (self.plan().batch.sequence, plan.batch.sequence);
        if theirs != ours {
            return refuse(format!(
                "it was trained with batch.sequence = {theirs}, and with {ours} its place in the data is lost"
            ));
        }
        let (samples, global) = (self.progress().samples, plan.batch.global as u64);
        if !samples.is_multiple_of(global) {
            return refuse(format!(
                "it has seen {samples} samples, which is no multiple of batch.global = {global}; use {}",
                self.plan().batch.global
            ));
        }
        Ok(samples / global)
    }
}

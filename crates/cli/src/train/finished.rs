//! A resumed run that has already finished, as after a job was requeued. Its files stay as they are.

use std::path::PathBuf;

use kintsugi_plan::Plan;
use kintsugi_run::files::SUMMARY;
use kintsugi_run::missing_lines;
use kintsugi_spec::input;
use serde_json::Value;

use crate::failure::Failure;
use crate::output::{self, Output};

/// A run whose last checkpoint is that of its last step.
pub struct FinishedRun {
    out: PathBuf,
    steps: u64,
    /// The contents of `summary.json`, if the run lived to write it.
    summary: Option<Value>,
}

impl FinishedRun {
    /// The finished run of a plan.
    pub fn new(plan: &Plan) -> Self {
        let text = input::bytes(&plan.run.out.join(SUMMARY), input::MAX_WRITTEN_BY_PROGRAMS);
        let summary = text.ok().and_then(|text| serde_json::from_slice(&text).ok());
        FinishedRun { out: plan.run.out.clone(), steps: plan.run.steps, summary }
    }

    /// Says that nothing is left to do, and what is missing. The JSON output is the summary of the run, or null if there is
    /// none.
    pub fn report(&self, output: Output) -> Result<(), Failure> {
        let FinishedRun { out, steps, summary } = self;
        let no_summary = summary.is_none().then(|| {
            let path = out.join(SUMMARY);
            format!("{} is missing or damaged: the run was ended after its last checkpoint", path.display())
        });
        for warning in [missing_lines(out, *steps), no_summary].into_iter().flatten() {
            output::stderr(&format!("warning: {warning}"));
        }
        let out = out.display();
        output.text(&format!(
            "finished {out} is at step {steps} of {steps}: nothing is left to train; a larger run.steps continues the run\n"
        ))?;
        output.result(summary)
    }
}

//! The metrics of a run as TensorBoard's event files (`run.log`).

use std::io;
use std::path::PathBuf;

use kintsugi_plan::{LogFormat, Plan};
use kintsugi_report::tensorboard::EventFile;
use kintsugi_run::files::EVENTS;
use kintsugi_run::{MetricsLine, now};
use serde_json::Value;

use crate::failure::{ErrorContext, Failure};

/// The event file of a run, open.
pub struct Events {
    folder: PathBuf,
    file: EventFile,
}

impl Events {
    /// Starts a file after the first `steps` steps, if the plan asks for one. Its first text is the configuration.
    pub fn create(plan: &Plan, steps: u64) -> Result<Option<Self>, Failure> {
        if !plan.run.log.contains(&LogFormat::Tensorboard) {
            return Ok(None);
        }
        let folder = plan.run.out.join(EVENTS);
        let time = now();
        // TensorBoard shows texts as Markdown.
        let config = format!("```toml\n{}```\n", plan.to_toml());
        let created = EventFile::create(&folder, time, steps)
            .and_then(|mut file| file.text(time, steps, "config", &config).map(|()| file));
        let file = created.map_err(|error| Failure::file("create", &folder, error))?;
        Ok(Some(Events { folder, file }))
    }

    /// Adds every number of a step, under its name in `metrics.jsonl`. If they cannot be written, they are kept in memory
    /// and written with those of the next step.
    pub fn step(&mut self, line: &MetricsLine) -> Result<(), Failure> {
        let value = serde_json::to_value(line).expect("reports have string keys");
        let mut scalars = Vec::new();
        flatten("", &value, &mut scalars);
        scalars.retain(|(name, _)| !["schema", "time", "step"].contains(&name.as_str()));
        let written = self.file.scalars(line.time, line.report.step, &scalars);
        written.map_err(|error| self.failed(error))
    }

    /// Writes the steps that could not be written before.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.file.flush().map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> Failure {
        Failure::run(ErrorContext::new(format!("cannot write to {}", self.folder.display()), error))
    }
}

/// The numbers of a value, and whether something is true as 0 and 1; those inside another under both names.
fn flatten(name: &str, value: &Value, into: &mut Vec<(String, f64)>) {
    match value {
        Value::Number(number) => into.extend(number.as_f64().map(|number| (name.to_owned(), number))),
        Value::Bool(is) => into.push((name.to_owned(), f64::from(u8::from(*is)))),
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}/{field}") };
                flatten(&name, value, into);
            }
        }
        Value::Null | Value::String(_) | Value::Array(_) => {}
    }
}

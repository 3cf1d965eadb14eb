//! How a command fails. The kind of failure decides the exit code.

use std::fmt::{self, Display, Formatter};
use std::process::ExitCode;

use kintsugi_checkpoint::CheckpointError;
use kintsugi_data::DataError;
use kintsugi_engine::{GenerateError, ThreadError, TrainError};
use kintsugi_plan::config::ConfigError;

use crate::output;

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// An error in the configuration, an argument or a file of the user.
    Mistake(String),
    /// The run failed.
    Run(String),
    /// The failure has already been printed.
    Shown,
}

impl Failure {
    /// A file or folder that cannot be used: `cannot write out/summary.json: permission denied`.
    pub fn file(action: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Failure::Mistake(format!("cannot {action} {}: {error}", path.display()))
    }

    /// Prints it in one sentence, and returns the exit code.
    pub fn report(&self) -> ExitCode {
        let sentence = |text: &dyn Display| output::stderr(&format!("error: {text}"));
        match self {
            Failure::Mistake(text) => {
                sentence(text);
                ExitCode::from(2)
            }
            Failure::Run(text) => {
                sentence(text);
                ExitCode::FAILURE
            }
            Failure::Shown => ExitCode::FAILURE,
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        match self {
            Failure::Mistake(text) | Failure::Run(text) => f.write_str(text),
            Failure::Shown => f.write_str("see above"),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Failure::Mistake(error.to_string())
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Failure::Mistake(error.to_string())
    }
}

impl From<ThreadError> for Failure {
    fn from(error: ThreadError) -> Self {
        Failure::Run(error.to_string())
    }
}

impl From<GenerateError> for Failure {
    fn from(error: GenerateError) -> Self {
        match error {
            GenerateError::Job(error) => Failure::Run(error.to_string()),
            mistake => Failure::Mistake(mistake.to_string()),
        }
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Data(error) => error.into(),
            error => Failure::Run(error.to_string()),
        }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        match error {
            DataError::Thread { .. } => Failure::Run(error.to_string()),
            mistake => Failure::Mistake(mistake.to_string()),
        }
    }
}

//! How a command fails. The kind of failure decides the exit code.

use std::fmt::{self, Display, Formatter};

use kintsugi_checkpoint::CheckpointError;
use kintsugi_comm::RankFailure;
use kintsugi_data::DataError;
use kintsugi_engine::{GenerateError, ThreadError, TrainError};
use kintsugi_plan::config::ConfigError;
use kintsugi_run::RunFolderError;

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
    /// All processes of the job know of this failure, and end by themselves. This process prints it.
    Agreed(Box<Failure>),
    /// Another process of the job prints the failure. All of them end with this exit code.
    ReportedElsewhere(u8),
}

impl Failure {
    /// A file or folder that cannot be used: `cannot write out/summary.json: permission denied`.
    pub fn file(action: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Failure::Mistake(format!("cannot {action} {}: {error}", path.display()))
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Mistake(_) => 2,
            Failure::Run(_) | Failure::Shown => 1,
            Failure::Agreed(failure) => failure.code(),
            Failure::ReportedElsewhere(code) => *code,
        }
    }

    /// Whether the other processes of the job do not know of it, so that this one must end them.
    pub fn ends_others(&self) -> bool {
        !matches!(self, Failure::Agreed(_) | Failure::ReportedElsewhere(_))
    }

    /// Prints it in one sentence.
    pub fn report(&self) {
        match self {
            Failure::Mistake(text) | Failure::Run(text) => output::stderr(&format!("error: {text}")),
            Failure::Agreed(failure) => failure.report(),
            Failure::Shown | Failure::ReportedElsewhere(_) => {}
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        match self {
            Failure::Mistake(text) | Failure::Run(text) => f.write_str(text),
            Failure::Shown => f.write_str("see above"),
            Failure::Agreed(failure) => failure.fmt(f),
            Failure::ReportedElsewhere(_) => f.write_str("another process has failed"),
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

impl From<RunFolderError> for Failure {
    fn from(error: RunFolderError) -> Self {
        match error {
            RunFolderError::Metrics { .. } => Failure::Run(error.to_string()),
            mistake => Failure::Mistake(mistake.to_string()),
        }
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

impl From<RankFailure> for Failure {
    fn from(failure: RankFailure) -> Self {
        Failure::Run(failure.to_string())
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

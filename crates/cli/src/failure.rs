//! How a command fails. The kind of failure decides the exit code.
//!
//! Errors keep their sources. The sentence of an error contains that of its source, so a failure prints one sentence.

use std::error::Error;
use std::io;
use std::path::Path;

use kintsugi_checkpoint::CheckpointError;
use kintsugi_comm::RankFailure;
use kintsugi_data::DataError;
use kintsugi_engine::{GenerateError, ThreadError, TrainError};
use kintsugi_plan::config::ConfigError;
use kintsugi_run::RunFolderError;
use kintsugi_spec::Cause;

use crate::output;

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An error in the configuration, an argument or a file of the user.
    #[error(transparent)]
    Mistake(Cause),
    /// The run failed.
    #[error(transparent)]
    Run(Cause),
    /// The failure has already been printed.
    #[error("see above")]
    Shown,
    /// All processes of the job know of this failure, and end by themselves. This process prints it.
    #[error(transparent)]
    Agreed(Box<Failure>),
    /// Another process of the job prints the failure. All of them end with this exit code.
    #[error("another process has failed")]
    ReportedElsewhere(u8),
}

/// An error, and what the program did when it happened: `cannot serve pages: Too many open files`.
#[derive(Debug, thiserror::Error)]
#[error("{context}: {cause}{advice}")]
pub struct ErrorContext {
    context: String,
    #[source]
    cause: Cause,
    /// Empty, or what follows the cause.
    advice: String,
}

impl ErrorContext {
    /// An error that happened in this context.
    pub fn new(context: impl Into<String>, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        ErrorContext { context: context.into(), cause: Cause::new(cause), advice: String::new() }
    }

    /// The same with what to do, or what to know, after the cause.
    pub fn advise(self, advice: &str) -> Self {
        ErrorContext { advice: format!("; {advice}"), ..self }
    }
}

impl Failure {
    /// A mistake of the user: a sentence, or any error.
    pub fn mistake(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Failure::Mistake(Cause::new(cause))
    }

    /// A failure of the run: a sentence, or any error.
    pub fn run(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Failure::Run(Cause::new(cause))
    }

    /// A file or folder that cannot be used: `cannot write out/summary.json: permission denied`.
    pub fn file(action: &str, path: &Path, error: io::Error) -> Self {
        Failure::mistake(ErrorContext::new(format!("cannot {action} {}", path.display()), error))
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
            Failure::Mistake(cause) | Failure::Run(cause) => output::stderr(&format!("error: {cause}")),
            Failure::Agreed(failure) => failure.report(),
            Failure::Shown | Failure::ReportedElsewhere(_) => {}
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Failure::mistake(error)
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        Failure::mistake(error)
    }
}

impl From<RunFolderError> for Failure {
    fn from(error: RunFolderError) -> Self {
        match error {
            RunFolderError::Metrics { .. } => Failure::run(error),
            mistake => Failure::mistake(mistake),
        }
    }
}

impl From<ThreadError> for Failure {
    fn from(error: ThreadError) -> Self {
        Failure::run(error)
    }
}

impl From<RankFailure> for Failure {
    fn from(failure: RankFailure) -> Self {
        Failure::run(failure)
    }
}

impl From<GenerateError> for Failure {
    fn from(error: GenerateError) -> Self {
        match error {
            GenerateError::Job(error) => Failure::run(error),
            mistake => Failure::mistake(mistake),
        }
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Data(error) => error.into(),
            error => Failure::run(error),
        }
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        match error {
            DataError::Thread { .. } => Failure::run(error),
            mistake => Failure::mistake(mistake),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_its_sources_and_prints_each_once() {
        let error = io::Error::from_raw_os_error(13);
        let sentence = error.to_string();
        let failure = Failure::file("write", Path::new("out.svg"), error);
        assert_eq!((failure.to_string(), failure.code()), (format!("cannot write out.svg: {sentence}"), 2));
        let mut source = failure.source();
        while let Some(error) = source.filter(|error| !error.is::<io::Error>()) {
            source = error.source();
        }
        assert!(source.is_some(), "{failure:?}");
    }
}

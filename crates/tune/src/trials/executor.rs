//! What runs a trial.

use std::error::Error;
use std::io;
use std::path::Path;

use super::record::{Ending, StepFigures};

/// A trial to run.
#[derive(Clone, Debug)]
pub struct TrialRequest {
    /// Its number, from 1.
    pub trial: usize,
    /// The index of its candidate.
    pub candidate: usize,
    /// Its configuration, as TOML.
    pub config: String,
    /// Its number of ranks.
    pub ranks: usize,
    /// A trial whose steps take longer than this many seconds may be stopped.
    pub stop_above: Option<f64>,
}

/// What a trial reported.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialReport {
    /// How it ended.
    pub ending: Ending,
    /// What was measured.
    pub measured: StepFigures,
    /// How many steps were measured.
    pub steps: usize,
    /// Why it failed.
    pub message: Option<String>,
    /// Seconds that it took.
    pub wall_s: f64,
}

/// An error of any kind.
pub type AnyError = Box<dyn Error + Send + Sync>;

/// Why a trial has no outcome. That is not the trial's doing, so nothing is learned from it.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The tuning was asked to stop.
    #[error("the tuning was stopped")]
    Stopped,
    /// The allocation has too few nodes for the trial.
    #[error(
        "trial {trial} needs {nodes} nodes, and the allocation has fewer; restrict the space, or ask for more nodes"
    )]
    Nodes {
        /// Its number.
        trial: usize,
        /// Its nodes.
        nodes: usize,
    },
    /// A file of the trial cannot be written.
    #[error("cannot write {path}: {error}")]
    Write {
        /// The file.
        path: String,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The program cannot be started.
    #[error("cannot start {program}: {error}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The configuration of the trial is refused, which is a bug.
    #[error("trial {trial} is not a valid configuration: {error}")]
    Config {
        /// Its number.
        trial: usize,
        /// Why.
        #[source]
        error: AnyError,
    },
}

/// Runs trials.
pub trait Executor: Sync {
    /// How many trials it runs at the same time.
    fn slots(&self) -> usize {
        1
    }

    /// Runs a trial to its end.
    fn run(&self, request: &TrialRequest) -> Result<TrialReport, ExecutorError>;
}

impl ExecutorError {
    /// A file that cannot be written.
    pub fn write(path: &Path, error: io::Error) -> Self {
        ExecutorError::Write { path: path.display().to_string(), error }
    }
}

impl TrialReport {
    /// A trial that failed.
    pub fn failed(ending: Ending, message: String, wall_s: f64) -> Self {
        TrialReport { ending, measured: StepFigures::default(), steps: 0, message: Some(message), wall_s }
    }
}

//! Finds a strategy by trials: the planner's predictions as a prior, and a few measurements on top.
//!
//! [`tune`] is the loop. It asks the [`Models`] which candidate to try, an [`Executor`] to run it, and writes what came out to
//! a [`Journal`].

mod acquire;
pub mod benchmark;
mod cholesky;
mod executor;
mod importance;
mod learn;
mod measure;
mod nodes;
mod objective;
mod proc;
mod processes;
mod random;
mod record;
mod simulated;
mod space;
mod surrogate;
mod tuner;

pub use acquire::{Known, Models, Trials};
pub use executor::{AnyError, Executor, ExecutorError, TrialReport, TrialRequest};
pub use importance::{Importance, importance, in_words};
pub use learn::{Learned, Lesson, MIN_LESSONS, MachineConstant, learn};
pub use nodes::{NodeLease, NodePool};
pub use objective::{Constraints, Objective};
pub use processes::{Processes, trials_folder};
pub use record::{Ending, Journal, Record, SCHEMA, StepFigures, TRIALS, parse_trials, read};
pub use simulated::Simulated;
pub use space::{Point, Proposal, Setting, Space, Values};
pub use surrogate::{Belief, Observation, Prior, Process, ProcessParameters};
pub use tuner::{TrialCandidate, TuneError, TuneEvent, Tuning, best, models, seconds_left, tune};

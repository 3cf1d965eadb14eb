//! The folder of a run: the names of its files, and the types in them.
//!
//! `train` writes the folder; `report`, `watch` and others read it while the run goes on. Readers are tolerant: a number that is not
//! finite is `null` in a file, a missing value has a default, and lines that cannot be read are counted.
#![forbid(unsafe_code)]

mod columns;
mod error;
pub mod files;
mod flight;
mod follow;
mod gpu_state;
mod metrics;
mod metrics_line;
mod open_folder;
mod output_folder;
mod restarts;
mod rollbacks;
mod run_folder;
mod status;
mod step_report;
mod straggler;
mod summary;
mod verdict;

pub use columns::{Columns, MAX_METRICS};
pub use error::RunFolderError;
pub use flight::{Flight, FlightRecorder, RecordedOp};
pub use follow::MetricsFollower;
pub use gpu_state::GpuState;
pub use metrics::{Metrics, missing_lines};
pub use metrics_line::{MetricsLine, now};
pub use open_folder::{FolderPath, OpenFolder};
pub use output_folder::OutputFolder;
pub use restarts::{FolderState, Restart, RestartSummary, read_restarts, write_restarts};
pub use rollbacks::{Rollback, Spike, SpikeFigures, read_rollbacks, skipped_samples};
pub use run_folder::{MAX_TRACE, RunFolder, RunState, has_metrics, is_run};
pub use status::{NewestCheckpoint, RunStatus};
pub use step_report::StepReport;
pub use straggler::Straggler;
pub use summary::{Figures, RollbackSummary, RunSummary, SavingSummary, Summary};
pub use verdict::{LastOps, Verdict};

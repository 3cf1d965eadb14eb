//! How a plan is run: for how long, where, on which device, and what it keeps.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// Steps.
    pub steps: u64,
    /// Seed of weights and data.
    pub seed: u64,
    /// Output folder.
    pub out: PathBuf,
    /// What the run resumes from.
    pub resume: Resume,
    /// Steps between checkpoints; 0 for one at the end only.
    pub checkpoint_every: u64,
    /// How many of the newest checkpoints to keep; 0 to save none.
    pub keep: u64,
    /// How many checkpoints with the lowest validation losses to keep besides the newest. Unless it is 0, a checkpoint is
    /// saved after every evaluation.
    pub keep_best: u64,
    /// Steps between lines of progress, where they were given.
    pub log_every: Option<u64>,
    /// What the metrics are written as, beside `metrics.jsonl`.
    pub log: Vec<LogFormat>,
    /// Steps between evaluations; 0 for none.
    pub eval_every: u64,
    /// Tokens of the validation split that an evaluation reads, or all if there are fewer.
    pub eval_tokens: u64,
    /// Consecutive non-finite steps before the run stops.
    pub max_skipped: u64,
    /// Seconds that a rank waits for another before the run fails.
    pub communication_timeout: u64,
    /// Whether repeated runs are bit-identical.
    pub deterministic: bool,
    /// Whether a rank whose host never waits in a step captures its step as a graph and replays it.
    pub graph: bool,
    /// The device that the ranks run on. It is never left open: a checkpoint says what its run has used.
    pub device: DeviceKind,
    /// Transport.
    pub transport: Transport,
    /// Channels of a communicator of NCCL, where they were given.
    pub nccl_channels: Option<u64>,
    /// Bytes of a buffer of NCCL, where they were given.
    pub nccl_buffer: Option<u64>,
}

/// What a run resumes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Nothing: it starts at step 0.
    No,
    /// The newest valid checkpoint in its output folder.
    Newest,
    /// This checkpoint, or the newest valid one in this folder.
    From(PathBuf),
}

/// A format of metrics that other programs read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// TensorBoard's event files.
    Tensorboard,
}

/// Kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// This processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// How ranks communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Every rank is a process if a launcher started several, and a thread otherwise.
    Auto,
    /// Every rank is a thread of one process.
    Threads,
    /// Every rank is a process, and they communicate by MPI.
    Mpi,
    /// Every rank is a process with a GPU, and they communicate by NCCL.
    Nccl,
}

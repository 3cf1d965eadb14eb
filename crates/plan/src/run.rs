//! How a plan is run: for how long, where, on which device, and what it keeps.

use std::path::PathBuf;

use kintsugi_spec::Hardware;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::Batch;
use crate::config::ConfigError;
use crate::config::error::{invalid, short};
use crate::config::keys::{MAX_STEPS, RawRun};
use crate::config::words::DeviceName;

/// The run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// Steps. If the length is given in epochs, the data decide them, and these are none that count.
    pub steps: u64,
    /// The length in passes over the data, where it was given so. [`Run::with_steps`] replaces it.
    #[serde(skip)]
    pub epochs: Option<f64>,
    /// Seed of weights and data.
    pub seed: u64,
    /// Output folder.
    pub out: PathBuf,
    /// What the run resumes from.
    pub resume: Resume,
    /// Steps between checkpoints; 0 for one at the end only.
    pub checkpoint_every: u64,
    /// Steps between copies of states in the memory of a neighbour node; 0 for none.
    pub replicate_every: u64,
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
    /// What follows a spike of the loss or of the gradient norm.
    pub on_spike: OnSpike,
    /// The steps before a step that decide whether it is a spike.
    pub spike_window: usize,
    /// By how many deviations a spike is above the median of these steps.
    pub spike_limit: f64,
    /// Batches that are skipped after a spike, the last of them that of the spike.
    pub spike_batches: u64,
    /// How often the run goes back to a checkpoint.
    pub max_rollbacks: u64,
    /// Seconds that a rank waits for another before the run fails.
    pub communication_timeout: u64,
    /// How many times as long as the longest op of the last steps a rank waits in a step; 0 if only the timeout counts.
    pub hang_factor: u64,
    /// Steps between checks of weights and states for silent corruption; 0 for none.
    pub checksum_every: u64,
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

impl Run {
    /// What the keys of `[run]` say. If they do not say the device, it is the one of the cluster, whose devices are of this `kind`.
    pub(crate) fn resolve(raw: &RawRun, batch: Batch, kind: Option<Hardware>) -> Result<Self, ConfigError> {
        let device = DeviceKind::given(raw).unwrap_or(match kind {
            Some(Hardware::Gpu) => DeviceKind::Cuda,
            Some(Hardware::Cpu) | None => DeviceKind::Cpu,
        });
        Ok(Run {
            steps: steps(raw, batch)?,
            epochs: raw.epochs()?,
            seed: raw.seed(),
            out: folder(raw.out())?,
            resume: raw.resume.clone().unwrap_or(Resume::No),
            checkpoint_every: raw.checkpoint_every(),
            replicate_every: raw.replicate_every()?,
            keep: raw.keep(),
            keep_best: raw.keep_best(),
            log_every: raw.log_every()?,
            log: log(&raw.log()),
            eval_every: raw.eval_every(),
            eval_tokens: raw.eval_tokens()?,
            max_skipped: raw.max_skipped()?,
            on_spike: on_spike(raw)?,
            spike_window: raw.spike_window()?,
            spike_limit: raw.spike_limit()?,
            spike_batches: raw.spike_batches()?,
            max_rollbacks: raw.max_rollbacks()?,
            communication_timeout: raw.communication_timeout()?,
            hang_factor: raw.hang_factor()?,
            checksum_every: raw.checksum_every()?,
            // Determinism is free on a CPU, but not on a GPU.
            deterministic: raw.deterministic.unwrap_or(device == DeviceKind::Cpu),
            // Graphs have known faults in several versions of ROCm.
            graph: raw.graph.unwrap_or(device != DeviceKind::Hip),
            device,
            transport: transport(raw.transport(), device)?,
            nccl_channels: raw.nccl_channels()?,
            nccl_buffer: raw.nccl_buffer()?,
        })
    }

    /// The same run with its length in steps.
    #[must_use]
    pub fn with_steps(self, steps: u64) -> Self {
        Run { steps, epochs: None, ..self }
    }

    /// Why no checkpoint has a validation loss although the best are to be kept, as a sentence.
    pub(crate) fn keep_best_note(&self) -> Option<String> {
        let missing = match (self.keep, self.eval_every) {
            (0, _) => "run.keep = 0 saves no checkpoints",
            (_, 0) => "run.eval_every = 0 evaluates nothing",
            _ => return None,
        };
        (self.keep_best > 0).then(|| format!("run.keep_best = {} has no effect: {missing}", self.keep_best))
    }
}

/// The steps of a run, whose length is given in steps, tokens or epochs.
fn steps(raw: &RawRun, batch: Batch) -> Result<u64, ConfigError> {
    let (steps, tokens, epochs) = (raw.steps()?, raw.tokens()?, raw.epochs()?);
    let both = |other: String| format!("and {other} both say how long the run is; leave one out");
    let of_steps = raw.steps.map(|steps| format!("run.steps = {steps}"));
    let of_tokens = tokens.map(|tokens| format!("run.tokens = {tokens}"));
    if let (Some(epochs), Some(other)) = (epochs, of_tokens.or_else(|| of_steps.clone())) {
        return Err(invalid("run.epochs", short(epochs), both(other)));
    }
    let Some(tokens) = tokens else { return Ok(steps) };
    if let Some(other) = of_steps {
        return Err(invalid("run.tokens", tokens, both(other)));
    }
    let of_tokens = tokens.div_ceil((batch.global * batch.sequence) as u64);
    if of_tokens > MAX_STEPS {
        let rule = format!("is {of_tokens} steps, but a run has at most {MAX_STEPS}; raise batch.global");
        return Err(invalid("run.tokens", tokens, rule));
    }
    Ok(of_tokens)
}

/// What follows a spike. A run that goes back to checkpoints must save some.
fn on_spike(raw: &RawRun) -> Result<OnSpike, ConfigError> {
    let key = match (raw.checkpoint_every(), raw.keep()) {
        (0, _) => "run.checkpoint_every",
        (_, 0) => "run.keep",
        _ => return Ok(raw.on_spike()),
    };
    match raw.on_spike() {
        OnSpike::Continue => Ok(OnSpike::Continue),
        OnSpike::Rollback => {
            let rule =
                format!("goes back to a checkpoint, and {key} = 0 saves none to go back to; set {key}");
            Err(invalid("run.on_spike", "\"rollback\"", rule))
        }
    }
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

/// What a run does after a spike of its loss or of its gradient norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnSpike {
    /// It continues.
    Continue,
    /// It goes back to the last good checkpoint and skips the batches of the spike.
    Rollback,
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
    /// An AMD GPU.
    Hip,
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

impl DeviceKind {
    /// Its name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Hip => "hip",
        }
    }

    /// Whether it is a GPU.
    pub fn is_gpu(self) -> bool {
        self != DeviceKind::Cpu
    }

    /// The device of a run if the configuration says it: by its key, or by a transport that only GPUs have.
    pub(crate) fn given(raw: &RawRun) -> Option<DeviceKind> {
        match (raw.device(), raw.transport()) {
            (DeviceName::Cpu, _) => Some(DeviceKind::Cpu),
            (DeviceName::Hip, _) => Some(DeviceKind::Hip),
            (DeviceName::Cuda, _) | (DeviceName::Auto, Transport::Nccl) => Some(DeviceKind::Cuda),
            (DeviceName::Auto, _) => None,
        }
    }
}

/// The transport, if ranks on this device have it.
fn transport(given: Transport, device: DeviceKind) -> Result<Transport, ConfigError> {
    if given == Transport::Nccl && device == DeviceKind::Cpu {
        let rule = "needs GPUs: set run.device = \"cuda\" or \"hip\", or use \"mpi\" or \"threads\"";
        return Err(invalid("run.transport", "\"nccl\"", rule));
    }
    Ok(given)
}

/// Every format once.
fn log(given: &[LogFormat]) -> Vec<LogFormat> {
    let mut formats = Vec::new();
    for &format in given {
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    formats
}

/// The output folder of a run.
fn folder(given: String) -> Result<PathBuf, ConfigError> {
    if given.is_empty() {
        return Err(invalid("run.out", "\"\"", "names no folder; \".\" is the one you are in"));
    }
    Ok(given.into())
}

impl<'de> Deserialize<'de> for Resume {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::Boolean(false) => Ok(Resume::No),
            toml::Value::Boolean(true) => Ok(Resume::Newest),
            toml::Value::String(path) if !path.is_empty() => Ok(Resume::From(path.into())),
            _ => Err(de::Error::custom("true, false or the path of a checkpoint")),
        }
    }
}

impl Serialize for Resume {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Resume::No => serializer.serialize_none(),
            Resume::Newest => serializer.serialize_bool(true),
            Resume::From(path) => serializer.collect_str(&path.display()),
        }
    }
}

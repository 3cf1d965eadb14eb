//! The names of the files in a run's folder. Its checkpoints are in a folder of their own, see `kintsugi_checkpoint`.

use std::path::{Path, PathBuf};

/// A line per step, written during the run.
pub const METRICS: &str = "metrics.jsonl";

/// The summary at the end.
pub const SUMMARY: &str = "summary.json";

/// The whole configuration, which repeats the run.
pub const CONFIG: &str = "config.toml";

/// What was lost by failures of ranks: a line per restart.
pub const RESTARTS: &str = "restarts.jsonl";

/// Which samples are skipped after loss spikes: a line per return to a checkpoint.
pub const ROLLBACKS: &str = "rollbacks.jsonl";

/// The configuration with the layout that a restart on fewer ranks has chosen.
pub const LAYOUT: &str = "layout.toml";

/// The folder of the flight recorders: a file of every rank with its last ops.
pub const FLIGHT: &str = "flight";

/// Why the job has failed: a line per failure.
pub const VERDICTS: &str = "verdicts.jsonl";

/// Where the trace of a step is looked for.
pub const TRACE: &str = "trace.json";

/// The folder of TensorBoard's event files.
pub const EVENTS: &str = "tensorboard";

/// The files that a run writes itself, except its checkpoints and its tokenizer.
pub fn written(out: &Path) -> [PathBuf; 9] {
    [CONFIG, METRICS, SUMMARY, EVENTS, RESTARTS, ROLLBACKS, LAYOUT, VERDICTS, FLIGHT]
        .map(|name| out.join(name))
}

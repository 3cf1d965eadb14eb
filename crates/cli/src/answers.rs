//! What `plan` and `plan --search` answer, as JSON, for callers in the same process: the Python package.

use std::path::PathBuf;

use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::output::json;
use crate::plan;

/// A configuration and the values that override its own, each as `table.key=value`.
pub struct Configuration {
    /// Where it is from.
    pub source: Source,
    /// The values of `--set`.
    pub sets: Vec<String>,
}

/// Where a configuration is from.
pub enum Source {
    /// The built-in demo.
    Demo,
    /// A file.
    File(PathBuf),
    /// The text of such a file.
    Text(String),
}

impl From<Configuration> for ConfigArguments {
    fn from(Configuration { source, sets }: Configuration) -> Self {
        match source {
            Source::Demo => ConfigArguments::new(None, None, sets),
            Source::File(path) => ConfigArguments::new(Some(path), None, sets),
            Source::Text(text) => ConfigArguments::of_text(text, sets),
        }
    }
}

/// What `kintsugi plan --json` prints.
pub fn plan(configuration: Configuration) -> Result<String, Failure> {
    plan::answer(&configuration.into()).map(|answer| json(&answer))
}

/// What `kintsugi plan --search --json` prints, for the values of `--only`, `--by` and `--top`.
pub fn search(
    configuration: Configuration,
    only: &[String],
    by: &str,
    top: usize,
) -> Result<String, Failure> {
    plan::search_answer(&configuration.into(), only, by, top)
}

/// The folder that a run of the configuration writes to. Fails as `train` does if the configuration is wrong.
pub fn output_folder(configuration: Configuration) -> Result<PathBuf, Failure> {
    Ok(ConfigArguments::from(configuration).plan()?.run.out)
}

//! `kintsugi watch --forward`: sends the metrics of a run to another program's service.
//!
//! The services have libraries for Python, so a small Python program (`forward.py`) calls them. This process follows the run and
//! writes its lines to that program.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use clap::ValueEnum;
use kintsugi_run::files::{CONFIG, SUMMARY};
use kintsugi_run::{MetricsFollower, is_run};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::failure::{ErrorContext, Failure};
use crate::output;
use crate::signals::stop_on_signal;

const PROGRAM: &str = include_str!("forward.py");

/// How long to wait before looking for new steps.
const PAUSE: Duration = Duration::from_millis(300);

/// Where metrics are sent.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Service {
    /// Weights & Biases, by its library and its variables (`WANDB_PROJECT`, `WANDB_MODE`, …)
    Wandb,
    /// `MLflow`, by its library and its variables (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`, …)
    Mlflow,
}

impl Service {
    fn name(self) -> &'static str {
        match self {
            Service::Wandb => "wandb",
            Service::Mlflow => "mlflow",
        }
    }
}

/// Sends a run until it ends, or until a signal.
pub fn forward(run: &Path, service: Service, python: &Path) -> Result<(), Failure> {
    if !is_run(run) {
        let text = format!("{} is not the folder of a run: --forward sends one run", run.display());
        return Err(Failure::mistake(text));
    }
    let stop = stop_on_signal()?;
    let mut child = start(service, python)?;
    let mut lines = MetricsFollower::new(run);
    let mut any = write(&mut child, &description(run)?)?;
    while any {
        // The summary is written last, so the lines that are read after it are all.
        let summary = read_json(&run.join(SUMMARY))?;
        for line in lines.lines().map_err(|error| Failure::file("read", run, error))? {
            any &= write(&mut child, &line)?;
        }
        if let Some(summary) = summary {
            write(&mut child, &json!({ "summary": summary }).to_string())?;
            break;
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
        sleep(PAUSE);
        any &= child.try_wait().is_ok_and(|ended| ended.is_none());
    }
    drop(child.stdin.take());
    let status =
        child.wait().map_err(|error| Failure::run(ErrorContext::new("cannot wait for Python", error)))?;
    match status.code() {
        Some(0) => output::stdout(&format!("sent     {} to {}\n", run.display(), service.name())),
        // The program has said why.
        Some(2) => Err(Failure::ReportedElsewhere(2)),
        _ => Err(Failure::run(format!("sending {} to {} failed: {status}", run.display(), service.name()))),
    }
}

fn start(service: Service, python: &Path) -> Result<Child, Failure> {
    let started = Command::new(python).args(["-c", PROGRAM, service.name()]).stdin(Stdio::piped()).spawn();
    started.map_err(|error| {
        let context = format!("cannot start {}", python.display());
        Failure::mistake(
            ErrorContext::new(context, error).advise("--python names the Python that has the library"),
        )
    })
}

/// Writes a line to the program. Returns whether it still reads.
fn write(child: &mut Child, line: &str) -> Result<bool, Failure> {
    let input = child.stdin.as_mut().expect("it is open until the end");
    match input.write_all(format!("{line}\n").as_bytes()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::run(ErrorContext::new("cannot write to Python", error))),
    }
}

/// What is sent first: the name, the folder and the configuration of the run, and an identifier that is the same if the run is
/// sent again.
fn description(run: &Path) -> Result<String, Failure> {
    let folder = fs::canonicalize(run).unwrap_or_else(|_| PathBuf::from(run));
    let name =
        folder.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned());
    let path = run.join(CONFIG);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        text => text.map_err(|error| Failure::file("read", &path, error))?,
    };
    let config: toml::Table = toml::from_str(&text)
        .map_err(|error| Failure::mistake(ErrorContext::new(path.display().to_string(), error)))?;
    let id = format!("{:016x}", xxh3_64(format!("{}\n{text}", folder.display()).as_bytes()));
    Ok(json!({ "id": id, "name": name, "folder": folder, "config": config }).to_string())
}

fn read_json(path: &Path) -> Result<Option<Value>, Failure> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => {
            let text = text.map_err(|error| Failure::file("read", path, error))?;
            Ok(Some(
                serde_json::from_str(&text).map_err(|error| {
                    Failure::mistake(ErrorContext::new(path.display().to_string(), error))
                })?,
            ))
        }
    }
}

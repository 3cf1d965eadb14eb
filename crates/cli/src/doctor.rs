//! `kintsugi doctor`: what this machine has and what is missing.

use clap::Args;
use kintsugi_tensor::cuda::libraries::{Report, devices, reports};
use serde::Serialize;

use crate::failure::Failure;
use crate::host;
use crate::output::Output;
use kintsugi_spec::units;

/// Shows what this machine has, and what is missing.
///
/// GPU libraries are loaded at run time, so one binary works with and without them. For each library the command prints
/// the version that it found. If a library is missing, it prints the file names that it tried and how to install it.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Prints the findings as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi doctor
      on the machine that will train: a login node may have other libraries
  kintsugi doctor --json
      for scripts";

#[derive(Serialize)]
struct Findings {
    cores: usize,
    host_memory: Option<u64>,
    cuda_devices: usize,
    libraries: Vec<Library>,
}

#[derive(Serialize)]
struct Library {
    name: &'static str,
    version: Option<String>,
    tried: Vec<String>,
    remedy: &'static str,
}

impl From<Report> for Library {
    fn from(report: Report) -> Self {
        let Report { name, version, tried, remedy } = report;
        Library { name, version, tried, remedy }
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let findings = Findings {
        cores: host::cores(),
        host_memory: host::memory().map(|bound| bound.bytes),
        cuda_devices: devices().unwrap_or(0),
        libraries: reports().into_iter().map(Library::from).collect(),
    };
    output.text(&text(&findings))?;
    output.result(&findings)
}

fn text(findings: &Findings) -> String {
    let memory = findings.host_memory.map_or_else(|| "unknown".to_owned(), units::bytes);
    let head =
        format!("cores    {}\nmemory   {memory}\nGPUs     {}\n\n", findings.cores, findings.cuda_devices);
    findings.libraries.iter().map(line).fold(head, |text, line| text + &line)
}

fn line(Library { name, version, tried, remedy }: &Library) -> String {
    match version {
        Some(version) => format!("  ✓ {name} {version}\n"),
        None => format!("  – {name}: not found (tried {}); {remedy}\n", tried.join(", ")),
    }
}

//! `kintsugi doctor`: what this machine has and what is missing, and whether its device computes what the CPU does.

mod self_test;

use clap::Args;
use kintsugi_comm::mpi::Mpi;
use kintsugi_comm::nccl;
use kintsugi_gpu::{CUDA, HIP, Platform, Report};
use kintsugi_spec::{Cause, units};
use serde::Serialize;

use crate::failure::Failure;
use crate::host;
use crate::output::Output;

/// Shows what this machine has, and what is missing.
///
/// GPU and MPI libraries are loaded at run time, so one binary works with and without them. For each library the command
/// prints the version that it found. If a library is missing, it prints the file names that it tried and how to install
/// it. With --self-test it tests a device.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    test: self_test::SelfTestArguments,
    /// Prints the findings, or the results of the self-test, as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi doctor
      on the machine that will train: a login node may have other libraries
  kintsugi doctor --json
      for scripts
  kintsugi doctor --self-test
      tests the first GPU, or the CPU, and writes self-test.txt
  kintsugi doctor --self-test --set run.device=hip --set cluster.preset=frontier
      an AMD GPU, whose rates are shown beside those of Frontier's profile";

#[derive(Serialize)]
struct Findings {
    cores: usize,
    host_memory: Option<u64>,
    cuda_devices: usize,
    hip_devices: usize,
    libraries: Vec<Library>,
    nccl: Result<NcclLibrary, Cause>,
    mpi: Result<MpiLibrary, Cause>,
}

#[derive(Serialize)]
struct NcclLibrary {
    version: String,
    library: String,
    /// Whether several ranks can share a GPU.
    shares_gpus: bool,
}

impl NcclLibrary {
    fn find() -> Result<Self, Cause> {
        let (version, library) = nccl::find().map_err(Cause::new)?;
        let shares_gpus = version >= nccl::SHARED_GPU_VERSION;
        Ok(NcclLibrary { version: version.to_string(), library, shares_gpus })
    }
}

#[derive(Serialize)]
struct MpiLibrary {
    version: String,
    abi: String,
    library: String,
}

impl MpiLibrary {
    fn find() -> Result<Self, Cause> {
        let (version, abi, library) = Mpi::find().map_err(Cause::new)?;
        Ok(MpiLibrary { version, abi: abi.to_string(), library })
    }
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
    arguments.test.check()?;
    let findings = Findings {
        cores: host::cores(),
        host_memory: host::memory().map(|bound| bound.bytes),
        cuda_devices: CUDA.devices().unwrap_or(0),
        hip_devices: HIP.devices().unwrap_or(0),
        libraries: [&CUDA, &HIP].into_iter().flat_map(Platform::libraries).map(Library::from).collect(),
        nccl: NcclLibrary::find(),
        mpi: MpiLibrary::find(),
    };
    if arguments.test.self_test {
        return self_test::run(&arguments.test, &text(&findings), output);
    }
    output.text(&text(&findings))?;
    output.result(&findings)
}

fn text(findings: &Findings) -> String {
    let memory = findings.host_memory.map_or_else(|| "unknown".to_owned(), units::bytes);
    let gpus = match (findings.cuda_devices, findings.hip_devices) {
        (nvidia, 0) => nvidia.to_string(),
        (nvidia, amd) => format!("{nvidia} NVIDIA, {amd} AMD"),
    };
    let head = format!("cores    {}\nmemory   {memory}\nGPUs     {gpus}\n\n", findings.cores);
    let nccl = match &findings.nccl {
        Ok(NcclLibrary { version, library, shares_gpus }) => {
            let shared = if *shares_gpus { ", several ranks can share a GPU" } else { "" };
            format!("  ✓ NCCL {version} ({library}{shared})\n")
        }
        Err(reason) => format!("  – NCCL: {reason}\n"),
    };
    let mpi = match &findings.mpi {
        Ok(MpiLibrary { version, abi, library }) => format!("  ✓ MPI {version} ({library}, {abi})\n"),
        Err(reason) => format!("  – MPI: {reason}\n"),
    };
    findings.libraries.iter().map(line).chain([nccl, mpi]).fold(head, |text, line| text + &line)
}

fn line(Library { name, version, tried, remedy }: &Library) -> String {
    match version {
        Some(version) => format!("  ✓ {name} {version}\n"),
        None => format!("  – {name}: not found (tried {}); {remedy}\n", tried.join(", ")),
    }
}

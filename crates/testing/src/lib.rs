//! What tests have in common: how many cases they run, and what they do if the machine lacks something.
//!
//! `scripts/test` runs a small fixed part of every kind of cases. With `KINTSUGI_FULL=1` it runs them all ([`cases`]).
//!
//! Some tests need a GPU, a compiler or tables of measurements, which not every machine has. Such a test calls [`skip`] and returns. `scripts/test` lists the skipped tests at its end, from the files that `skip`
//! writes into the folder `KINTSUGI_SKIPPED`. With `KINTSUGI_REQUIRE=gpu,nvrtc` a test that would skip for want of one of
//! these fails instead.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::fs;
use std::io::Write;
use std::path::Path;

/// How many random cases a test runs: `few`, or `all` with `KINTSUGI_FULL=1`. The few are the first of all.
pub fn cases<T>(few: T, all: T) -> T {
    let is_full = std::env::var_os("KINTSUGI_FULL").is_some_and(|value| !value.is_empty());
    if is_full { all } else { few }
}

/// What a test needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// An NVIDIA GPU with its driver.
    Gpu,
    /// NVRTC, the run-time compiler of CUDA.
    Nvrtc,
    /// The tables of published measurements, beside the repository.
    Tables,
    /// A C++ compiler.
    Compiler,
    /// The rights of root, or a second user.
    Root,
    /// NCCL, in a version that works with this machine's GPUs.
    Nccl,
    /// Open MPI, with its launcher.
    OpenMpi,
    /// MPICH, with its launcher.
    Mpich,
    /// Slurm with its daemons, and the rights to make namespaces.
    Slurm,
    /// AMD's run-time compiler and LLVM's disassembler.
    AmdTools,
}

impl Need {
    /// The name in `KINTSUGI_REQUIRE`.
    pub fn name(self) -> &'static str {
        match self {
            Need::Gpu => "gpu",
            Need::Nvrtc => "nvrtc",
            Need::Tables => "tables",
            Need::Compiler => "compiler",
            Need::Root => "root",
            Need::Nccl => "nccl",
            Need::OpenMpi => "openmpi",
            Need::Mpich => "mpich",
            Need::Slurm => "slurm",
            Need::AmdTools => "amd-tools",
        }
    }
}

/// Reports that this test is skipped, or panics if `KINTSUGI_REQUIRE` names what it needs.
pub fn skip(need: Need, reason: impl Display) {
    let required = std::env::var("KINTSUGI_REQUIRE").unwrap_or_default();
    assert!(!requires(&required, need), "KINTSUGI_REQUIRE has {}: {reason}", need.name());
    eprintln!("skipped: {reason}");
    if let Some(folder) = std::env::var_os("KINTSUGI_SKIPPED") {
        // A test is one thread of one process, so no two write the same file.
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test").to_owned();
        let file = Path::new(&folder).join(format!("{}-{}", std::process::id(), test.replace("::", ".")));
        let line = format!("{}\t{reason}\t{test}\n", need.name());
        let written = fs::File::create(&file).and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

fn requires(required: &str, need: Need) -> bool {
    required.split(',').any(|name| name.trim() == need.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_named_is_required() {
        assert!(requires("gpu,nvrtc", Need::Nvrtc) && requires(" tables ", Need::Tables));
        assert!(!requires("gpu", Need::Nvrtc) && !requires("", Need::Gpu));
    }
}

//! Submits a batch script. Slurm stores the script and the environment of who submits it, so the environment is reduced to
//! what jobs need.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};

use rustix::fs::Mode;
use rustix::process::umask;

use super::site::{Site, is_secret};
use crate::failure::{ErrorContext, Failure};

/// Variables of the submitting shell that a job gets.
const PASSED: [&str; 14] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LD_LIBRARY_PATH",
    "LOADEDMODULES",
    "MANPATH",
    "SLURM_CONF",
    "KINTSUGI_MPI",
    "KINTSUGI_NCCL",
    "KINTSUGI_PROFILE",
    "XDG_CONFIG_HOME",
];

/// How the names of others begin: those of sbatch, of modules, of MPI and networks, and of GPUs.
const PASSED_PREFIXES: [&str; 19] = [
    "SBATCH_",
    "LC_",
    "MODULE",
    "LMOD_",
    "_LMFILES_",
    "BASH_FUNC_m",
    "OMPI_",
    "PMIX_",
    "MPICH_",
    "I_MPI_",
    "FI_",
    "UCX_",
    "NCCL_",
    "RCCL_",
    "CUDA_",
    "ROCM_",
    "HIP_",
    "CRAY",
    "OMP_",
];

/// Submits the script `chain` times. Returns the numbers of the jobs. If one is refused, the error names those that are in the
/// queue.
pub fn submit(script: &str, chain: u32, site: &Site) -> Result<Vec<String>, Failure> {
    let mut jobs = Vec::new();
    for _ in 0..chain {
        jobs.push(submit_one(script, &jobs, site)?);
    }
    Ok(jobs)
}

/// Submits one more job.
fn submit_one(script: &str, before: &[String], site: &Site) -> Result<String, Failure> {
    let failed = |error| Failure::run(ErrorContext::new("cannot run sbatch", error));
    // The log gets the permissions of whoever submits the job. No other thread makes files meanwhile.
    let mask = umask(Mode::from_raw_mode(0o077));
    let started = Command::new("sbatch")
        .arg("--parsable")
        .env_clear()
        .envs(passed(std::env::vars_os(), &site.pass))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    umask(mask);
    let mut sbatch = started.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Failure::mistake(
            "there is no sbatch in PATH: run this on a login node of a Slurm cluster; --print shows the script without it",
        ),
        _ => failed(error),
    })?;
    let mut input = sbatch.stdin.take().expect("it is piped");
    // If sbatch does not read it, its own message says why.
    input.write_all(script.as_bytes()).ok();
    drop(input);
    let answer = sbatch.wait_with_output().map_err(failed)?;
    if !answer.status.success() {
        let message = String::from_utf8_lossy(&answer.stderr);
        let message = message.trim().replace('\n', "; ");
        let queued = match before {
            [] => String::new(),
            jobs => format!("; jobs {} are in the queue: scancel removes them", jobs.join(", ")),
        };
        return Err(Failure::run(format!("sbatch has refused the job: {message}{queued}")));
    }
    // The number, and the name of the cluster where there are several.
    let text = String::from_utf8_lossy(&answer.stdout);
    Ok(text.trim().split(';').next().unwrap_or_default().to_owned())
}

/// The variables that a job gets.
fn passed(
    all: impl Iterator<Item = (OsString, OsString)>,
    more: &[String],
) -> impl Iterator<Item = (OsString, OsString)> {
    all.filter(move |(name, _)| {
        let name = name.to_string_lossy();
        let is_passed = PASSED.contains(&&*name)
            || PASSED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || more.iter().any(|passed| *passed == name);
        is_passed && !is_secret(&name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_the_shell_are_not_submitted() {
        let all = ["PATH", "KINTSUGI_SECRET", "HF_TOKEN", "NCCL_DEBUG", "CUDA_API_KEY", "MY_DATA", "OTHER"];
        let all = all.map(|name| (OsString::from(name), OsString::from("x"))).into_iter();
        let names: Vec<_> = passed(all, &["MY_DATA".to_owned()]).map(|(name, _)| name).collect();
        assert_eq!(names, ["PATH", "NCCL_DEBUG", "MY_DATA"]);
    }
}

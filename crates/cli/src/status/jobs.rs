//! The jobs of Slurm, by what squeue and sacct print. Where there is no Slurm, there are none.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// How long squeue and sacct may take, in seconds. Without an answer they try for minutes.
const LIMIT_S: &str = "10";

/// A job of Slurm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Job {
    /// Its number.
    pub id: String,
    #[serde(skip)]
    name: String,
    /// Slurm's word, as RUNNING, PENDING, TIMEOUT or CANCELLED.
    pub state: String,
    /// Why it waits, or why it ended.
    pub reason: Option<String>,
    /// Its nodes.
    pub nodes: Option<String>,
    /// The time until its limit, in Slurm's form.
    pub left: Option<String>,
}

impl Job {
    /// Whether it waits or runs.
    pub fn is_active(&self) -> bool {
        let over = [
            "BOOT_FAIL",
            "CANCELLED",
            "COMPLETED",
            "DEADLINE",
            "FAILED",
            "NODE_FAIL",
            "OUT_OF_MEMORY",
            "PREEMPTED",
            "REVOKED",
            "TIMEOUT",
        ];
        !over.iter().any(|state| self.state.starts_with(state))
    }

    /// The number, for the order in which jobs were submitted.
    pub fn number(&self) -> u64 {
        self.id.split(['_', '+']).next().and_then(|id| id.parse().ok()).unwrap_or(0)
    }
}

/// The name of the jobs of a run: the end of its folder's name, and a hash of the whole path.
pub fn job_name(out: &Path) -> String {
    let folder = out.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let short: String = folder.chars().map(plain).take(24).collect();
    format!("kintsugi-{short}-{:010x}", xxh3_64(out.as_os_str().as_bytes()) & 0xff_ffff_ffff)
}

/// The whole path of a folder that may not exist yet, without links.
pub fn whole_path(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let found = path.ancestors().find_map(|ancestor| Some((ancestor, ancestor.canonicalize().ok()?)));
    Ok(match found {
        Some((ancestor, whole)) => match path.strip_prefix(ancestor) {
            Ok(rest) if rest.as_os_str().is_empty() => whole,
            Ok(rest) => whole.join(rest),
            Err(_) => path,
        },
        None => path,
    })
}

/// The user's jobs with these names, the first submitted first. Slurm forgets old ones unless it keeps accounts.
pub fn find(names: &[String]) -> Vec<Job> {
    let squeue = answer("squeue", &["--me", "--states=all", "--noheader", "--format=%i|%j|%T|%r|%N|%L"]);
    let Some(squeue) = squeue else { return Vec::new() };
    let mut jobs = parse_squeue(&squeue);
    let named = format!("--name={}", names.join(","));
    let fields = "--format=JobID,JobName,State,NodeList";
    let sacct = answer(
        "sacct",
        &["--allocations", "--noheader", "--parsable2", "--starttime=now-30days", fields, &named],
    );
    for job in parse_sacct(&sacct.unwrap_or_default()) {
        if jobs.iter().all(|known| known.id != job.id) {
            jobs.push(job);
        }
    }
    jobs.retain(|job| names.contains(&job.name));
    jobs.sort_by_key(Job::number);
    jobs
}

/// The jobs of a run, among all.
pub fn of_run<'a>(jobs: &'a [Job], name: &str) -> Vec<&'a Job> {
    jobs.iter().filter(|job| job.name == name).collect()
}

/// What a program of Slurm prints, if it is there and succeeds.
fn answer(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("timeout");
    command.arg(LIMIT_S).arg(program).args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
    let answer = command.output().ok().filter(|answer| answer.status.success())?;
    Some(String::from_utf8_lossy(&answer.stdout).into_owned())
}

/// A field, if Slurm has a value for it.
fn value(text: &str) -> Option<String> {
    let none = ["", "None", "N/A", "INVALID", "None assigned", "(null)", "UNLIMITED"];
    Some(text.trim()).filter(|text| !none.contains(text)).map(str::to_owned)
}

fn parse_squeue(text: &str) -> Vec<Job> {
    let job = |line: &str| {
        let [id, name, state, reason, nodes, left] = line.split('|').collect::<Vec<_>>().try_into().ok()?;
        Some(Job {
            id: value(id)?,
            name: name.to_owned(),
            state: value(state)?,
            reason: value(reason),
            nodes: value(nodes),
            left: value(left),
        })
    };
    text.lines().filter_map(job).collect()
}

fn parse_sacct(text: &str) -> Vec<Job> {
    let job = |line: &str| {
        let [id, name, state, nodes] = line.split('|').collect::<Vec<_>>().try_into().ok()?;
        let (state, by) = state.split_once(' ').map_or((state, None), |(state, by)| (state, value(by)));
        Some(Job {
            id: value(id)?,
            name: name.to_owned(),
            state: value(state)?,
            reason: by,
            nodes: value(nodes),
            left: None,
        })
    };
    text.lines().filter_map(job).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_read_from_what_slurm_prints() {
        let text =
            "12|kintsugi-a-1|RUNNING|None|n[1-2]|59:03\n13|kintsugi-a-1|PENDING|Dependency||1:00:00\ntorn|";
        let jobs = parse_squeue(text);
        assert_eq!(jobs.len(), 2);
        assert_eq!((jobs[0].nodes.as_deref(), jobs[0].left.as_deref()), (Some("n[1-2]"), Some("59:03")));
        assert_eq!((jobs[1].reason.as_deref(), jobs[1].nodes.as_deref()), (Some("Dependency"), None));
        assert!(jobs.iter().all(Job::is_active));
        let old = parse_sacct("9|kintsugi-a-1|CANCELLED by 1000|n1\n10|kintsugi-a-1|TIMEOUT|n1\n");
        assert_eq!((old[0].state.as_str(), old[0].reason.as_deref()), ("CANCELLED", Some("by 1000")));
        assert!(!old[0].is_active() && !old[1].is_active());
    }

    #[test]
    fn a_job_is_named_after_its_folder() {
        let name = job_name(Path::new("/home/me/my runs/a b"));
        assert!(name.starts_with("kintsugi-a-b-") && name.len() == 23, "{name}");
        assert_ne!(name, job_name(Path::new("/home/me/other/a b")));
    }
}

//! Starts the processes of a job on this machine, without MPI.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_comm::rendezvous::arrange_locally;

use super::Supervision;
use super::agents::Agents;
use crate::failure::{ErrorContext, Failure};
use crate::output;
use crate::signals::send;

/// How long the others may take to end after a process has failed. They learn of it at once, and abort what they wait for.
const GRACE: Duration = Duration::from_secs(9);

/// Runs a command of this program as `ranks` processes, to the end of all of them.
pub fn run(ranks: usize, arguments: &[OsString], supervision: &Supervision) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::run(ErrorContext::new("cannot start the processes", error));
    let program = std::env::current_exe().map_err(failed)?;
    let meeting = arrange_locally().map_err(failed)?;
    supervision.agents.as_ref().map(|agents| agents.begin_attempt(ranks)).transpose()?;
    let mut processes = Processes { all: Vec::with_capacity(ranks), killed: Vec::new() };
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command.args(arguments).envs(meeting.clone());
        command.envs(supervision.agents.as_ref().map(Agents::environment));
        command.env("KINTSUGI_RANK", rank.to_string()).env("KINTSUGI_RANKS", ranks.to_string());
        // In groups of their own: otherwise Ctrl-C would reach them twice.
        processes.all.push(command.process_group(0).stdin(Stdio::null()).spawn().map_err(failed)?);
    }
    let ended =
        processes.wait(supervision).map_err(|error| Failure::run(ErrorContext::new("cannot wait", error)))?;
    supervision.add_last_verdict();
    outcome(&ended, &processes.killed)
}

/// The processes of a job. They are killed if this is dropped before they have ended.
struct Processes {
    /// By rank.
    all: Vec<Child>,
    /// The ranks that were killed because another one had failed.
    killed: Vec<usize>,
}

impl Processes {
    /// Waits for all. A signal to stop goes to all of them: first as SIGUSR1, then as one that ends them.
    fn wait(&mut self, supervision: &Supervision) -> io::Result<Vec<ExitStatus>> {
        const POLL: Duration = Duration::from_millis(20);
        let mut signals = ["USR1", "TERM", "KILL"].into_iter();
        let mut first_failure: Option<Instant> = None;
        loop {
            let ended = self.all.iter_mut().map(Child::try_wait).collect::<io::Result<Vec<_>>>()?;
            if ended.iter().all(Option::is_some) {
                return Ok(ended.into_iter().flatten().collect());
            }
            let has_failed = ended.iter().flatten().any(|status| !status.success());
            if supervision.has_seen_failure() || has_failed {
                let since = *first_failure.get_or_insert_with(Instant::now);
                if since.elapsed() > supervision.grace(GRACE) {
                    self.kill();
                }
            }
            if supervision.stop.take()
                && let Some(signal) = signals.next()
            {
                for (process, _) in self.all.iter().zip(&ended).filter(|(_, ended)| ended.is_none()) {
                    send(signal, process.id())?;
                }
            }
            thread::sleep(POLL);
        }
    }

    fn kill(&mut self) {
        for (rank, process) in self.all.iter_mut().enumerate() {
            if matches!(process.try_wait(), Ok(None)) && process.kill().is_ok() {
                self.killed.push(rank);
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.kill();
        for process in &mut self.all {
            process.wait().ok();
        }
    }
}

/// A rank has printed why it failed. One that a signal ended could not, unless that signal came from here.
fn outcome(ended: &[ExitStatus], killed: &[usize]) -> Result<(), Failure> {
    for (rank, status) in ended.iter().enumerate().filter(|(rank, _)| !killed.contains(rank)) {
        if let Some(signal) = status.signal() {
            output::stderr(&format!("error: signal {signal} ended rank {rank}"));
        }
    }
    let codes = ended.iter().map(|status| status.code().unwrap_or(1));
    match codes.max() {
        Some(0) | None => Ok(()),
        Some(2) => Err(Failure::ReportedElsewhere(2)),
        Some(_) => Err(Failure::ReportedElsewhere(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statuses(raw: &[i32]) -> Vec<ExitStatus> {
        raw.iter().map(|&raw| ExitStatus::from_raw(raw)).collect()
    }

    #[test]
    fn a_job_succeeds_if_all_ranks_do() {
        assert!(outcome(&statuses(&[0, 0]), &[]).is_ok());
        let code = |raw: &[i32]| outcome(&statuses(raw), &[]).expect_err("it failed").code();
        assert_eq!(code(&[0, 2 << 8]), 2, "a mistake in the configuration");
        assert_eq!(code(&[1 << 8, 0]), 1);
        assert_eq!(code(&[0, 9]), 1, "a rank was killed");
    }

    #[test]
    fn processes_that_outlive_a_failure_are_killed() {
        let shell = |script: &str| Command::new("sh").args(["-c", script]).spawn().expect("a shell");
        let mut processes = Processes { all: vec![shell("sleep 60"), shell("exit 0")], killed: Vec::new() };
        processes.all[1].wait().expect("a child");
        processes.kill();
        assert_eq!(processes.killed, [0], "the other has ended by itself");
        let ended = processes.wait(&Supervision::new(false).expect("signals")).expect("they are children");
        assert_eq!(ended[0].signal(), Some(9));
    }
}

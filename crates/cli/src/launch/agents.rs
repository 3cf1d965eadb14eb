//! The agents of a run: processes that outlive the ranks, one per node. They see how ranks end when no rank is left to say it.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_comm::agents::{AgentServer, Evidence, FOLDER, Order, RankEvent, Report, ReportKind};

use super::{Launcher, step};
use crate::failure::{ErrorContext, Failure};
use crate::output;
use crate::verdict;

/// How long the ranks may take to write the verdict themselves. They know more.
const TURN: Duration = Duration::from_secs(3);

/// How long the last reports of agents may take, which collect events for a fraction of a second.
const LAST_REPORTS: Duration = Duration::from_secs(3);

/// How long the agent of this machine may take to begin.
const START: Duration = Duration::from_secs(10);

/// How long agents may take to end.
const END: Duration = Duration::from_secs(2);

/// The agents of a run, and what they have reported about its ranks.
pub struct Agents {
    /// The folder of the run.
    out: PathBuf,
    launcher: Option<Launcher>,
    server: AgentServer,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    processes: Vec<AgentProcess>,
    evidence: Evidence,
    /// The ranks whose processes have died, in order.
    died: Vec<usize>,
    /// When the attempt began, in seconds since 1970.
    began: f64,
}

/// An agent of this machine, or the step of Slurm with the agents of several nodes.
struct AgentProcess {
    process: Child,
    /// Agents end when it closes.
    _input: ChildStdin,
}

impl Agents {
    /// Agents for a run in the folder `out`: of this machine, or of the nodes of an allocation if ranks are started by srun.
    pub fn start(launcher: Option<Launcher>, out: &Path) -> Result<Self, Failure> {
        let failed =
            |error| Failure::run(ErrorContext::new("cannot listen for the agents of the nodes", error));
        let server = AgentServer::start(launcher != Some(Launcher::Srun)).map_err(failed)?;
        Ok(Agents { out: out.to_owned(), launcher, server, state: Mutex::default() })
    }

    /// The variable by which ranks find the agent of their node.
    pub fn environment(&self) -> (&'static str, OsString) {
        (FOLDER, self.server.task().folder().into())
    }

    /// A new attempt of so many ranks begins. Starts agents that are not there.
    pub fn begin_attempt(&self, ranks: usize) -> Result<(), Failure> {
        self.take_reports();
        let mut state = self.state();
        (state.evidence, state.began) = (Evidence::of(ranks), kintsugi_run::now());
        state.died.clear();
        drop(state);
        self.start_missing()?;
        // A rank that begins before the agent of this machine listens is known to it only later.
        let begun = Instant::now();
        while self.launcher != Some(Launcher::Srun)
            && self.server.connected().is_empty()
            && begun.elapsed() < START
        {
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn start_missing(&self) -> Result<(), Failure> {
        let mut state = self.state();
        state.processes.retain_mut(|agent| matches!(agent.process.try_wait(), Ok(None)));
        let command = match self.launcher {
            Some(Launcher::Srun) => step::agents(&self.server.connected())?,
            _ if state.processes.is_empty() => Some(Command::new(program()?)),
            _ => None,
        };
        let Some(mut command) = command else { return Ok(()) };
        // In a group of its own: Ctrl-C is for the ranks.
        command.arg("agent").process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let failed = |error: io::Error| Failure::run(ErrorContext::new("cannot start the agents", error));
        let mut process = command.spawn().map_err(failed)?;
        let mut input = process.stdin.take().expect("it is piped");
        let task = serde_json::to_string(self.server.task()).expect("words and numbers");
        input.write_all((task + "\n").as_bytes()).map_err(failed)?;
        state.processes.push(AgentProcess { process, _input: input });
        Ok(())
    }

    /// Whether the attempt has failed, if the agents know that it did. Writes the verdict if the ranks do not. Starts the agent of
    /// this machine again if it was killed. A job that `is_stopping` does not fail.
    pub fn watch(&self, is_stopping: bool) -> bool {
        let is_lost = self.take_reports();
        if is_lost && self.launcher != Some(Launcher::Srun) {
            self.start_missing().ok();
        }
        let since = self.state().evidence.failed_since(Instant::now()).filter(|_| !is_stopping);
        if since.is_some_and(|since| since >= TURN) {
            self.add_verdict();
        }
        since.is_some()
    }

    /// Kills the ranks of all nodes that are left.
    pub fn kill_ranks(&self) {
        self.server.order(Order::Kill);
    }

    /// Writes the verdict about a failed attempt, if no rank has named the cause and the agents know it.
    pub fn add_verdict(&self) {
        self.take_reports();
        let state = self.state();
        if let Some(failure) = state.evidence.failure(Instant::now()) {
            let died_later = |rank| state.died_after(failure.rank, rank);
            verdict::add_of_agents(&self.out, state.began, &failure, died_later);
        }
    }

    /// The same after the launcher has ended, which may be before the agents have told of the ends of its ranks.
    pub fn add_last_verdict(&self) {
        let begun = Instant::now();
        while begun.elapsed() < LAST_REPORTS {
            self.take_reports();
            if self.state().evidence.knows_all_ends() {
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.add_verdict();
    }

    /// Adds the reports that have come to the evidence. Returns whether an agent was lost.
    fn take_reports(&self) -> bool {
        let mut state = self.state();
        let mut is_lost = false;
        for report in self.server.reports() {
            let Report { host, kind, .. } = &report;
            if *kind == ReportKind::Lost {
                is_lost = true;
                output::stderr(&format!("warning: the agent of {host} has ended or does not answer"));
            }
            state.evidence.add(&report);
            if let ReportKind::Events(events) = &report.kind {
                state.note_deaths(events);
            }
        }
        is_lost
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn note_deaths(&mut self, events: &[RankEvent]) {
        for event in events {
            match *event {
                // An agent may be late with the death of a process of the attempt before.
                RankEvent::Began { rank } => self.died.retain(|&died| died != rank),
                RankEvent::Died { rank, .. } => self.died.push(rank),
                RankEvent::Ended { .. } | RankEvent::Stopped { .. } | RankEvent::Continued { .. } => {}
            }
        }
    }

    /// Whether a rank has died after another one.
    fn died_after(&self, first: usize, rank: usize) -> bool {
        let place = |of: usize| self.died.iter().position(|&died| died == of);
        place(first).zip(place(rank)).is_some_and(|(first, rank)| first < rank)
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.server.order(Order::End);
        let mut state = self.state();
        let begun = Instant::now();
        for AgentProcess { process, .. } in &mut state.processes {
            while matches!(process.try_wait(), Ok(None)) {
                if begun.elapsed() > END {
                    process.kill().ok();
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

fn program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::run(ErrorContext::new("cannot find kintsugi", error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_of_an_earlier_attempt_has_not_died_in_this_one() {
        let mut state = State::default();
        let died = |rank| RankEvent::Died { rank, signal: None };
        state.note_deaths(&[died(2), RankEvent::Began { rank: 2 }, died(0), died(2)]);
        assert_eq!(
            [(0, 2), (2, 0), (0, 1), (1, 2)].map(|(a, b)| state.died_after(a, b)),
            [true, false, false, false]
        );
    }
}

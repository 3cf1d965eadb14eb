//! The processes below a launcher, by `/proc`: the ranks that it has started on this machine.
//!
//! A rank that is stopped or hangs ignores what its launcher asks. `launch` kills it itself, and starts ranks again only when
//! the old ones are gone.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use crate::signals::send;

/// How long killed processes may take to go.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process, by its number and the time at which it started. Numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    id: u32,
    parent: u32,
    started: u64,
}

impl Process {
    /// The process with a number. A zombie has ended.
    fn find(id: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // The name of the program is in parentheses and may contain any character.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse().ok();
        if matches!(fields.first(), Some(&("Z" | "X"))) {
            return None;
        }
        Some(Process { id, parent: number(1)? as u32, started: number(19)? })
    }

    /// Whether it has not ended.
    fn is_there(self) -> bool {
        Process::find(self.id).is_some_and(|found| found.started == self.started)
    }
}

/// The processes that a process has started, and those that they have started.
pub fn descendants(of: u32) -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut children: HashMap<u32, Vec<Process>> = HashMap::new();
    for process in ids.filter_map(Process::find) {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = children.remove(&of).unwrap_or_default();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        let below = children.remove(&process.id).unwrap_or_default();
        found.extend(below);
        next += 1;
    }
    found
}

/// Waits until processes end by themselves, for `limit` at most.
pub fn wait_for_end(processes: &[Process], limit: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < limit && processes.iter().any(|process| process.is_there()) {
        thread::sleep(Duration::from_millis(5));
    }
}

/// Kills processes that have not ended, and waits until they are gone.
pub fn kill_and_wait(processes: &[Process]) -> io::Result<()> {
    let begun = Instant::now();
    let mut killed = false;
    loop {
        let left: Vec<Process> = processes.iter().copied().filter(|process| process.is_there()).collect();
        if left.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            let numbers: Vec<String> = left.iter().map(|process| process.id.to_string()).collect();
            return Err(io::Error::other(format!("processes {} cannot be killed", numbers.join(", "))));
        }
        if !killed {
            left.iter().try_for_each(|process| send("KILL", process.id))?;
            killed = true;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn processes_below_a_process_are_found_and_killed() {
        let script = "sleep 60 & sleep 60 & wait";
        let mut shell = Command::new("sh").args(["-c", script]).spawn().expect("a shell");
        let begun = Instant::now();
        while descendants(shell.id()).len() < 2 {
            assert!(begun.elapsed() < PATIENCE);
        }
        assert!(descendants(std::process::id()).iter().any(|process| process.id == shell.id()));
        let found = descendants(shell.id());
        kill_and_wait(&found).expect("they are ours");
        assert!(found.iter().all(|process| !process.is_there()));
        shell.wait().expect("a child");
    }
}

//! Processes of this machine, by `/proc`.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// Processes other than this one with an argument that `is_meant` accepts.
pub fn with_argument(is_meant: impl Fn(&Path) -> bool) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let own = std::process::id();
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let has = |&id: &u32| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0).any(|argument| is_meant(Path::new(OsStr::from_bytes(argument))))
    };
    ids.filter(|&id| id != own).filter(has).collect()
}

/// The resident bytes of a process; 0 if it has ended.
pub fn resident(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

/// Kills a process. One that has ended stays as it is.
pub fn kill(id: u32) {
    if let Some(id) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        kill_process(id, Signal::KILL).ok();
    }
}

/// Asks a process to end.
pub fn terminate(id: u32) {
    if let Some(id) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        kill_process(id, Signal::TERM).ok();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_process_is_found_by_a_whole_argument_and_killed() {
        let mark = format!("kintsugi-mark-{}", std::process::id());
        let mut child =
            Command::new("sh").args(["-c", "while :; do sleep 0.1; done", &mark]).spawn().expect("a shell");
        // A process has its command line a moment after it has been started.
        let begun = Instant::now();
        let found = |mark: &str| with_argument(|argument| argument == Path::new(mark));
        while found(&mark) != [child.id()] {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", found(&mark));
        }
        assert!(found(&mark[1..]).is_empty(), "a part of an argument is not enough");
        assert!(resident(child.id()) > 0 && resident(std::process::id()) > 1 << 20);
        kill(child.id());
        assert!(!child.wait().expect("a child").success());
        // A copy of the shell that is about to become its `sleep` ends soon.
        while !found(&mark).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", found(&mark));
        }
    }
}

//! Processes of this machine, by `/proc`.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};

/// Processes other than this one whose command line contains a text.
pub fn naming(text: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let own = std::process::id();
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|&id| id != own && command_line(id).contains(text)).collect()
}

fn command_line(id: u32) -> String {
    let bytes = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
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
    fn a_process_is_found_by_its_command_line_and_killed() {
        let mark = format!("kintsugi-mark-{}", std::process::id());
        let mut child =
            Command::new("sh").args(["-c", "while :; do sleep 0.1; done", &mark]).spawn().expect("a shell");
        // A process has its command line a moment after it has been started.
        let begun = Instant::now();
        while naming(&mark) != [child.id()] {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", naming(&mark));
        }
        assert!(resident(child.id()) > 0 && resident(std::process::id()) > 1 << 20);
        kill(child.id());
        assert!(!child.wait().expect("a child").success());
        // A copy of the shell that is about to become its `sleep` ends soon.
        while !naming(&mark).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", naming(&mark));
        }
    }
}

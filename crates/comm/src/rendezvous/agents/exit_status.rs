//! How a process ends that is not a child of this one.

use std::fs;
use std::os::fd::OwnedFd;

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::process::Pid;

/// The signals that stop a process. As long as it is stopped, Linux shows them where it shows how a process ends.
const STOPS: std::ops::RangeInclusive<u32> = 19..=22;

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExitStatus {
    /// With an exit code.
    Code(u8),
    /// By a signal.
    Signal(u8),
}

impl ExitStatus {
    /// How a process ends, as soon as that is decided. A process that was killed needs some time to go, and its connections close
    /// late in that time. `None` as long as it does not end, and if the system does not know it any more.
    pub fn of(pid: Pid, process: &OwnedFd) -> Option<Self> {
        // Counted from the state, the last field but one of 52 is the status as `wait` returns it.
        let status = field(pid, 49).and_then(|status| status.parse().ok());
        Self::decode(status.or_else(|| reaped_status(process))?)
    }

    fn decode(status: u32) -> Option<Self> {
        let (signal, code) = (status & 0x7f, status >> 8 & 0xff);
        match (signal, code) {
            (0, 0) => None,
            (0, code) => Some(ExitStatus::Code(code as u8)),
            (signal, _) => (!STOPS.contains(&signal)).then_some(ExitStatus::Signal(signal as u8)),
        }
    }
}

/// A field of `/proc/PID/stat`, counted from the state of the process.
pub(super) fn field(pid: Pid, index: usize) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name of the program is in parentheses and may contain any character.
    stat.rsplit_once(')')?.1.split_whitespace().nth(index).map(str::to_owned)
}

/// `struct pidfd_info` (linux/pidfd.h).
#[repr(C)]
struct PidfdInfo {
    mask: u64,
    control_group: u64,
    /// Of the process, its parent, its user and its group.
    numbers: [u32; 11],
    exit_code: u32,
}

/// `PIDFD_INFO_EXIT`.
const EXIT: u64 = 1 << 3;

/// `PIDFD_GET_INFO`.
const GET_INFO: Opcode = opcode::read_write::<PidfdInfo>(0xff, 11);

/// The status of a process after its parent has taken note of its end, since Linux 6.15.
fn reaped_status(process: &OwnedFd) -> Option<u32> {
    let mut info = PidfdInfo { mask: EXIT, control_group: 0, numbers: [0; 11], exit_code: 0 };
    // SAFETY: the kernel writes at most the bytes of the structure, whose size is a part of the request.
    let asked = unsafe { ioctl(process, Updater::<GET_INFO, _>::new(&mut info)) };
    (asked.is_ok() && info.mask & EXIT != 0).then_some(info.exit_code)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use rustix::process::{PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen_and_not_that_it_is_stopped() {
        let until = |found: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !found() {
                assert!(begun.elapsed() < Duration::from_secs(30));
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        for (command, expected) in [
            ("kill -STOP $$; kill -KILL $$", ExitStatus::Signal(9)),
            ("kill -STOP $$; exit 3", ExitStatus::Code(3)),
        ] {
            let mut child = Command::new("sh").args(["-c", command]).spawn().expect("a shell");
            let pid = Pid::from_child(&child);
            let process = pidfd_open(pid, PidfdFlags::empty()).expect("it is there");
            until(&|| field(pid, 0).as_deref() == Some("T"));
            assert_eq!(ExitStatus::of(pid, &process), None, "it is stopped");
            rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("it is ours");
            until(&|| ExitStatus::of(pid, &process).is_some());
            assert_eq!(ExitStatus::of(pid, &process), Some(expected));
            child.wait().expect("a child");
            let later = ExitStatus::of(pid, &process);
            assert!([None, Some(expected)].contains(&later), "{later:?}");
        }
    }
}

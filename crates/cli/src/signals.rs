//! Signals that stop a command, and the signal for a file that exceeds its size limit.

use std::fs;
use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

use crate::failure::{ErrorContext, Failure};

/// Makes a write beyond the limit on a file's size (`ulimit -f`) fail with an error. By default the system sends
/// SIGXFSZ, which ends the process before the error can be handled.
pub fn fail_writes_beyond_the_limit() -> Result<(), Failure> {
    // Any handler will do, so the flag is never read.
    flag::register(SIGXFSZ, Arc::default()).map_err(|error| unhandled(SIGXFSZ, error))?;
    Ok(())
}

/// A flag that SIGINT, SIGTERM, SIGUSR1 and SIGHUP set. The second SIGINT, SIGTERM or SIGUSR1 ends the process.
///
/// SIGHUP does not count as the first or the second: when a terminal is closed, the shell sends one and the kernel
/// another, and the system may send SIGTERM soon after. If the process was started with SIGHUP ignored, as by nohup, it
/// stays ignored.
pub fn stop_on_signal() -> Result<Arc<AtomicBool>, Failure> {
    let [stop, asked] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    for signal in [SIGINT, SIGTERM, SIGUSR1] {
        // The order matters: the first signal must find the flag unset.
        flag::register_conditional_default(signal, Arc::clone(&asked))
            .and_then(|_| flag::register(signal, Arc::clone(&asked)))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .and_then(|_| flag::register_usize(signal, Arc::clone(&RECEIVED), signal as usize))
            .map_err(|error| unhandled(signal, error))?;
    }
    if !is_ignored(SIGHUP) {
        flag::register(SIGHUP, Arc::clone(&stop))
            .and_then(|_| flag::register_usize(SIGHUP, Arc::clone(&RECEIVED), SIGHUP as usize))
            .map_err(|error| unhandled(SIGHUP, error))?;
    }
    Ok(stop)
}

/// The signal to stop that came last.
static RECEIVED: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// The signal by which this process was asked to stop, if it was.
pub fn received() -> Option<&'static str> {
    let names = [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"), (SIGUSR1, "SIGUSR1"), (SIGHUP, "SIGHUP")];
    let received = RECEIVED.load(Ordering::Relaxed);
    names.into_iter().find_map(|(signal, name)| (signal as usize == received).then_some(name))
}

/// A flag that every signal to stop sets. None of them ends the process.
pub fn every_signal_to_stop() -> Result<Arc<AtomicBool>, Failure> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGUSR1, SIGHUP] {
        if signal != SIGHUP || !is_ignored(SIGHUP) {
            flag::register(signal, Arc::clone(&asked)).map_err(|error| unhandled(signal, error))?;
        }
    }
    Ok(asked)
}

/// Sends a signal to a process, by the shell's own `kill`.
pub fn send(signal: &str, process: u32) -> io::Result<()> {
    Command::new("sh").arg("-c").arg(format!("kill -{signal} {process}")).status().map(|_| ())
}

fn unhandled(signal: i32, error: io::Error) -> Failure {
    Failure::run(ErrorContext::new(format!("cannot handle signal {signal}"), error))
}

/// Whether the process ignores a signal, by the mask in `/proc/self/status`. `false` if there is no such file.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

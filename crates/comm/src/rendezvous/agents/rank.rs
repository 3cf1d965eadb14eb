//! A rank's connection to the agent of its node. A thread connects again if the agent was killed and has a successor.

use std::env;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::{FOLDER, NodeFolder};
use crate::mpi::launched;

/// How long a rank waits before it tries again to reach the agent.
const RETRY: Duration = Duration::from_millis(500);

static AGENT: Mutex<Option<UnixStream>> = Mutex::new(None);

/// Connects this process to the agent of its node, if there is one and the process is a rank.
pub fn register() {
    let (Some(folder), Some(launched)) = (node_folder(), launched()) else { return };
    let socket = NodeFolder::socket_in(&folder);
    let first = connect(&socket, launched.rank);
    let watch = move || stay_connected(first, &socket, launched.rank);
    // Training does not depend on it.
    thread::Builder::new().name("agent".into()).stack_size(128 << 10).spawn(watch).ok();
}

/// The folder in the memory of this node that its agent keeps for the job. `None` without an agent.
pub fn node_folder() -> Option<PathBuf> {
    env::var_os(FOLDER).map(|job| NodeFolder::path_in(Path::new(&job)))
}

/// How the line about the end of a rank begins: it knows why, or it may have ended because of another rank.
pub(super) const NAMES_CAUSE: &str = "ended";
pub(super) const NAMES_NO_CAUSE: &str = "ended because of others";

/// Tells the agent that this process comes to its end, with this exit code, and whether it has named the cause of its failure.
pub fn report_end(code: u8, names_cause: bool) {
    if let Some(agent) = &mut *AGENT.lock().unwrap_or_else(PoisonError::into_inner) {
        let words = if names_cause { NAMES_CAUSE } else { NAMES_NO_CAUSE };
        agent.write_all(format!("{words} {code}\n").as_bytes()).ok();
    }
}

/// Whether an agent sees how the processes of this node end.
pub(crate) fn watches_this_node() -> bool {
    env::var_os(FOLDER).is_some()
}

fn connect(socket: &PathBuf, rank: usize) -> Option<UnixStream> {
    let mut agent = UnixStream::connect(socket).ok()?;
    agent.write_all(format!("rank {rank}\n").as_bytes()).ok()?;
    let kept = agent.try_clone().ok();
    *AGENT.lock().unwrap_or_else(PoisonError::into_inner) = kept;
    Some(agent)
}

fn stay_connected(first: Option<UnixStream>, socket: &PathBuf, rank: usize) {
    let mut connected = first;
    loop {
        if let Some(mut agent) = connected.take() {
            // It sends nothing. The read ends when the agent has ended.
            agent.read_exact(&mut [0]).ok();
        }
        thread::sleep(RETRY);
        connected = connect(socket, rank);
    }
}

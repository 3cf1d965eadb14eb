//! The folder of a job in the memory of a node. Only its user can read it. A part of it belongs to each node, since nodes may share a
//! machine in tests.
//!
//! The agent removes its part at the end. If it was killed, the next agent of the user on this machine does.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use crate::rendezvous::{handshake, host_name};

/// Where the folders of jobs are: a file system in memory, if there is one.
fn memory() -> PathBuf {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() }
}

fn prefix() -> String {
    format!("kintsugi-{}-", geteuid().as_raw())
}

/// A name for the folder of a new job. Nobody can guess it.
pub fn job_folder() -> io::Result<PathBuf> {
    let number = u64::from_be_bytes(handshake::random()?);
    Ok(memory().join(format!("{}{number:016x}", prefix())))
}

/// A node's part of the folder of a job. It is locked while its agent lives.
#[derive(Debug)]
pub struct NodeFolder {
    path: PathBuf,
    _lock: File,
}

impl NodeFolder {
    /// The path of this node's part.
    pub fn path_in(job: &Path) -> PathBuf {
        job.join(host_name().replace('/', "-"))
    }

    /// The socket of the agent in such a part.
    pub fn socket_in(node: &Path) -> PathBuf {
        node.join("agent")
    }

    /// Creates it, or takes it over from an agent that has ended.
    pub fn create(job: &Path) -> io::Result<Self> {
        let path = Self::path_in(job);
        DirBuilder::new().mode(0o700).recursive(true).create(&path)?;
        let lock = File::create(path.join("lock"))?;
        lock.try_lock()?;
        Ok(NodeFolder { path, _lock: lock })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes what killed agents of this user have left, but nothing of the job in the folder `own`: an agent takes over from one that was
    /// killed, with the copies of states.
    pub fn remove_abandoned(own: &Path) {
        let folders = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
        let jobs = folders(&memory()).filter(|job| job.file_name().to_string_lossy().starts_with(&prefix()));
        for job in jobs.map(|job| job.path()).filter(|job| job != own) {
            for node in folders(&job).map(|node| node.path()) {
                // A part whose lock was not made yet belongs to an agent that is starting.
                let lock = File::open(node.join("lock"));
                if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
                    fs::remove_dir_all(&node).ok();
                }
            }
            fs::remove_dir(&job).ok();
        }
    }
}

impl Drop for NodeFolder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.path).ok();
        // Unless another node has a part of it.
        self.path.parent().map(fs::remove_dir);
    }
}

//! The process at the other end of a connection.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::frame::{FrameError, FrameReader, FrameWriter, Kind};
use super::handshake::Keys;
use super::link::is_unacknowledged;
use crate::patience::SLICE;
use crate::waits::Wait;

/// How long a write may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(8);

/// The process at the other end of a connection.
pub(super) struct Peer {
    pub rank: usize,
    pub host: String,
    pub stream: TcpStream,
    writer: Mutex<FrameWriter>,
    /// Used by the thread that receives.
    reader: Mutex<FrameReader>,
    inbox: Mutex<Inbox>,
    pub arrived: Condvar,
}

/// What a process has sent.
#[derive(Default)]
pub(super) struct Inbox {
    pub frames: VecDeque<Vec<u8>>,
    pub posts: VecDeque<Vec<u8>>,
    /// Its last heartbeat.
    pub status: Status,
    /// How long it has sent nothing.
    pub silent: Duration,
    /// Whether the process has said that it ends, or its connection has closed.
    pub closed: bool,
    /// Whether it has said that it ends.
    pub said_goodbye: bool,
}

/// The contents of a heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Status {
    /// Finished pieces of work of the process: see [`kintsugi_spec::work`]. From rank 0, those of all processes.
    pub pieces: u64,
    /// What the process waits for.
    pub wait: Option<Wait>,
    /// Whether its rank pauses between steps, as for a checkpoint. From rank 0, whether any rank does.
    pub paused: bool,
    /// How long its rank computes in a step, in microseconds; 0 if that is not known.
    pub compute_us: u64,
}

impl Peer {
    pub fn new(rank: usize, host: String, stream: TcpStream, keys: &Keys) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SLICE))?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        Ok(Peer {
            rank,
            host,
            stream,
            writer: Mutex::new(FrameWriter::new(keys.sending)),
            reader: Mutex::new(FrameReader::new(keys.receiving)),
            inbox: Mutex::default(),
            arrived: Condvar::new(),
        })
    }

    pub fn write(&self, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        lock(&self.writer).write(&mut &self.stream, kind, bytes)
    }

    /// Waits for a frame, but not longer than `patience` without a byte.
    pub fn read(&self, patience: impl Fn() -> Duration) -> Result<(Kind, Vec<u8>), FrameError> {
        lock(&self.reader).read(&mut &self.stream, |silent| {
            self.inbox().silent = silent;
            silent < patience()
        })
    }

    pub fn inbox(&self) -> MutexGuard<'_, Inbox> {
        lock(&self.inbox)
    }

    pub fn deliver(&self, change: impl FnOnce(&mut Inbox)) {
        change(&mut self.inbox());
        self.arrived.notify_all();
    }

    /// Whether its host does not get what is sent to it.
    pub fn is_cut_off(&self) -> bool {
        is_unacknowledged(&self.stream)
    }

    /// Whether the process has closed its end of the connection. What it sent before may not have been read yet.
    pub fn has_hung_up(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

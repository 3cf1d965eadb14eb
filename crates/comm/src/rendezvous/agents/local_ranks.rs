//! The ranks of a node, as its agent sees them: processes that are connected to its socket.
//!
//! The kernel reports connections in the order in which they become readable. So if an agent is late, it still sees which rank ended
//! first.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, pidfd_open, pidfd_send_signal};

use super::RankEvent;

/// The numbers of the descriptors that are no ranks.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;

/// Bytes of a message that has no end.
const MAX_LINE: usize = 64;

/// Connections at a time.
const MAX_CONNECTIONS: usize = 4096;

/// The connections of an agent.
pub(super) struct LocalRanks {
    epoll: OwnedFd,
    listener: UnixListener,
    wake: UnixStream,
    connections: BTreeMap<u64, LocalRank>,
    next: u64,
}

struct LocalRank {
    stream: UnixStream,
    pid: Pid,
    process: OwnedFd,
    unread: Vec<u8>,
    /// Once the process has said it.
    rank: Option<usize>,
    has_ended: bool,
    is_stopped: bool,
}

impl LocalRanks {
    /// Listens at a socket, which an agent that has ended may have left. A byte from `wake` ends a wait.
    pub fn listen(socket: &Path, wake: UnixStream) -> io::Result<Self> {
        fs::remove_file(socket).ok();
        let listener = UnixListener::bind(socket)?;
        listener.set_nonblocking(true)?;
        wake.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add(&epoll, &listener, LISTENER)?;
        add(&epoll, &wake, WAKE)?;
        Ok(LocalRanks { epoll, listener, wake, connections: BTreeMap::new(), next: WAKE + 1 })
    }

    /// Waits until something happens, for `limit` at most. Returns what has, in this order.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Vec<RankEvent>> {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        let mut ready = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, spare_capacity(&mut ready), Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut events = Vec::new();
        for event in ready {
            match event.data.u64() {
                LISTENER => self.accept(),
                WAKE => drop(self.wake.read(&mut [0; 64])),
                number => self.read(number, &mut events),
            }
        }
        Ok(events)
    }

    fn accept(&mut self) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        if self.connections.len() < MAX_CONNECTIONS
            && let Ok(connection) = LocalRank::new(stream)
            && add(&self.epoll, &connection.stream, self.next).is_ok()
        {
            self.connections.insert(self.next, connection);
            self.next += 1;
        }
    }

    fn read(&mut self, number: u64, events: &mut Vec<RankEvent>) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.read(events) {
            return;
        }
        let signal = connection.signal();
        epoll::delete(&self.epoll, &connection.stream).ok();
        if let Some(LocalRank { rank: Some(rank), has_ended: false, .. }) = self.connections.remove(&number) {
            events.push(RankEvent::Died { rank, signal });
        }
    }

    /// The ranks that are here now.
    pub fn present(&self) -> Vec<RankEvent> {
        self.connections.values().filter_map(|one| Some(RankEvent::Began { rank: one.rank? })).collect()
    }

    /// The ranks that were stopped or continued since the last look.
    pub fn look_for_stops(&mut self) -> Vec<RankEvent> {
        let look = |connection: &mut LocalRank| {
            let rank = connection.rank?;
            let is_stopped = field(connection.pid, 0).as_deref() == Some("T");
            let before = std::mem::replace(&mut connection.is_stopped, is_stopped);
            let event = if is_stopped { RankEvent::Stopped { rank } } else { RankEvent::Continued { rank } };
            (before != is_stopped).then_some(event)
        };
        self.connections.values_mut().filter_map(look).collect()
    }

    /// Kills all ranks.
    pub fn kill(&self) {
        for connection in self.connections.values().filter(|connection| connection.rank.is_some()) {
            pidfd_send_signal(&connection.process, Signal::KILL).ok();
        }
    }
}

impl LocalRank {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let peer = socket_peercred(&stream)?;
        if peer.uid != geteuid() {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let process = pidfd_open(peer.pid, PidfdFlags::empty())?;
        let (unread, rank) = (Vec::new(), None);
        Ok(LocalRank { stream, pid: peer.pid, process, unread, rank, has_ended: false, is_stopped: false })
    }

    /// Reads what it has sent. Returns whether the connection goes on.
    fn read(&mut self, events: &mut Vec<RankEvent>) -> bool {
        let mut bytes = [0; MAX_LINE];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(read) => self.unread.extend(&bytes[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return false,
            }
            while let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                let Some(event) = self.event(&line) else { return false };
                events.push(event);
            }
            if self.unread.len() > MAX_LINE {
                return false;
            }
        }
    }

    /// The meaning of a line.
    fn event(&mut self, line: &[u8]) -> Option<RankEvent> {
        let (word, number) = str::from_utf8(line).ok()?.trim_end().split_once(' ')?;
        match (word, self.rank) {
            ("rank", None) => {
                let rank = number.parse().ok()?;
                self.rank = Some(rank);
                Some(RankEvent::Began { rank })
            }
            ("ended", Some(rank)) if !self.has_ended => {
                let code = number.parse().ok()?;
                self.has_ended = true;
                Some(RankEvent::Ended { rank, code })
            }
            _ => None,
        }
    }

    /// The signal that ends the process, as long as its parent has not taken note of its end.
    fn signal(&self) -> Option<u8> {
        // Counted from the state, it is the last field but one of 52: the exit code as `wait` returns it.
        let code: u32 = field(self.pid, 49)?.parse().ok()?;
        Some((code & 0x7f) as u8).filter(|&signal| signal > 0)
    }
}

/// A field of `/proc/PID/stat`, counted from the state of the process.
fn field(pid: Pid, index: usize) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name of the program is in parentheses and may contain any character.
    stat.rsplit_once(')')?.1.split_whitespace().nth(index).map(str::to_owned)
}

fn add(epoll: &OwnedFd, source: impl AsFd, number: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, source, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?)
}

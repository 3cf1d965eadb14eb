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
use super::exit_status::{ExitStatus, field};
use super::rank::{NAMES_CAUSE, NAMES_NO_CAUSE};

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
        let mut own = Vec::new();
        let is_open = connection.read(&mut own);
        if !is_open || own.iter().any(|event| matches!(event, RankEvent::Ended { .. })) {
            self.add_dying(number, events);
        }
        events.extend(own);
        if is_open {
            return;
        }
        let Some(connection) = self.connections.remove(&number) else { return };
        epoll::delete(&self.epoll, &connection.stream).ok();
        events.extend(connection.end());
    }

    /// Adds the deaths of the other ranks that a signal is ending. They come before the end of a rank, even if their connections close
    /// after it: a process that was killed needs some time to go, and meanwhile its peers may find that they cannot reach it.
    fn add_dying(&mut self, ended: u64, events: &mut Vec<RankEvent>) {
        for (_, other) in
            self.connections.iter_mut().filter(|(number, other)| **number != ended && !other.has_ended)
        {
            if let (Some(rank), Some(ExitStatus::Signal(signal))) = (other.rank, other.exit_status()) {
                other.has_ended = true;
                events.push(RankEvent::Died { rank, signal: Some(signal) });
            }
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

    fn exit_status(&self) -> Option<ExitStatus> {
        ExitStatus::of(self.pid, &self.process)
    }

    /// The end of a process whose connection has closed, unless it is known.
    fn end(&self) -> Option<RankEvent> {
        let rank = self.rank.filter(|_| !self.has_ended)?;
        Some(match self.exit_status() {
            Some(ExitStatus::Code(code)) => RankEvent::Ended { rank, code, names_cause: false },
            Some(ExitStatus::Signal(signal)) => RankEvent::Died { rank, signal: Some(signal) },
            None => RankEvent::Died { rank, signal: None },
        })
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
        let (word, number) = str::from_utf8(line).ok()?.trim_end().rsplit_once(' ')?;
        match (word, self.rank) {
            ("rank", None) => {
                let rank = number.parse().ok()?;
                self.rank = Some(rank);
                Some(RankEvent::Began { rank })
            }
            (NAMES_CAUSE | NAMES_NO_CAUSE, Some(rank)) if !self.has_ended => {
                let code = number.parse().ok()?;
                self.has_ended = true;
                Some(RankEvent::Ended { rank, code, names_cause: word == NAMES_CAUSE })
            }
            _ => None,
        }
    }
}

fn add(epoll: &OwnedFd, source: impl AsFd, number: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, source, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_rank_that_was_killed_comes_before_one_that_ends_because_of_it_though_its_connection_is_open() {
        let socket = std::env::temp_dir().join(format!("kintsugi-ranks-{}", std::process::id()));
        let (_wake, woken) = UnixStream::pair().expect("a pair of sockets");
        let mut ranks = LocalRanks::listen(&socket, woken).expect("a socket");
        let mut killed = Command::new("sleep").arg("60").spawn().expect("a process");
        let pid = Pid::from_child(&killed);
        let [mut first, mut second] = [(); 2].map(|()| UnixStream::connect(&socket).expect("it listens"));
        let mut events = Vec::new();
        let mut until = |ranks: &mut LocalRanks, number: usize| {
            let begun = Instant::now();
            while events.len() < number {
                assert!(begun.elapsed() < Duration::from_secs(30), "{events:?}");
                events.extend(ranks.wait(Duration::from_millis(10)).expect("it waits"));
            }
            events.clone()
        };
        first.write_all(b"rank 0\n").expect("it listens");
        until(&mut ranks, 1);
        second.write_all(b"rank 1\n").expect("it listens");
        until(&mut ranks, 2);
        // The process of rank 0 is the other one.
        let of_first = ranks.connections.values_mut().find(|one| one.rank == Some(0)).expect("it is there");
        of_first.pid = pid;
        of_first.process = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
        killed.kill().expect("it is ours");
        second.write_all(b"ended because of others 1\n").expect("it listens");
        let found = until(&mut ranks, 4);
        drop(first);
        assert_eq!(ranks.wait(Duration::from_secs(30)).expect("it waits"), [], "its death is known");
        killed.wait().expect("a child");
        fs::remove_file(&socket).ok();
        let died = RankEvent::Died { rank: 0, signal: Some(9) };
        assert_eq!(found[2..], [died, RankEvent::Ended { rank: 1, code: 1, names_cause: false }]);
    }
}

//! How the processes of a job meet: rank 0 listens, and all others connect to it.
//!
//! Anybody can open a connection to rank 0. Handshakes therefore run side by side, each with a deadline for all of it, and their number
//! is bounded. Rank 0 looks at its own limit whatever happens on the connections.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::RendezvousError;
use super::error::list;
use super::handshake::{Introduction, Keys, admit, introduce};
use super::peer::Peer;
use crate::notice::print_notice;
use crate::patience::{Decision, NOTICE, Patience};

/// How long one handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Handshakes at a time. Further connections are closed; a rank tries again.
const MAX_HANDSHAKES: usize = 256;

const POLL: Duration = Duration::from_millis(5);

/// How long a rank waits before it tries again to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);

/// Rank 0 waits until all others have come, for at most `limit`.
pub(super) fn receive_all(
    size: usize,
    listener: &TcpListener,
    secret: &str,
    limit: Duration,
) -> Result<Vec<Peer>, RendezvousError> {
    let refused = |error: io::Error| RendezvousError::Listen {
        address: listener
            .local_addr()
            .map_or_else(|_| "its address".to_owned(), |address| address.to_string()),
        reason: error.to_string(),
    };
    let mut handshakes = Handshakes::new(listener, secret.to_owned(), POLL).map_err(refused)?;
    let mut peers: Vec<Peer> = Vec::new();
    let (mut patience, mut last_look) = (Patience::new(limit, NOTICE), Instant::now());
    while peers.len() + 1 < size {
        if let Some((introduction, peer)) = handshakes.next() {
            // A rank whose handshake took too long for it has closed that connection, and comes again.
            peers.retain(|other| other.rank != introduction.rank || !other.has_hung_up());
            check(&introduction, size, &peers)?;
            peers.push(peer);
        }
        let missing =
            || (1..size).filter(|rank| peers.iter().all(|peer| peer.rank != *rank)).collect::<Vec<_>>();
        let now = Instant::now();
        match patience.pass(now - std::mem::replace(&mut last_look, now), 0) {
            Decision::Wait => {}
            Decision::Notify => print_notice(&format!("waiting for rank {} to connect", list(&missing()))),
            Decision::GiveUp => {
                return Err(RendezvousError::Missing {
                    ranks: missing(),
                    limit,
                    reason: handshakes.not_accepted,
                });
            }
        }
    }
    Ok(peers)
}

/// Handshakes with everybody who connects to a listener.
pub(super) struct Handshakes<'a> {
    listener: &'a TcpListener,
    secret: String,
    /// How long a call waits if nobody connects.
    pause: Duration,
    finished: Sender<HandshakeResult>,
    results: Receiver<HandshakeResult>,
    pending: usize,
    /// Why a connection could not be accepted, if that happened.
    not_accepted: Option<String>,
}

type HandshakeResult = (SocketAddr, io::Result<(Introduction, Peer)>);

impl<'a> Handshakes<'a> {
    pub fn new(listener: &'a TcpListener, secret: String, pause: Duration) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        raise_descriptor_limit();
        let (finished, results) = channel();
        Ok(Handshakes { listener, secret, pause, finished, results, pending: 0, not_accepted: None })
    }

    /// Accepts a connection, if there is one. Returns a process that has proved that it knows the secret, if there is one.
    pub fn next(&mut self) -> Option<(Introduction, Peer)> {
        match self.listener.accept() {
            Ok((stream, address)) if self.pending < MAX_HANDSHAKES => {
                let (finished, secret) = (self.finished.clone(), self.secret.clone());
                let shake = move || drop(finished.send((address, receive_one(stream, &secret))));
                let started = thread::Builder::new().name("handshake".into()).spawn(shake);
                self.pending += usize::from(started.is_ok());
            }
            // The connection closes.
            Ok(_) => thread::sleep(self.pause),
            Err(error) => {
                // The system may have no more file descriptors for now.
                if error.kind() != io::ErrorKind::WouldBlock {
                    self.not_accepted = Some(error.to_string());
                }
                thread::sleep(self.pause);
            }
        }
        let (address, result) = self.results.try_recv().ok()?;
        self.pending -= 1;
        result.inspect_err(|error| warn(address, error)).ok()
    }
}

/// Allows as many open files as the system lets this process have: rank 0 has a connection for every rank, and the usual limit is
/// 1024.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).ok();
}

/// Tells people of a process that has another secret. Other connections that lead nowhere are of no interest.
fn warn(address: SocketAddr, error: &io::Error) {
    if error.kind() == io::ErrorKind::PermissionDenied {
        print_notice(&format!("warning: a process at {address} was refused: {error} (KINTSUGI_SECRET)"));
    }
}

fn receive_one(stream: TcpStream, secret: &str) -> io::Result<(Introduction, Peer)> {
    stream.set_nonblocking(false)?;
    let mut timed = TimedStream::new(stream);
    let (introduction, keys) = admit(&mut timed, secret)?;
    let peer = Peer::new(introduction.rank, introduction.host.clone(), timed.stream, &keys)?;
    Ok((introduction, peer))
}

fn check(introduction: &Introduction, size: usize, peers: &[Peer]) -> Result<(), RendezvousError> {
    let Introduction { rank, size: theirs, host } = introduction;
    let problem = if *theirs != size {
        format!("rank {rank} on {host} is one of {theirs} processes, and rank 0 one of {size}")
    } else if !(1..size).contains(rank) || peers.iter().any(|peer| peer.rank == *rank) {
        format!("two processes of the job have rank {rank}, one of them on {host}")
    } else {
        return Ok(());
    };
    Err(RendezvousError::Mismatch(problem))
}

/// Every other rank connects to rank 0, which may not be there yet, at the first of its addresses that works.
pub(super) fn reach_first(
    introduction: &Introduction,
    addresses: &[String],
    secret: &str,
    limit: Duration,
) -> Result<Peer, RendezvousError> {
    let (mut patience, mut last_look) = (Patience::new(limit, NOTICE), Instant::now());
    loop {
        let mut reason = String::new();
        for address in addresses {
            match reach(introduction, address, secret) {
                Ok((keys, stream)) => {
                    let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
                    let peer = Peer::new(0, host.to_owned(), stream, &keys);
                    return peer.map_err(|error| failed(introduction, addresses, limit, &error.to_string()));
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(RendezvousError::Refused {
                        address: address.clone(),
                        reason: error.to_string(),
                    });
                }
                Err(error) => reason = error.to_string(),
            }
        }
        thread::sleep(RETRY);
        let now = Instant::now();
        match patience.pass(now - std::mem::replace(&mut last_look, now), 0) {
            Decision::Wait => {}
            Decision::Notify => {
                print_notice(&format!("waiting for rank 0 at {}: {reason}", addresses.join(" or ")));
            }
            Decision::GiveUp => return Err(failed(introduction, addresses, limit, &reason)),
        }
    }
}

fn failed(
    introduction: &Introduction,
    addresses: &[String],
    limit: Duration,
    reason: &str,
) -> RendezvousError {
    let (rank, address, reason) = (introduction.rank, addresses.join(" or "), reason.to_owned());
    RendezvousError::Connect { rank, address, limit, reason }
}

fn reach(introduction: &Introduction, address: &str, secret: &str) -> io::Result<(Keys, TcpStream)> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for resolved in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&resolved, HANDSHAKE) {
            Ok(stream) => {
                let mut timed = TimedStream::new(stream);
                let keys = introduce(&mut timed, secret, introduction)?;
                return Ok((keys, timed.stream));
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// A stream whose reads and writes together must end in [`HANDSHAKE`].
struct TimedStream {
    stream: TcpStream,
    end: Instant,
}

impl TimedStream {
    fn new(stream: TcpStream) -> Self {
        TimedStream { stream, end: Instant::now() + HANDSHAKE }
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for TimedStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(bytes)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

//! How the processes of a job meet without MPI: all of them connect to rank 0 by TCP.
//!
//! Rank 0 listens at the address in [`ADDRESS`]. Every process proves that it knows the secret of the job (`handshake`). The
//! connections carry settings, results and failures, and no tensors. Every process sends a heartbeat every second. If a
//! connection closes, or is silent for too long, the process at its other end is taken for dead, and the job fails.

mod frame;
mod handshake;

use std::collections::VecDeque;
use std::env;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::RankFailure;
use crate::mpi::launched;
use frame::{Kind, Lost};
use handshake::{Introduction, admit, introduce};

/// The variable with the address at which rank 0 listens: `host:port`.
pub const ADDRESS: &str = "KINTSUGI_RENDEZVOUS";

/// The variable with the secret of the job.
pub const SECRET: &str = "KINTSUGI_SECRET";

/// How long the processes of a job wait for each other at the beginning.
const MEETING: Duration = Duration::from_secs(120);

/// How long one handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long a process may be silent.
const SILENCE: Duration = Duration::from_secs(8);

/// This process among those of its job. There is at most one.
pub struct Rendezvous {
    /// The rank of this process.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// The name of this host.
    pub host: String,
    /// The connections: of rank 0 to all others, of the others to rank 0.
    peers: Vec<Peer>,
    failure: OnceLock<RankFailure>,
    /// Whether another process prints the failure.
    reported_elsewhere: AtomicBool,
    /// Whether this process ends, so that nobody minds when connections close.
    ends: AtomicBool,
}

/// The process at the other end of a connection.
struct Peer {
    rank: usize,
    host: String,
    stream: TcpStream,
    /// Held while a frame is written.
    writing: Mutex<()>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

#[derive(Default)]
struct Inbox {
    frames: VecDeque<Vec<u8>>,
    /// Whether the process has said that it ends, or its connection has closed.
    closed: bool,
}

/// Why the processes do not meet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RendezvousError {
    /// A variable is missing.
    #[error("{ADDRESS} is set, but not {0}; kintsugi launch --no-mpi sets them all")]
    Variable(&'static str),
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {ADDRESS}={address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// The system's message.
        reason: String,
    },
    /// Rank 0 cannot be reached.
    #[error("rank {rank} did not reach rank 0 at {ADDRESS}={address} in {MEETING:?}: {reason}")]
    Connect {
        /// The rank of this process.
        rank: usize,
        /// The address.
        address: String,
        /// The system's message.
        reason: String,
    },
    /// Some processes have not come.
    #[error("rank {} did not come to {ADDRESS} in {MEETING:?}", list(.0))]
    Missing(Vec<usize>),
    /// The processes do not fit together.
    #[error("{0}")]
    Mismatch(String),
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

static RENDEZVOUS: OnceLock<Result<Rendezvous, RendezvousError>> = OnceLock::new();

/// Whether this process was told where to meet others.
pub fn is_arranged() -> bool {
    env::var_os(ADDRESS).is_some()
}

/// The variables of the processes that this process starts on its own machine, besides rank and size: a free port, and a new
/// secret.
pub fn arrange_locally() -> io::Result<[(&'static str, String); 2]> {
    // Rank 0 listens there soon. Should another program take the port before, rank 0 says so.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let [first, second] = [handshake::random()?, handshake::random()?].map(u128::from_be_bytes);
    let secret = format!("{first:032x}{second:032x}");
    Ok([(ADDRESS, address.to_string()), (SECRET, secret)])
}

impl Rendezvous {
    /// Meets the other processes, or finds that this process already did.
    pub fn connect() -> Result<&'static Rendezvous, RendezvousError> {
        let mut first = false;
        let met = RENDEZVOUS.get_or_init(|| {
            first = true;
            let variable = |name| env::var(name).map_err(|_| RendezvousError::Variable(name));
            let launched = launched().ok_or(RendezvousError::Variable("KINTSUGI_RANK and KINTSUGI_RANKS"))?;
            Self::meet(launched.rank, launched.size, &variable(ADDRESS)?, &variable(SECRET)?)
        });
        let met = met.as_ref().map_err(Clone::clone)?;
        if first {
            met.start_threads();
        }
        Ok(met)
    }

    /// Whether this process has failed because of a failure that another process prints.
    pub fn is_reported_elsewhere() -> bool {
        matches!(RENDEZVOUS.get(), Some(Ok(met)) if met.reported_elsewhere.load(Ordering::Relaxed))
    }

    /// Says goodbye at the end of the process, if it has met others. With `end_others`, ends all other processes, too: they
    /// wait for this one, which has failed.
    pub fn finish(end_others: bool) {
        if let Some(Ok(met)) = RENDEZVOUS.get() {
            met.leave(end_others);
        }
    }

    fn meet(rank: usize, size: usize, address: &str, secret: &str) -> Result<Self, RendezvousError> {
        let host = host_name();
        let peers = if rank == 0 {
            receive_all(size, address, secret)?
        } else {
            let introduction = Introduction { rank, size, host: host.clone() };
            vec![reach_first(&introduction, address, secret)?]
        };
        let (failure, reported_elsewhere, ends) =
            (OnceLock::new(), AtomicBool::new(false), AtomicBool::new(false));
        Ok(Rendezvous { rank, size, host, peers, failure, reported_elsewhere, ends })
    }

    fn start_threads(&'static self) {
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name).spawn(body).expect("a thread for a connection");
        };
        for peer in &self.peers {
            spawn(format!("from rank {}", peer.rank), Box::new(move || self.listen(peer)));
        }
        spawn("heartbeat".into(), Box::new(move || self.send_heartbeats()));
    }

    fn send_heartbeats(&self) {
        while !self.ends.load(Ordering::Relaxed) {
            for peer in &self.peers {
                // The thread that listens to the peer notices that it is gone.
                peer.write(Kind::Heartbeat, &[]).ok();
            }
            thread::sleep(HEARTBEAT);
        }
    }

    /// Receives everything that a peer sends.
    fn listen(&self, peer: &Peer) {
        let mut stream = &peer.stream;
        loop {
            match frame::read(&mut stream, SILENCE) {
                Ok((Kind::Data, bytes)) => peer.deliver(|inbox| inbox.frames.push_back(bytes)),
                Ok((Kind::Heartbeat, _)) => {}
                Ok((Kind::Goodbye, _)) => return peer.deliver(|inbox| inbox.closed = true),
                Ok((Kind::Abort, bytes)) => {
                    let unknown = || RankFailure::new(peer.rank, "an unknown op", "it does not say why");
                    let failure = postcard::from_bytes(&bytes).unwrap_or_else(|_| unknown());
                    self.fail(&failure, true, Some(peer.rank));
                }
                Err(lost) => {
                    peer.deliver(|inbox| inbox.closed = true);
                    if !self.ends.load(Ordering::Relaxed) {
                        // If rank 0 is gone, all others notice, and the first of them says so.
                        self.fail(&peer.lost(&lost), peer.rank == 0 && self.rank > 1, Some(peer.rank));
                    }
                    return;
                }
            }
        }
    }

    /// Keeps the first failure, and tells all peers of it but the one that it came from.
    fn fail(&self, failure: &RankFailure, elsewhere: bool, source: Option<usize>) {
        if self.failure.get().is_none() {
            self.reported_elsewhere.store(elsewhere, Ordering::Relaxed);
        }
        if self.failure.set(failure.clone()).is_ok() {
            let bytes = postcard::to_stdvec(failure).unwrap_or_default();
            for peer in self.peers.iter().filter(|peer| Some(peer.rank) != source) {
                peer.write(Kind::Abort, &bytes).ok();
            }
        }
        for peer in &self.peers {
            peer.arrived.notify_all();
        }
    }

    /// Ends the job because of a failure of this process.
    pub(crate) fn abort(&self, failure: &RankFailure) {
        self.fail(failure, false, None);
    }

    /// Why the job failed, if it did.
    pub(crate) fn failure(&self) -> Option<RankFailure> {
        self.failure.get().cloned()
    }

    /// See [`crate::Exchange::gather`].
    pub(crate) fn gather(&self, ranks: usize, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure> {
        if self.rank > 0 {
            return self.send(0, &bytes).map(|()| None);
        }
        let others = (1..ranks).map(|rank| self.receive(rank));
        [Ok(bytes)].into_iter().chain(others).collect::<Result<_, _>>().map(Some)
    }

    /// See [`crate::Exchange::broadcast`].
    pub(crate) fn broadcast(&self, ranks: usize, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
        if self.rank > 0 {
            return self.receive(0);
        }
        (1..ranks).try_for_each(|rank| self.send(rank, &bytes))?;
        Ok(bytes)
    }

    fn peer(&self, rank: usize) -> &Peer {
        let peer = self.peers.iter().find(|peer| peer.rank == rank);
        peer.unwrap_or_else(|| panic!("rank {} has no connection to rank {rank}", self.rank))
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), RankFailure> {
        let peer = self.peer(to);
        if peer.write(Kind::Data, bytes).is_err() {
            self.fail(&peer.lost(&Lost::Closed), false, Some(to));
        }
        self.failure().map_or(Ok(()), Err)
    }

    fn receive(&self, from: usize) -> Result<Vec<u8>, RankFailure> {
        let peer = self.peer(from);
        let mut inbox = peer.lock();
        loop {
            if let Some(bytes) = inbox.frames.pop_front() {
                return Ok(bytes);
            }
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if inbox.closed {
                return Err(peer.lost(&Lost::Closed));
            }
            inbox = peer.arrived.wait_timeout(inbox, frame::SLICE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn leave(&self, end_others: bool) {
        self.ends.store(true, Ordering::Relaxed);
        if end_others {
            let failure = RankFailure::new(self.rank, "the job", "it has ended with an error");
            self.fail(&RankFailure { host: Some(self.host.clone()), ..failure }, false, None);
        }
        for peer in &self.peers {
            if !end_others {
                peer.write(Kind::Goodbye, &[]).ok();
            }
            peer.stream.shutdown(Shutdown::Write).ok();
        }
        // A connection that closes with unread bytes loses those that it has sent.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) && self.peers.iter().any(|peer| !peer.lock().closed) {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Peer {
    fn new(rank: usize, host: String, stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(frame::SLICE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let (writing, inbox, arrived) = (Mutex::default(), Mutex::default(), Condvar::new());
        Ok(Peer { rank, host, stream, writing, inbox, arrived })
    }

    fn write(&self, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        let _whole_frame = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&mut &self.stream, kind, bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, change: impl FnOnce(&mut Inbox)) {
        change(&mut self.lock());
        self.arrived.notify_all();
    }

    fn lost(&self, lost: &Lost) -> RankFailure {
        let reason = match lost {
            Lost::Closed => "its process has ended".to_owned(),
            Lost::Silent => format!("nothing was received from its process for {SILENCE:?}"),
        };
        RankFailure { host: Some(self.host.clone()), ..RankFailure::new(self.rank, "an unknown op", reason) }
    }
}

/// Rank 0 waits until all others have come.
fn receive_all(size: usize, address: &str, secret: &str) -> Result<Vec<Peer>, RendezvousError> {
    let refused =
        |error: io::Error| RendezvousError::Listen { address: address.to_owned(), reason: error.to_string() };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let begun = Instant::now();
    let mut peers: Vec<Peer> = Vec::new();
    while peers.len() + 1 < size {
        match listener.accept() {
            // Whoever cannot prove that it belongs to the job is not waited for.
            Ok((stream, _)) => {
                if let Ok((introduction, peer)) = receive_one(stream, secret) {
                    check(&introduction, size, &peers)?;
                    peers.push(peer);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if begun.elapsed() > MEETING {
                    let missing = |rank: &usize| peers.iter().all(|peer| peer.rank != *rank);
                    return Err(RendezvousError::Missing((1..size).filter(missing).collect()));
                }
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(refused(error)),
        }
    }
    Ok(peers)
}

fn receive_one(mut stream: TcpStream, secret: &str) -> io::Result<(Introduction, Peer)> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HANDSHAKE))?;
    let introduction = admit(&mut stream, secret)?;
    let peer = Peer::new(introduction.rank, introduction.host.clone(), stream)?;
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

/// Every other rank connects to rank 0, which may not be there yet.
fn reach_first(introduction: &Introduction, address: &str, secret: &str) -> Result<Peer, RendezvousError> {
    let begun = Instant::now();
    loop {
        let reached = TcpStream::connect(address).and_then(|mut stream| {
            stream.set_read_timeout(Some(HANDSHAKE))?;
            introduce(&mut stream, secret, introduction)?;
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            Peer::new(0, host.to_owned(), stream)
        });
        match reached {
            Ok(peer) => return Ok(peer),
            Err(error) if begun.elapsed() > MEETING || error.kind() == io::ErrorKind::PermissionDenied => {
                let (rank, address) = (introduction.rank, address.to_owned());
                return Err(RendezvousError::Connect { rank, address, reason: error.to_string() });
            }
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// The name of this node: Slurm's, or the system's.
fn host_name() -> String {
    let slurm = env::var("SLURMD_NODENAME").ok().filter(|name| !name.is_empty());
    let system = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    slurm.or_else(system).map_or_else(|| "an unknown host".to_owned(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests;

//! How the processes of a job talk beside their collectives: all of them have a TCP connection to rank 0.
//!
//! The connections carry settings, results, records of checkpoints and failures, and no tensors. They work while a collective
//! hangs. Every process proves that it knows the secret of the job (`handshake`), and every frame is authenticated (`frame`).
//! Processes without MPI find address and secret in their environment. With MPI, rank 0 sends both by MPI.
//!
//! Every process sends a heartbeat every second, which says what it waits for (`heartbeat`). If a connection closes, the process at
//! its other end has died, and the job fails. A rank that has waited for too long asks rank 0, which knows all waits, who is at the end
//! of the chain.

pub mod agents;
#[allow(unsafe_code, reason = "it calls a function of the C library")]
mod end;
mod error;
mod failure;
mod frame;
mod handshake;
mod heartbeat;
mod link;
mod meet;
mod peer;
mod stop_clock;

use std::io;
use std::net::{Shutdown, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{env, thread};

use kintsugi_spec::work::{self, finished_pieces};
use serde::{Deserialize, Serialize};

use crate::RankFailure;
use crate::activity::Activity;
use crate::mpi::launched;
use crate::notice::print_notice;
use crate::patience::{Decision, NOTICE, Patience, SLICE};
use crate::waits::Wait;
pub use error::RendezvousError;
use failure::FailureSource;
use frame::{FrameError, Kind};
use handshake::Introduction;
use peer::Peer;
use stop_clock::StopClock;

/// The variable with the address at which rank 0 listens: `host:port`.
pub const ADDRESS: &str = "KINTSUGI_RENDEZVOUS";

/// The variable with the secret of the job.
pub const SECRET: &str = "KINTSUGI_SECRET";

/// How long the processes of a job wait for each other at the beginning, at most.
const MEETING: Duration = Duration::from_secs(120);

/// How long a process may be silent: at least several heartbeats, and not too long, since a machine that has lost its power closes no
/// connections. Before the first step it is the limit of waits in between, and then the shorter time.
const SILENCE: [Duration; 2] = [Duration::from_secs(6), Duration::from_secs(60)];

/// The limit of waits until [`Rendezvous::set_limit`] sets another.
const LIMIT: Duration = Duration::from_secs(600);

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
    /// Whether the failure was printed, here or by another process.
    reported: AtomicBool,
    /// Whether this process ends, so that connections may close.
    ends: AtomicBool,
    /// How long this process waits for another, in milliseconds.
    limit: AtomicU64,
    /// How long it waits while steps run, in milliseconds; 0 if none runs.
    step_limit: AtomicU64,
    /// Whether a step has run, so that every process is known to send heartbeats in time.
    has_trained: AtomicBool,
    /// How long the rank of this process computes in a step, in microseconds.
    compute_us: AtomicU64,
    /// What the rank of this process waits for.
    wait: Mutex<Option<CurrentWait>>,
    /// When this process was stopped itself.
    stops: StopClock,
}

/// A wait of the rank of this process.
#[derive(Clone, Copy, Debug)]
struct CurrentWait {
    number: u64,
    peer: Option<usize>,
    activity: Activity,
    /// Whether the rank's thread is in a call that has no limit of its own.
    is_blocking: bool,
}

/// Where rank 0 listens, and the secret of the job.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Invitation {
    addresses: Vec<String>,
    secret: String,
}

impl Invitation {
    /// The secret of the job.
    pub fn secret(&self) -> &str {
        &self.secret
    }
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
    Ok([(ADDRESS, address.to_string()), (SECRET, new_secret()?)])
}

fn new_secret() -> io::Result<String> {
    let [first, second] = [handshake::random()?, handshake::random()?].map(u128::from_be_bytes);
    Ok(format!("{first:032x}{second:032x}"))
}

impl Rendezvous {
    /// Meets the other processes at the address in the environment, or finds that this process already did.
    pub fn connect(limit: Duration) -> Result<&'static Rendezvous, RendezvousError> {
        Self::connect_with(limit, || {
            let variable = |name| env::var(name).map_err(|_| RendezvousError::Variable(name));
            let launched = launched().ok_or(RendezvousError::Variable("KINTSUGI_RANK and KINTSUGI_RANKS"))?;
            let (address, secret) = (variable(ADDRESS)?, variable(SECRET)?);
            let (rank, size, limit) = (launched.rank, launched.size, limit.min(MEETING));
            if rank > 0 {
                return Self::join(
                    rank,
                    size,
                    host_name(),
                    &Invitation { addresses: vec![address], secret },
                    limit,
                );
            }
            let listener = TcpListener::bind(&address)
                .map_err(|error| RendezvousError::Listen { address, reason: error.to_string() })?;
            Self::lead(size, host_name(), &listener, &secret, limit)
        })
    }

    /// Meets the other processes in the way that `meet` does, or finds that this process already did.
    pub(crate) fn connect_with(
        limit: Duration,
        meet: impl FnOnce() -> Result<Self, RendezvousError>,
    ) -> Result<&'static Rendezvous, RendezvousError> {
        let mut first = false;
        let met = RENDEZVOUS.get_or_init(|| {
            first = true;
            meet()
        });
        let met = met.as_ref().map_err(Clone::clone)?;
        if first {
            met.start_threads(true);
        }
        met.set_limit(limit);
        Ok(met)
    }

    /// Whether the failure of this process was printed, here or by another process.
    pub fn is_reported() -> bool {
        matches!(RENDEZVOUS.get(), Some(Ok(met)) if met.reported.load(Ordering::Relaxed))
    }

    /// At the end of the process, if it has met others: waits until all of them have come to their end, so that none stalls unnoticed.
    /// With `end_others`, ends all other processes at once, because this one has failed.
    pub fn finish(end_others: bool) {
        if let Some(Ok(met)) = RENDEZVOUS.get() {
            met.leave(end_others);
        }
    }

    /// Closes the connections, as the last thing that a process does.
    pub fn close() {
        if let Some(Ok(met)) = RENDEZVOUS.get() {
            met.disconnect();
        }
    }

    /// Rank 0: where it listens for processes on `hosts`, and what it tells them.
    pub(crate) fn invite(host: &str, hosts: &[String]) -> io::Result<(TcpListener, Invitation)> {
        let is_local = hosts.iter().all(|other| other == host);
        let listener = TcpListener::bind(if is_local { "127.0.0.1:0" } else { "0.0.0.0:0" })?;
        let port = listener.local_addr()?.port();
        let mut names =
            if is_local { vec!["127.0.0.1".to_owned()] } else { vec![host.to_owned(), host_name()] };
        names.dedup();
        let addresses = names.into_iter().map(|name| format!("{name}:{port}")).collect();
        Ok((listener, Invitation { addresses, secret: new_secret()? }))
    }

    /// Rank 0: waits for the others.
    pub(crate) fn lead(
        size: usize,
        host: String,
        listener: &TcpListener,
        secret: &str,
        limit: Duration,
    ) -> Result<Self, RendezvousError> {
        check(0, size, secret)?;
        Ok(Self::new(0, size, host, meet::receive_all(size, listener, secret, limit)?))
    }

    /// Every other rank: connects to rank 0.
    pub(crate) fn join(
        rank: usize,
        size: usize,
        host: String,
        invitation: &Invitation,
        limit: Duration,
    ) -> Result<Self, RendezvousError> {
        check(rank, size, &invitation.secret)?;
        let introduction = Introduction { rank, size, host: host.clone() };
        let first = meet::reach_first(&introduction, &invitation.addresses, &invitation.secret, limit)?;
        Ok(Self::new(rank, size, host, vec![first]))
    }

    fn new(rank: usize, size: usize, host: String, peers: Vec<Peer>) -> Self {
        Rendezvous {
            rank,
            size,
            host,
            peers,
            failure: OnceLock::new(),
            reported: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            limit: AtomicU64::new(LIMIT.as_millis() as u64),
            step_limit: AtomicU64::new(0),
            has_trained: AtomicBool::new(false),
            compute_us: AtomicU64::new(0),
            wait: Mutex::default(),
            stops: StopClock::new(),
        }
    }

    /// Starts the threads that send heartbeats and receive frames. If it `owns_process`, a process that does not notice the failure of
    /// its job is ended.
    fn start_threads(&'static self, owns_process: bool) {
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            let thread = thread::Builder::new().name(name).stack_size(512 << 10);
            thread.spawn(body).expect("a thread for a connection");
        };
        spawn("heartbeat".into(), Box::new(move || self.send_heartbeats(owns_process)));
        for peer in &self.peers {
            spawn(format!("from rank {}", peer.rank), Box::new(move || self.listen(peer)));
        }
    }

    /// Receives everything that a peer sends.
    fn listen(&self, peer: &Peer) {
        loop {
            let patience = || {
                self.stops.look();
                self.longest_silence()
            };
            match peer.read(patience) {
                Ok((Kind::Data, bytes)) => peer.deliver(|inbox| inbox.frames.push_back(bytes)),
                Ok((Kind::Post, bytes)) => peer.deliver(|inbox| inbox.posts.push_back(bytes)),
                Ok((Kind::Heartbeat, bytes)) => {
                    if let Ok(status) = postcard::from_bytes(&bytes) {
                        peer.deliver(|inbox| inbox.status = status);
                    }
                }
                Ok((Kind::Goodbye, _)) => {
                    peer.deliver(|inbox| (inbox.closed, inbox.said_goodbye) = (true, true));
                }
                Ok((Kind::Abort, bytes)) => {
                    let unknown = || RankFailure::new(peer.rank, "an unknown op", "it does not say why");
                    let failure = postcard::from_bytes(&bytes).unwrap_or_else(|_| unknown());
                    let failure = if self.rank == 0 { self.explained(failure) } else { failure };
                    self.fail(&failure, FailureSource::Peer(peer.rank));
                }
                Err(lost) => {
                    let mut said_goodbye = false;
                    peer.deliver(|inbox| {
                        inbox.closed = true;
                        said_goodbye = inbox.said_goodbye;
                    });
                    if !said_goodbye && !self.ends.load(Ordering::Relaxed) {
                        self.lose(peer, &lost);
                    }
                    return;
                }
            }
        }
    }

    /// How long this process waits for another that makes no progress: shorter while steps run, unless a rank pauses between two.
    pub(crate) fn limit(&self) -> Duration {
        let limit = Duration::from_millis(self.limit.load(Ordering::Relaxed));
        match self.step_limit.load(Ordering::Relaxed) {
            0 => limit,
            _ if self.is_paused() => limit,
            step_limit => limit.min(Duration::from_millis(step_limit)),
        }
    }

    /// How long another process may send nothing. Heartbeats come from a thread of their own, so a rank that is slow sends them.
    fn longest_silence(&self) -> Duration {
        if self.has_trained.load(Ordering::Relaxed) {
            return SILENCE[0];
        }
        Duration::from_millis(self.limit.load(Ordering::Relaxed)).clamp(SILENCE[0], SILENCE[1])
    }

    /// Whether this rank pauses between two steps, or any other that is known to.
    fn is_paused(&self) -> bool {
        work::is_paused() || self.peers.iter().any(|peer| peer.inbox().status.paused)
    }

    /// Sets how long this process waits while steps run; `None` if none runs.
    pub(crate) fn set_step_limit(&self, limit: Option<Duration>) {
        let milliseconds = limit.map_or(0, |limit| limit.as_millis().clamp(1, u128::from(u64::MAX)) as u64);
        self.step_limit.store(milliseconds, Ordering::Relaxed);
        self.has_trained.fetch_or(limit.is_some(), Ordering::Relaxed);
    }

    /// Sets how long the rank of this process computes in a step. The next heartbeat tells rank 0.
    pub(crate) fn set_compute_time(&self, time: Duration) {
        self.compute_us.store(time.as_micros().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Rank 0: such times of all processes; zero if one has told none.
    pub(crate) fn compute_times(&self) -> Vec<Duration> {
        let mut times = vec![Duration::ZERO; self.size];
        times[self.rank] = Duration::from_micros(self.compute_us.load(Ordering::Relaxed));
        for peer in &self.peers {
            times[peer.rank] = Duration::from_micros(peer.inbox().status.compute_us);
        }
        times
    }

    /// The host of a process to which this one is connected.
    pub(crate) fn host_of(&self, rank: usize) -> &str {
        if rank == self.rank { &self.host } else { &self.peer(rank).host }
    }

    /// Sets how long this process waits for another that makes no progress.
    pub fn set_limit(&self, limit: Duration) {
        self.limit.store(limit.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Finished pieces of work of all processes that this one knows of.
    pub(crate) fn pieces(&self) -> u64 {
        let others = self.peers.iter().map(|peer| peer.inbox().status.pieces);
        others.fold(finished_pieces(), u64::wrapping_add)
    }

    /// Brings the bytes of the first `ranks` processes to rank 0, in order of rank. Other processes get `None`.
    pub(crate) fn gather(&self, ranks: usize, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure> {
        if self.rank > 0 {
            return self.send(0, &bytes).map(|()| None);
        }
        let others = (1..ranks).map(|rank| self.receive(rank));
        [Ok(bytes)].into_iter().chain(others).collect::<Result<_, _>>().map(Some)
    }

    /// Gives the first `ranks` processes the bytes of rank 0.
    pub(crate) fn broadcast(&self, ranks: usize, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
        if self.rank > 0 {
            return self.receive(0);
        }
        (1..ranks).try_for_each(|rank| self.send(rank, &bytes))?;
        Ok(bytes)
    }

    /// Whether something holds for every process. All of them call it.
    pub fn all(&self, mine: bool) -> Result<bool, RankFailure> {
        let gathered = self.gather(self.size, vec![u8::from(mine)])?;
        let holds = gathered.map(|every| u8::from(every.iter().all(|one| *one == [1])));
        Ok(self.broadcast(self.size, holds.into_iter().collect())? == [1])
    }

    /// Sends bytes to rank 0 that belong to no gather.
    pub(crate) fn post(&self, bytes: &[u8]) {
        // If the connection is lost, the thread that receives ends the job.
        self.peer(0).write(Kind::Post, bytes).ok();
    }

    /// Rank 0: the oldest bytes that a process has posted and that were not taken yet.
    pub(crate) fn take_post(&self, from: usize) -> Option<Vec<u8>> {
        self.peer(from).inbox().posts.pop_front()
    }

    fn peer(&self, rank: usize) -> &Peer {
        let peer = self.peers.iter().find(|peer| peer.rank == rank);
        peer.unwrap_or_else(|| panic!("rank {} has no connection to rank {rank}", self.rank))
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), RankFailure> {
        let peer = self.peer(to);
        if let Err(error) = peer.write(Kind::Data, bytes) {
            let failure = match error.kind() {
                io::ErrorKind::InvalidInput => RankFailure::new(self.rank, "an exchange", error.to_string()),
                _ => self.lost(peer, &FrameError::Closed),
            };
            self.fail(&failure, FailureSource::Here);
        }
        self.failure().map_or(Ok(()), Err)
    }

    fn receive(&self, from: usize) -> Result<Vec<u8>, RankFailure> {
        let activity = Activity::Exchange { from, to: self.rank };
        let received = self.wait_for(self.peer(from), activity, |inbox| inbox.frames.pop_front());
        received.map(|bytes| bytes.ok_or_else(|| self.lost(self.peer(from), &FrameError::Closed)))?
    }

    /// Waits until `take` finds something in what a peer has sent. `None` if the peer has closed its connection and will send nothing
    /// more. After some seconds it says whom it waits for.
    fn wait_for<T>(
        &self,
        peer: &Peer,
        activity: Activity,
        mut take: impl FnMut(&mut peer::Inbox) -> Option<T>,
    ) -> Result<Option<T>, RankFailure> {
        let mut patience = Patience::new(self.limit(), NOTICE);
        let _waiting = WaitGuard::new(self, Some(peer.rank), activity, false);
        let mut inbox = peer.inbox();
        loop {
            if let Some(found) = take(&mut inbox) {
                return Ok(Some(found));
            }
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if inbox.closed {
                return Ok(None);
            }
            let begun = Instant::now();
            inbox = peer.arrived.wait_timeout(inbox, SLICE).unwrap_or_else(PoisonError::into_inner).0;
            let passed = begun.elapsed().min(SLICE);
            drop(inbox);
            patience.set_limit(self.limit());
            match patience.pass(passed, self.pieces()) {
                Decision::Wait => {}
                Decision::Notify => self.notify(Some(peer.rank), activity, patience.waited()),
                Decision::GiveUp => {
                    let failure = RankFailure::stalled(self.rank, activity.to_string(), Some(peer.rank));
                    return Err(self.abort(RankFailure { host: Some(self.host.clone()), ..failure }));
                }
            }
            inbox = peer.inbox();
        }
    }

    /// Tells people for whom this rank waits.
    pub(crate) fn notify(&self, peer: Option<usize>, activity: Activity, waited: Duration) {
        let (seconds, words) = (waited.as_secs(), self.chain(self.rank, peer).words);
        print_notice(&format!("rank {} has waited {seconds} s in {activity} for {words}", self.rank));
    }

    fn current_wait(&self) -> Option<CurrentWait> {
        *self.lock_wait()
    }

    fn lock_wait(&self) -> MutexGuard<'_, Option<CurrentWait>> {
        self.wait.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, end_others: bool) {
        if end_others {
            self.ends.store(true, Ordering::Relaxed);
            let failure = RankFailure::new(self.rank, "the job", "it has ended with an error");
            self.fail(&RankFailure { host: Some(self.host.clone()), ..failure }, FailureSource::Here);
        } else if !self.has_failed() {
            self.say_goodbye();
        }
        self.ends.store(true, Ordering::Relaxed);
    }

    fn disconnect(&self) {
        for peer in &self.peers {
            peer.stream.shutdown(Shutdown::Write).ok();
        }
        // A connection that closes with unread bytes loses those that it has sent.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) && self.peers.iter().any(|peer| !peer.inbox().closed) {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Rank 0 answers when all others have said goodbye.
    fn say_goodbye(&self) {
        let goodbye = |peer: &Peer| drop(peer.write(Kind::Goodbye, &[]));
        if self.rank > 0 {
            self.peers.iter().for_each(goodbye);
        }
        for peer in &self.peers {
            let closed = self.wait_for(peer, Activity::End, |inbox| inbox.closed.then_some(()));
            if closed.is_err() {
                return self.report();
            }
        }
        if self.rank == 0 {
            self.peers.iter().for_each(goodbye);
        }
    }
}

/// Says what this rank waits for, until it is dropped.
pub(crate) struct WaitGuard<'a> {
    rendezvous: &'a Rendezvous,
    before: Option<CurrentWait>,
}

impl<'a> WaitGuard<'a> {
    /// A wait for a rank, if it is known. If it `is_blocking`, the heartbeat's thread looks at its limit.
    pub fn new(
        rendezvous: &'a Rendezvous,
        peer: Option<usize>,
        activity: Activity,
        is_blocking: bool,
    ) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let wait = CurrentWait { number, peer, activity, is_blocking };
        WaitGuard { rendezvous, before: rendezvous.lock_wait().replace(wait) }
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        *self.rendezvous.lock_wait() = self.before;
    }
}

impl CurrentWait {
    fn described(self) -> Wait {
        Wait { peer: self.peer, activity: self.activity.to_string() }
    }
}

fn check(rank: usize, size: usize, secret: &str) -> Result<(), RendezvousError> {
    if secret.is_empty() {
        return Err(RendezvousError::EmptySecret);
    }
    if rank >= size {
        return Err(RendezvousError::Rank { rank, size });
    }
    Ok(())
}

/// The name of this node: Slurm's, or the system's.
fn host_name() -> String {
    let slurm = env::var("SLURMD_NODENAME").ok().filter(|name| !name.is_empty());
    let system = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    slurm.or_else(system).map_or_else(|| "an unknown host".to_owned(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests;

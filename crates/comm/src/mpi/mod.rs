//! Ranks as processes that communicate by MPI, on one machine or many.
//!
//! MPI is loaded at run time (`library`), so the program needs none to be built. Every process has one rank. Collectives are
//! rings of non-blocking messages (`transfer`), in the order of [`crate::ring`]: sums are bit for bit those of `threads`.
//! `progress` says which thread calls MPI.
//!
//! Tensors on a GPU pass through host memory.

mod group;
mod launcher;
#[allow(unsafe_code, reason = "it calls a C library")]
mod library;
mod progress;
#[allow(unsafe_code, reason = "MPI works on memory after a call returns")]
mod transfer;
mod world;

use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

pub use group::MpiGroup;
pub use launcher::{LaunchedProcess, launched};
pub use library::{Abi, LoadError, MpiError, VARIABLE};
pub use world::MpiWorld;

use crate::RankFailure;
use crate::activity::Activity;
use crate::notice::print_notice;
use crate::patience::{NOTICE, Patience};
use crate::rendezvous::{Invitation, Rendezvous, RendezvousError, WaitGuard};
use library::Bytes;
use progress::{Progress, TransferInfo, WaitObserver, WaitOutcome};
use transfer::{Channel, Message, Transfer};

/// MPI in this process. There is at most one.
pub struct Mpi {
    progress: Progress,
    /// The connections of the processes beside MPI.
    rendezvous: OnceLock<&'static Rendezvous>,
    /// The rank of this process.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// The name of this host.
    pub host: String,
    /// The library's name and version.
    pub version: String,
    /// The library's binary interface.
    pub abi: Abi,
    /// The name or path that the library was loaded by.
    pub library: String,
    largest_tag: usize,
}

/// Why this process cannot join the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// There is no usable library.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A call failed.
    #[error(transparent)]
    Call(#[from] MpiError),
    /// A process does not come.
    #[error(transparent)]
    Exchange(Box<RankFailure>),
    /// The processes do not meet by TCP.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The library allows calls from the main thread only.
    #[error(
        "{0} does not allow calls from several threads (MPI_THREAD_SERIALIZED), which kintsugi needs; use an MPI that was \
         built with thread support"
    )]
    Threads(String),
    /// Slurm started the processes without a process manager, by which MPI would find the others.
    #[error(
        "srun started {0} processes without a process manager for MPI, as srun --mpi=none does, so that each would run alone; \
         use srun --mpi=pmix (with MPICH: --mpi=pmi2; srun --mpi=list shows what this Slurm has)"
    )]
    NoProcessManager(usize),
    /// The launcher belongs to another MPI than the one that was loaded.
    #[error(
        "the launcher started {launched} processes, and {library} ({version}) sees {seen}: launcher and library are not of \
         the same MPI; use the launcher of that MPI, or name the launcher's library with {VARIABLE}=/path/to/libmpi.so"
    )]
    Launcher {
        /// Processes by the launcher's environment.
        launched: usize,
        /// Processes that the library sees.
        seen: usize,
        /// The library.
        library: String,
        /// Its version.
        version: String,
    },
}

impl From<RankFailure> for ConnectError {
    fn from(failure: RankFailure) -> Self {
        ConnectError::Exchange(Box::new(failure))
    }
}

static MPI: OnceLock<Result<Mpi, ConnectError>> = OnceLock::new();

impl Mpi {
    /// Joins the processes that the launcher started, or finds that this process already did. From then on no process waits longer
    /// than `limit` for one that makes no progress.
    pub fn connect(limit: Duration) -> Result<&'static Mpi, ConnectError> {
        let mut first = false;
        let mpi = MPI.get_or_init(|| {
            first = true;
            Mpi::new()
        });
        let mpi = mpi.as_ref().map_err(Clone::clone)?;
        if first {
            let run = || mpi.progress.run();
            thread::Builder::new().name("mpi".into()).spawn(run).map_err(|error| MpiError {
                call: "starting the progress thread",
                message: error.to_string(),
            })?;
            let rendezvous = mpi.meet(limit)?;
            mpi.rendezvous.set(rendezvous).ok();
        }
        mpi.rendezvous().set_limit(limit);
        Ok(mpi)
    }

    /// Connects the processes by TCP. Rank 0 learns the others' hosts by MPI, and tells them where it listens.
    fn meet(&self, limit: Duration) -> Result<&'static Rendezvous, ConnectError> {
        let host = host_of(&self.host);
        if self.rank > 0 {
            self.send_bytes(0, host.as_bytes(), limit)?;
            let invitation = self.receive_bytes(0, limit)?;
            let invitation: Invitation = postcard::from_bytes(&invitation).map_err(|_| {
                RendezvousError::Mismatch("rank 0 is a process of another version".to_owned())
            })?;
            let join = || Rendezvous::join(self.rank, self.size, self.host.clone(), &invitation, limit);
            return Ok(Rendezvous::connect_with(limit, join)?);
        }
        let mut hosts = Vec::new();
        for rank in 1..self.size {
            hosts.push(String::from_utf8_lossy(&self.receive_bytes(rank, limit)?).into_owned());
        }
        let refused = |error: std::io::Error| RendezvousError::Listen {
            address: host.to_owned(),
            reason: error.to_string(),
        };
        let (listener, invitation) = Rendezvous::invite(host, &hosts).map_err(refused)?;
        let bytes = postcard::to_stdvec(&invitation).expect("names and numbers can be encoded");
        for rank in 1..self.size {
            self.send_bytes(rank, &bytes, limit)?;
        }
        let lead = || Rendezvous::lead(self.size, self.host.clone(), &listener, invitation.secret(), limit);
        Ok(Rendezvous::connect_with(limit, lead)?)
    }

    /// The connections of the processes beside MPI.
    pub fn rendezvous(&self) -> &'static Rendezvous {
        self.rendezvous.get().expect("the processes meet when they connect")
    }

    /// Whether the job has failed.
    fn has_failed(&self) -> bool {
        self.rendezvous.get().is_some_and(|rendezvous| rendezvous.has_failed())
    }

    /// Calls a function of the library that waits for other ranks and has no limit of its own.
    fn block<T>(&self, activity: Activity, call: impl FnOnce() -> T) -> T {
        let _waiting = WaitGuard::new(self.rendezvous(), None, activity, true);
        call()
    }

    fn new() -> Result<Self, ConnectError> {
        let launched = launched();
        // Some libraries end the process here, others find only this one.
        if let Some(launched) = launched.filter(|launched| launched.lacks_pmi && launched.size > 1) {
            return Err(ConnectError::NoProcessManager(launched.size));
        }
        let loaded = library::load(launched.and_then(|launched| launched.abi))?;
        let (library, api) = (loaded.name, loaded.api);
        let serialized = api.init()?;
        let (version, (rank, size)) = (api.version(), api.rank_and_size()?);
        if !serialized {
            return Err(ConnectError::Threads(version));
        }
        if let Some(launched) = launched.filter(|launched| launched.size != size) {
            let launched = launched.size;
            return Err(ConnectError::Launcher { launched, seen: size, library, version });
        }
        Ok(Mpi {
            rendezvous: OnceLock::new(),
            rank,
            size,
            host: node_name(api.host()),
            version,
            abi: loaded.abi,
            library,
            largest_tag: api.largest_tag(),
            progress: Progress::new(api),
        })
    }

    /// The MPI library that this machine has: its version, ABI and name. Does not start MPI.
    pub fn find() -> Result<(String, Abi, String), LoadError> {
        let loaded = library::load(launched().and_then(|launched| launched.abi))?;
        Ok((loaded.api.version(), loaded.abi, loaded.name))
    }

    /// Ends MPI at the end of the process, if it was started. With `end_others`, ends all other processes, too: they wait for
    /// this one, which has failed.
    pub fn finish(code: i32, end_others: bool) {
        if let Some(Ok(mpi)) = MPI.get() {
            let state = mpi.progress.lock();
            if end_others || mpi.has_failed() {
                // The launcher drops output that it has not read when the job ends.
                thread::sleep(Duration::from_millis(50));
                state.api.abort(code.max(1));
            } else if mpi.rendezvous.get().is_some() {
                mpi.block(Activity::End, || state.api.finalize());
            } else {
                state.api.finalize();
            }
            // No thread may call MPI from now on.
            std::mem::forget(state);
        }
    }

    /// Sends bytes to another process and waits until they are on their way.
    fn send_bytes(&self, to: usize, bytes: &[u8], timeout: Duration) -> Result<(), RankFailure> {
        let info = TransferInfo { activity: Activity::Exchange { from: self.rank, to }, peer: to };
        for part in [(bytes.len() as u64).to_le_bytes().to_vec(), bytes.to_vec()] {
            let view = Bytes { address: part.as_ptr() as usize, len: part.len() };
            let number = self.progress.start(info, |api| {
                let channel = Channel { communicator: api.world(), tag: 0 };
                Message::send(api, view, to, channel, None).map(Transfer::Message)
            });
            keep_on_failure(self.wait(number, timeout, NOTICE), part)?;
        }
        Ok(())
    }

    /// Waits for bytes from another process.
    fn receive_bytes(&self, from: usize, timeout: Duration) -> Result<Vec<u8>, RankFailure> {
        let info = TransferInfo { activity: Activity::Exchange { from, to: self.rank }, peer: from };
        let receive = |mut part: Vec<u8>| {
            let view = Bytes { address: part.as_mut_ptr() as usize, len: part.len() };
            let number = self.progress.start(info, |api| {
                let channel = Channel { communicator: api.world(), tag: 0 };
                Message::receive(api, view, from, channel).map(Transfer::Message)
            });
            keep_on_failure(self.wait(number, timeout, NOTICE), part)
        };
        let len = receive(vec![0; 8])?;
        let len = u64::from_le_bytes(len.try_into().expect("eight bytes"));
        receive(vec![0; len as usize])
    }

    /// Waits for a transfer. A failure is kept: every later transfer fails at once.
    fn wait(&self, number: u64, timeout: Duration, notice: Duration) -> Result<(), RankFailure> {
        let rendezvous = self.rendezvous.get();
        let observer = WaitObserver {
            cancelled: &|| self.has_failed(),
            pieces: &|| rendezvous.map_or(0, |rendezvous| rendezvous.pieces()),
            limit: &|| rendezvous.map_or(timeout, |rendezvous| rendezvous.limit().min(timeout)),
            begins: &|info| {
                rendezvous.map(|rendezvous| WaitGuard::new(rendezvous, Some(info.peer), info.activity, false))
            },
            notify: &|info, waited| match rendezvous {
                Some(rendezvous) => rendezvous.notify(Some(info.peer), info.activity, waited),
                None => print_notice(&format!("rank {} waits for rank {} to start", self.rank, info.peer)),
            },
        };
        let failure = match self.progress.wait(number, Patience::new(timeout, notice), &observer) {
            WaitOutcome::Done => return Ok(()),
            WaitOutcome::Failed(info, error) => self.in_transfer(info, error.to_string()),
            WaitOutcome::TimedOut(TransferInfo { activity, peer }) => RankFailure {
                host: Some(self.host.clone()),
                reason: format!("after {timeout:?} it still waits for rank {peer}"),
                ..RankFailure::stalled(self.rank, activity.to_string(), Some(peer))
            },
            WaitOutcome::Cancelled => self.rendezvous().failure().expect("that is why"),
        };
        Err(self.stop(failure))
    }

    /// Ends all transfers of this process because of a failure. Returns the first failure, which is the cause of later ones.
    fn stop(&self, failure: RankFailure) -> RankFailure {
        self.progress.stop();
        match self.rendezvous.get() {
            Some(rendezvous) => rendezvous.abort(failure),
            None => failure,
        }
    }

    /// Keeps a failure of a transfer.
    fn fail(&self, info: TransferInfo, reason: String) {
        self.stop(self.in_transfer(info, reason));
    }

    fn in_transfer(&self, TransferInfo { activity, peer }: TransferInfo, reason: String) -> RankFailure {
        let failure = RankFailure::in_transfer(self.rank, activity.to_string(), peer, reason);
        RankFailure { host: Some(self.host.clone()), ..failure }
    }
}

/// The bytes of a transfer that is done. After a failure MPI may still use them, so they are never freed.
fn keep_on_failure(done: Result<(), RankFailure>, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
    match done {
        Ok(()) => Ok(bytes),
        Err(failure) => {
            std::mem::forget(bytes);
            Err(failure)
        }
    }
}

/// The host in the name of a node.
fn host_of(node: &str) -> &str {
    node.split_once('/').map_or(node, |(host, _)| host)
}

/// The name of this node. Several of Slurm's nodes may share a host, and a launcher may give all processes the variable of
/// one node, so the two names together tell nodes apart.
fn node_name(host: String) -> String {
    match std::env::var("SLURMD_NODENAME") {
        Ok(node) if !node.is_empty() && node != host => format!("{host}/{node}"),
        _ => host,
    }
}

//! How the ranks of a job are connected: as threads, or as processes by MPI or NCCL.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kintsugi_gpu::Platform;
use kintsugi_spec::{EmulatedLinks, Places, Topology};

use crate::mpi::{Mpi, MpiWorld};
use crate::nccl::{self, NcclSettings, NcclWorld, SHARED_GPU_VERSION};
use crate::rendezvous::{Rendezvous, RendezvousError};
use crate::threads::ThreadsWorld;
use crate::{RankFailure, World};

/// How the ranks of a job are connected.
#[derive(Clone, Copy, Default)]
pub enum Connection {
    /// All ranks are threads of this process.
    #[default]
    Threads,
    /// Every rank is a process.
    Mpi(MpiProcess),
    /// Every rank is a process with a GPU.
    Nccl(NcclProcess),
}

/// This process among the others, which communicate by MPI.
#[derive(Clone, Copy)]
pub struct MpiProcess {
    /// MPI in this process.
    pub mpi: &'static Mpi,
    /// Its index among the processes of its node.
    pub local_rank: usize,
    /// Number of processes of its node.
    pub local_size: usize,
    /// CPU threads for every rank: the same for all, so that all ranks plan the same memory.
    pub threads: usize,
}

/// This process and its GPU among the others, which communicate by NCCL.
#[derive(Clone, Copy)]
pub struct NcclProcess {
    /// How the processes exchange settings and results.
    pub rendezvous: &'static Rendezvous,
    /// Whose GPUs they are.
    pub platform: &'static Platform,
    /// Its index among the processes of its node.
    pub local_rank: usize,
    /// Number of processes of its node.
    pub local_size: usize,
    /// CPU threads for every rank.
    pub threads: usize,
    /// The number of its GPU among those that it sees.
    pub gpu: usize,
    /// The lowest rank that has the same GPU, and how many ranks have it.
    pub(crate) sharing: (usize, usize),
    /// Whether any ranks share a GPU.
    pub shares_gpus: bool,
}

impl NcclProcess {
    /// How many of the first `ranks` ranks have this process's GPU.
    pub(crate) fn gpu_ranks(self, ranks: usize) -> usize {
        let (first, count) = self.sharing;
        count.min(ranks.saturating_sub(first)).max(1)
    }
}

/// Why the processes cannot communicate by NCCL.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NcclConnectError {
    /// An exchange failed.
    #[error(transparent)]
    Exchange(#[from] RankFailure),
    /// The processes do not meet.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// There is no NCCL.
    #[error(transparent)]
    Nccl(#[from] nccl::LoadError),
    /// There is no GPU.
    #[error("{0}")]
    Gpu(String),
    /// Ranks share a GPU, and NCCL does not allow it.
    #[error(
        "{ranks} ranks share a GPU, which needs NCCL {SHARED_GPU_VERSION} or newer, and this is {version}; start one process for \
         every GPU, or name a newer NCCL with {}=/path/to/libnccl.so.2",
        nccl::VARIABLE
    )]
    Shared {
        /// Ranks on one GPU.
        ranks: usize,
        /// The version that was found.
        version: nccl::Version,
    },
}

/// What a world needs to know of a job.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// The link level between each pair of ranks.
    pub places: Places,
    /// Number of ranks.
    pub ranks: usize,
    /// How long a rank waits for another.
    pub timeout: Duration,
    /// Whether sums may be a library's own, in an order of its own.
    pub library_sums: bool,
    /// Links whose speed transfers are slowed down to.
    pub links: EmulatedLinks,
    /// The settings of NCCL.
    pub nccl: NcclSettings,
    /// Whether messages also go between the first and the last stage of a pipeline.
    pub wraps: bool,
}

impl WorldOptions {
    /// All processes, to exchange settings. No groups are made, so nobody waits in one.
    pub fn for_exchange(ranks: usize) -> Self {
        WorldOptions {
            places: Topology::ONE_NODE.into(),
            ranks,
            timeout: Duration::MAX,
            library_sums: false,
            links: EmulatedLinks::default(),
            nccl: NcclSettings::default(),
            wraps: false,
        }
    }
}

impl Connection {
    /// Finds this process among the processes of its node, which the launcher started.
    pub fn mpi(mpi: &'static Mpi) -> Result<Self, RankFailure> {
        let [threads, local_rank, local_size] = position_on_node(mpi.rendezvous())?;
        Ok(Connection::Mpi(MpiProcess { mpi, local_rank, local_size, threads }))
    }

    /// Finds this process and its GPU among the processes of its node, and connects all by NCCL.
    ///
    /// Every process calls it. If one of them cannot take part, all learn of it.
    pub fn nccl(
        rendezvous: &'static Rendezvous,
        platform: &'static Platform,
    ) -> Result<Self, NcclConnectError> {
        let [threads, local_rank, local_size] = position_on_node(rendezvous)?;
        let mine = nccl::find().map_err(NcclConnectError::from).and_then(|(version, _)| {
            let number = platform.devices().map_err(|error| NcclConnectError::Gpu(error.to_string()))?;
            let gpu = local_rank % number.max(1);
            let found = platform.gpu(gpu).and_then(|gpu| gpu.uuid());
            let uuid = found.map_err(|error| NcclConnectError::Gpu(error.to_string()))?;
            Ok((version, gpu, uuid))
        });
        // What all processes need to know: who has which GPU.
        let word = mine.as_ref().map_or_else(|_| "none".to_owned(), |(_, _, uuid)| uuid.clone());
        let all = rendezvous.gather(rendezvous.size, word.into_bytes())?.map(|all| all.join(&b' '));
        let all = rendezvous.broadcast(rendezvous.size, all.unwrap_or_default())?;
        let all = String::from_utf8_lossy(&all).into_owned();
        let all: Vec<&str> = all.split(' ').collect();
        let (version, gpu, uuid) = mine?;
        if let Some(rank) = all.iter().position(|&uuid| uuid == "none") {
            return Err(NcclConnectError::Gpu(format!("rank {rank} has no GPU or no NCCL")));
        }
        let sharing = sharing(&all, &uuid);
        let most = all.iter().map(|uuid| self::sharing(&all, uuid).1).max().unwrap_or(1);
        if most > 1 && version < SHARED_GPU_VERSION {
            return Err(NcclConnectError::Shared { ranks: most, version });
        }
        let shares_gpus = most > 1;
        Ok(Connection::Nccl(NcclProcess {
            rendezvous,
            platform,
            local_rank,
            local_size,
            threads,
            gpu,
            sharing,
            shares_gpus,
        }))
    }

    /// The ranks of a job.
    pub fn world(self, options: WorldOptions) -> Arc<dyn World> {
        let WorldOptions { places, ranks, timeout, library_sums, links, nccl, wraps } = options;
        match self {
            Connection::Threads => Arc::new(ThreadsWorld::with_links(places, ranks, timeout, links)),
            Connection::Mpi(process) => {
                let world = MpiWorld::new(process.mpi, places, ranks, timeout, library_sums);
                Arc::new(world.with_links(links))
            }
            Connection::Nccl(process) => {
                Arc::new(NcclWorld::new(process, places, ranks, timeout, (nccl, wraps)))
            }
        }
    }

    /// CPU threads for each of `ranks` ranks, if the cores of a node are shared by its ranks.
    pub fn threads_per_rank(self, ranks: usize) -> usize {
        match self {
            Connection::Threads => (cores() / ranks).max(1),
            Connection::Mpi(process) => process.threads,
            Connection::Nccl(process) => process.threads,
        }
    }

    /// The number of this process's GPU among those that it sees. Threads share the first one.
    pub fn gpu(self) -> usize {
        match self {
            Connection::Threads => 0,
            Connection::Mpi(process) => process.local_rank,
            Connection::Nccl(process) => process.gpu,
        }
    }

    /// How many of `ranks` ranks are on this node.
    pub fn ranks_here(self, ranks: usize) -> usize {
        match self {
            Connection::Threads => ranks,
            Connection::Mpi(process) => process.local_size.min(ranks),
            Connection::Nccl(process) => process.local_size.min(ranks),
        }
    }

    /// Whether this process has rank 0, which writes the files and the output of the job.
    pub fn is_first(self) -> bool {
        self.rank().is_none_or(|rank| rank == 0)
    }

    /// The rank of this process, if every rank is one.
    pub fn rank(self) -> Option<usize> {
        match self {
            Connection::Threads => None,
            Connection::Mpi(process) => Some(process.mpi.rank),
            Connection::Nccl(process) => Some(process.rendezvous.rank),
        }
    }

    /// Number of processes, if every rank is one.
    pub fn processes(self) -> Option<usize> {
        match self {
            Connection::Threads => None,
            Connection::Mpi(process) => Some(process.mpi.size),
            Connection::Nccl(process) => Some(process.rendezvous.size),
        }
    }
}

/// CPU threads for every rank, the index of this process on its node, and the number of processes there.
fn position_on_node(rendezvous: &Rendezvous) -> Result<[usize; 3], RankFailure> {
    let (rank, size) = (rendezvous.rank, rendezvous.size);
    let mine = format!("{} {} {}", cores(), allowed_cores(), rendezvous.host);
    let positions = rendezvous.gather(size, mine.into_bytes())?.map(|all| positions(&all));
    let positions = rendezvous.broadcast(size, positions.unwrap_or_default().into_bytes())?;
    let positions = String::from_utf8_lossy(&positions);
    let numbers: Vec<usize> = positions.split(' ').filter_map(|number| number.parse().ok()).collect();
    Ok([0, 1 + 2 * rank, 2 + 2 * rank].map(|i| numbers[i]))
}

/// The lowest rank that has a GPU, and how many ranks have it.
fn sharing(all: &[&str], uuid: &str) -> (usize, usize) {
    let first = all.iter().position(|&other| other == uuid).unwrap_or(0);
    (first, all.iter().filter(|&&other| other == uuid).count())
}

/// A process as it describes itself: how many cores it may keep busy, which ones it may use, and its node.
struct Process {
    cores: usize,
    allowed: HashSet<usize>,
    host: String,
}

impl Process {
    fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut words = text.splitn(3, ' ');
        let mut word = || words.next().unwrap_or_default();
        let (cores, allowed) =
            (word().parse().unwrap_or(1), word().split(',').filter_map(range).flatten().collect());
        Process { cores, allowed, host: word().to_owned() }
    }
}

/// `"3-5"` or `"3"`.
fn range(text: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// The threads of every rank, and then for each process its index on its node and the number of processes there.
///
/// A launcher may give every process cores of its own, or let all processes of a node use the same cores. In the second case
/// the processes divide the cores.
fn positions(all: &[Vec<u8>]) -> String {
    let all: Vec<Process> = all.iter().map(|bytes| Process::parse(bytes)).collect();
    let on = |host: &str| all.iter().filter(|other| other.host == host).count();
    let has_own_cores = |rank: usize| {
        let others = all
            .iter()
            .enumerate()
            .filter(|(other, process)| *other != rank && process.host == all[rank].host);
        !all[rank].allowed.is_empty()
            && others.into_iter().all(|(_, other)| other.allowed.is_disjoint(&all[rank].allowed))
    };
    let share = |rank: usize| {
        let Process { cores, host, .. } = &all[rank];
        if has_own_cores(rank) { *cores } else { (cores / on(host)).max(1) }
    };
    let threads = (0..all.len()).map(share).min().unwrap_or(1);
    let local = |rank: usize| {
        let host = &all[rank].host;
        format!("{} {}", all[..rank].iter().filter(|other| other.host == *host).count(), on(host))
    };
    [threads.to_string()].into_iter().chain((0..all.len()).map(local)).collect::<Vec<_>>().join(" ")
}

/// The cores that this process may keep busy.
fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The numbers of the cores that this process may use, as in `0-3,8`; empty if they are not known.
fn allowed_cores() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn positions_of(processes: &[(&str, &str)]) -> String {
        let bytes = |(cores, host): &(&str, &str)| format!("{cores} {host}").into_bytes();
        positions(&processes.iter().map(bytes).collect::<Vec<_>>())
    }

    #[test]
    fn processes_of_a_node_share_its_cores_and_are_numbered() {
        let all = "8 0-7";
        assert_eq!(positions_of(&[(all, "a"), (all, "a"), (all, "b"), (all, "b")]), "4 0 2 1 2 0 2 1 2");
        assert_eq!(positions_of(&[(all, "a"), (all, "b"), (all, "a"), (all, "a")]), "2 0 3 0 1 1 3 2 3");
        assert_eq!(positions_of(&[("2 0-1", "a"), ("2 2,5", "a")]), "2 0 2 1 2", "each has its own");
        assert_eq!(
            positions_of(&[("4 0-63", "a"), ("4 0-63", "a")]),
            "2 0 2 1 2",
            "a quota of four on 64 cores"
        );
        assert_eq!(positions_of(&[("4 ", "a"), ("4 ", "a")]), "2 0 2 1 2", "nothing is known");
    }
}

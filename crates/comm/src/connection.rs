//! How the ranks of a job are connected: as threads, or as processes by MPI.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kintsugi_spec::Topology;

use crate::mpi::{Mpi, MpiWorld};
use crate::threads::ThreadsWorld;
use crate::{RankFailure, World};

/// How the ranks of a job are connected.
#[derive(Clone, Copy, Default)]
pub enum Connection {
    /// All ranks are threads of this process.
    #[default]
    Threads,
    /// Every rank is a process.
    Mpi(ProcessPlace),
}

/// This process among the others.
#[derive(Clone, Copy)]
pub struct ProcessPlace {
    /// MPI in this process.
    pub mpi: &'static Mpi,
    /// Its index among the processes of its node.
    pub local_rank: usize,
    /// Number of processes of its node.
    pub local_size: usize,
    /// CPU threads for every rank: the same for all, so that all ranks plan the same memory.
    pub threads: usize,
}

/// What a world needs to know of a job.
#[derive(Clone, Copy, Debug)]
pub struct WorldOptions {
    /// The link level between each pair of ranks.
    pub topology: Topology,
    /// Number of ranks.
    pub ranks: usize,
    /// How long a rank waits for another.
    pub timeout: Duration,
    /// Whether sums may be a library's own, in an order of its own.
    pub library_sums: bool,
}

impl Connection {
    /// Finds this process's place among those that the launcher started.
    pub fn mpi(mpi: &'static Mpi) -> Result<Self, RankFailure> {
        // No groups are made, so nobody waits in one.
        let world = MpiWorld::new(mpi, Topology::ONE_NODE, mpi.size, Duration::MAX, false);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let places = world.gather(format!("{cores} {}", mpi.host).into_bytes())?.map(|all| places(&all));
        let places = world.broadcast(places.unwrap_or_default().into_bytes())?;
        let places = String::from_utf8_lossy(&places);
        let numbers: Vec<usize> = places.split(' ').filter_map(|number| number.parse().ok()).collect();
        let [threads, local_rank, local_size] = [0, 1 + 2 * mpi.rank, 2 + 2 * mpi.rank].map(|i| numbers[i]);
        Ok(Connection::Mpi(ProcessPlace { mpi, local_rank, local_size, threads }))
    }

    /// The ranks of a job.
    pub fn world(self, options: WorldOptions) -> Arc<dyn World> {
        let WorldOptions { topology, ranks, timeout, library_sums } = options;
        match self {
            Connection::Threads => Arc::new(ThreadsWorld::new(topology, ranks, timeout)),
            Connection::Mpi(place) => {
                Arc::new(MpiWorld::new(place.mpi, topology, ranks, timeout, library_sums))
            }
        }
    }

    /// CPU threads for each of `ranks` ranks, if the cores of a node are shared by its ranks.
    pub fn threads_per_rank(self, ranks: usize) -> usize {
        match self {
            Connection::Threads => {
                let cores = thread::available_parallelism().map_or(1, usize::from);
                (cores / ranks).max(1)
            }
            Connection::Mpi(place) => place.threads,
        }
    }

    /// The number of this process's GPU among those that it sees. Threads share the first one.
    pub fn gpu(self) -> usize {
        match self {
            Connection::Threads => 0,
            Connection::Mpi(place) => place.local_rank,
        }
    }

    /// How many of `ranks` ranks are on this node.
    pub fn ranks_here(self, ranks: usize) -> usize {
        match self {
            Connection::Threads => ranks,
            Connection::Mpi(place) => place.local_size.min(ranks),
        }
    }

    /// Whether this process has rank 0, which writes the files and the output of the job.
    pub fn is_first(self) -> bool {
        match self {
            Connection::Threads => true,
            Connection::Mpi(place) => place.mpi.rank == 0,
        }
    }
}

/// The threads of every rank, and then for each process its index on its node and the number of processes there. They follow
/// from each process's cores and host.
///
/// A launcher may give every process cores of its own or let all processes of a node use all its cores. So the cores of a
/// process are divided by the processes of its node, unless they are few enough to be its own.
fn places(all: &[Vec<u8>]) -> String {
    let all: Vec<(usize, String)> = all.iter().map(|bytes| parse(bytes)).collect();
    let on = |host: &str| all.iter().filter(|(_, other)| other == host).count();
    let most = all.iter().map(|(cores, _)| *cores).max().unwrap_or(1).max(machine_cores());
    let share = |(cores, host): &(usize, String)| {
        let processes = on(host);
        if cores * processes <= most { *cores } else { (cores / processes).max(1) }
    };
    let threads = all.iter().map(share).min().unwrap_or(1);
    let local = |rank: usize| {
        let host = &all[rank].1;
        format!("{} {}", all[..rank].iter().filter(|(_, other)| other == host).count(), on(host))
    };
    [threads.to_string()].into_iter().chain((0..all.len()).map(local)).collect::<Vec<_>>().join(" ")
}

fn parse(bytes: &[u8]) -> (usize, String) {
    let text = String::from_utf8_lossy(bytes);
    let (cores, host) = text.split_once(' ').unwrap_or(("1", &text));
    (cores.parse().unwrap_or(1), host.to_owned())
}

/// The cores of this machine, also those that this process may not use.
fn machine_cores() -> usize {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()? + 1 - first.parse::<usize>().ok()?)
    };
    online.trim().split(',').filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(processes: &[(usize, &str)]) -> String {
        let bytes = |(cores, host): &(usize, &str)| format!("{cores} {host}").into_bytes();
        places(&processes.iter().map(bytes).collect::<Vec<_>>())
    }

    #[test]
    fn processes_of_a_node_share_its_cores_and_are_numbered() {
        let many = 1 << 20;
        assert_eq!(
            placed(&[(many, "a"), (many, "a"), (many, "b"), (many, "b")]),
            format!("{} 0 2 1 2 0 2 1 2", many / 2)
        );
        assert_eq!(
            placed(&[(many, "a"), (many, "b"), (many, "a"), (many, "a")]),
            format!("{} 0 3 0 1 1 3 2 3", many / 3)
        );
        assert_eq!(placed(&[(1, "a"), (1, "a"), (1, "a"), (1, "a")]), "1 0 4 1 4 2 4 3 4");
    }
}

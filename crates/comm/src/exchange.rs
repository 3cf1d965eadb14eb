//! Small exchanges between the processes of a job whose tensors go another way.

use std::time::Duration;

use kintsugi_spec::Topology;

use crate::mpi::{Mpi, MpiWorld};
use crate::rendezvous::Rendezvous;
use crate::{RankFailure, World};

/// How processes exchange settings and results, and learn that one of them has failed.
#[derive(Clone, Copy)]
pub enum Exchange {
    /// By MPI.
    Mpi(&'static Mpi),
    /// Without MPI, by a rendezvous with rank 0.
    Rendezvous(&'static Rendezvous),
}

impl Exchange {
    /// The rank of this process.
    pub fn rank(self) -> usize {
        match self {
            Exchange::Mpi(mpi) => mpi.rank,
            Exchange::Rendezvous(rendezvous) => rendezvous.rank,
        }
    }

    /// Number of processes.
    pub fn size(self) -> usize {
        match self {
            Exchange::Mpi(mpi) => mpi.size,
            Exchange::Rendezvous(rendezvous) => rendezvous.size,
        }
    }

    /// The name of this host.
    pub fn host(self) -> String {
        match self {
            Exchange::Mpi(mpi) => mpi.host.clone(),
            Exchange::Rendezvous(rendezvous) => rendezvous.host.clone(),
        }
    }

    /// Brings the bytes of the first `ranks` processes to rank 0, in order of rank. Other processes get `None`.
    pub fn gather(self, ranks: usize, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure> {
        match self {
            Exchange::Mpi(mpi) => world(mpi, ranks).gather(bytes),
            Exchange::Rendezvous(rendezvous) => rendezvous.gather(ranks, bytes),
        }
    }

    /// Gives the first `ranks` processes the bytes of rank 0.
    pub fn broadcast(self, ranks: usize, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
        match self {
            Exchange::Mpi(mpi) => world(mpi, ranks).broadcast(bytes),
            Exchange::Rendezvous(rendezvous) => rendezvous.broadcast(ranks, bytes),
        }
    }

    /// Ends every exchange because of a failure.
    pub fn abort(self, failure: RankFailure) {
        match self {
            Exchange::Mpi(mpi) => world(mpi, mpi.size).abort(failure),
            Exchange::Rendezvous(rendezvous) => rendezvous.abort(&failure),
        }
    }

    /// Why a process of the job has failed, if one has.
    pub fn failure(self) -> Option<RankFailure> {
        match self {
            Exchange::Mpi(mpi) => world(mpi, mpi.size).failure(),
            Exchange::Rendezvous(rendezvous) => rendezvous.failure(),
        }
    }
}

/// A world of MPI without groups, so nobody waits in one.
fn world(mpi: &'static Mpi, ranks: usize) -> MpiWorld {
    MpiWorld::new(mpi, Topology::ONE_NODE, ranks, Duration::MAX, false)
}

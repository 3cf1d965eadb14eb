//! The ranks of a job that runs as processes.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kintsugi_spec::{EmulatedLinks, Group, Places};
use kintsugi_tensor::Backend;

use super::Mpi;
use super::group::{GroupOptions, MpiGroup};
use crate::emulated::LinkClocks;
use crate::traffic::TrafficCounter;
use crate::{Communicator, RankFailure, Solo, Traffic, World};

/// The first processes of MPI as the ranks of a job.
#[derive(Clone)]
pub struct MpiWorld {
    mpi: &'static Mpi,
    ranks: usize,
    options: GroupOptions,
}

impl MpiWorld {
    /// A world of the first `ranks` processes. `places` determine the link level between each pair of them. A rank that
    /// waits longer than `timeout` for another in a group fails. With `library_sums`, sums of f32 and f64 are the library's own.
    pub fn new(
        mpi: &'static Mpi,
        places: impl Into<Places>,
        ranks: usize,
        timeout: Duration,
        library_sums: bool,
    ) -> Self {
        assert!(ranks <= mpi.size, "{ranks} ranks of {} processes", mpi.size);
        let counter = Arc::new(TrafficCounter::default());
        let clocks = Arc::new(LinkClocks::new(EmulatedLinks::default()));
        let places = places.into();
        MpiWorld { mpi, ranks, options: GroupOptions { places, counter, clocks, timeout, library_sums } }
    }

    /// The same with transfers that take as long as over other links. The library's own sums cannot be slowed down, so there
    /// are none if any link is emulated.
    #[must_use]
    pub fn with_links(mut self, links: EmulatedLinks) -> Self {
        self.options.clocks = Arc::new(LinkClocks::new(links));
        let emulated = links.iter().any(Option::is_some);
        self.options.library_sums &= !emulated;
        self.mpi.progress.set_emulated(emulated);
        self
    }
}

impl World for MpiWorld {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn local_ranks(&self) -> Range<usize> {
        let rank = self.mpi.rank.min(self.ranks);
        rank..(rank + 1).min(self.ranks)
    }

    fn group(
        &self,
        group: Group,
        members: &[usize],
        me: usize,
        backend: &Rc<dyn Backend>,
    ) -> Box<dyn Communicator> {
        assert_eq!(me, self.mpi.rank, "a process makes groups of its own rank");
        match MpiGroup::new(self.mpi, group, members, backend, self.options.clone()) {
            Ok(group) => Box::new(group),
            Err(failure) => {
                self.abort(failure);
                Box::new(Solo)
            }
        }
    }

    fn traffic(&self, rank: usize) -> Traffic {
        assert_eq!(rank, self.mpi.rank, "a process counts the bytes of its own rank");
        self.options.counter.read()
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure> {
        assert!(self.mpi.rank < self.ranks, "this process has no rank of the job");
        self.mpi.rendezvous().gather(self.ranks, bytes)
    }

    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
        assert!(self.mpi.rank < self.ranks, "this process has no rank of the job");
        self.mpi.rendezvous().broadcast(self.ranks, bytes)
    }

    fn post(&self, bytes: &[u8]) {
        self.mpi.rendezvous().post(bytes);
    }

    fn take_post(&self, from: usize) -> Option<Vec<u8>> {
        self.mpi.rendezvous().take_post(from)
    }

    fn set_step_limit(&self, limit: Option<Duration>) {
        self.mpi.rendezvous().set_step_limit(limit);
    }

    fn finished_pieces(&self) -> u64 {
        self.mpi.rendezvous().pieces()
    }

    fn abort(&self, reason: RankFailure) {
        let host = Some(self.mpi.host.clone());
        self.mpi.stop(RankFailure { host, ..reason });
    }

    fn failure(&self) -> Option<RankFailure> {
        self.mpi.rendezvous().failure()
    }

    fn set_compute_time(&self, time: Duration) {
        self.mpi.rendezvous().set_compute_time(time);
    }

    fn compute_times(&self) -> Vec<Duration> {
        self.mpi.rendezvous().compute_times()
    }

    fn host_of(&self, rank: usize) -> Option<String> {
        Some(self.mpi.rendezvous().host_of(rank).to_owned())
    }

    fn host(&self) -> Option<String> {
        Some(self.mpi.host.clone())
    }
}

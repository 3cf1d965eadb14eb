//! The ranks of a job that communicate by NCCL.

use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kintsugi_spec::{Group, Places};
use kintsugi_tensor::{AddressSpace, Backend, Category, DType};

use super::NcclSettings;
use super::communicator::Communicator as NcclCommunicator;
use super::group::{NcclGroup, StreamCommunicator};
use super::job_state::JobState;
use super::library::{self, Api, Handle, UniqueId};
use super::links::{self, MessageLink};
use crate::connection::NcclProcess;
use crate::{Collective, Communicator, RankFailure, Solo, Traffic, World};

/// The first processes of a rendezvous as the ranks of a job, with a GPU each.
pub struct NcclWorld {
    state: Arc<JobState>,
    process: NcclProcess,
    places: Places,
    ranks: usize,
    settings: NcclSettings,
    /// Whether messages also go between the first and the last stage of a pipeline.
    wraps: bool,
    setup: Mutex<Setup>,
}

/// What is made when the first group is.
#[derive(Default)]
struct Setup {
    /// The communicator of all ranks, which is split.
    all: Option<(&'static Api, Arc<NcclCommunicator>)>,
    /// Free bytes of the GPU before that.
    free: Option<u64>,
}

impl NcclWorld {
    /// A world of the first `ranks` processes. `places` determine the link level between each pair of them. A rank that
    /// waits longer than `timeout` for its GPU fails.
    pub(crate) fn new(
        process: NcclProcess,
        places: impl Into<Places>,
        ranks: usize,
        timeout: Duration,
        (settings, wraps): (NcclSettings, bool),
    ) -> Self {
        let processes = process.rendezvous.size;
        assert!(ranks <= processes, "{ranks} ranks of {processes} processes");
        let state = JobState::new(process.rendezvous, timeout);
        let places = places.into();
        NcclWorld { state, process, places, ranks, settings, wraps, setup: Mutex::default() }
    }

    fn me(&self) -> usize {
        self.process.rendezvous.rank
    }

    /// The communicator of all ranks. All come here together, at their first group.
    fn all(&self, setup: &mut Setup) -> Result<(&'static Api, Arc<NcclCommunicator>), RankFailure> {
        if let Some((api, all)) = &setup.all {
            return Ok((*api, Arc::clone(all)));
        }
        let failed = |error: String| self.failed("joining the ranks", error);
        let api = library::api().map_err(|error| failed(error.to_string()))?;
        setup.free = self.free_bytes()?;
        let id = if self.me() == 0 {
            api.unique_id().map_err(|error| failed(error.to_string()))?.0.to_vec()
        } else {
            Vec::new()
        };
        let id: [u8; UniqueId::BYTES] =
            self.broadcast(id)?.try_into().map_err(|_| failed("rank 0 has sent no id".to_owned()))?;
        let handle = api
            .init(UniqueId(id), self.ranks, self.me(), self.settings.channels)
            .map_err(|error| failed(error.to_string()))?;
        let all = self.state.add(NcclCommunicator::new(api, handle, Group::DATA, None));
        setup.all = Some((api, Arc::clone(&all)));
        Ok((api, all))
    }

    fn failed(&self, during: &str, reason: String) -> RankFailure {
        let host = Some(self.process.rendezvous.host.clone());
        RankFailure { host, ..RankFailure::new(self.me(), during, reason) }
    }

    /// A communicator and its stream.
    fn stream_communicator(
        &self,
        api: &'static Api,
        handle: Handle,
        group: Group,
        name: &str,
        backend: &dyn Backend,
    ) -> StreamCommunicator {
        let stream = backend.side_stream(name).expect("a GPU has side streams");
        let communicator = self.state.add(NcclCommunicator::new(api, handle, group, Some(stream.watch())));
        StreamCommunicator { communicator, stream }
    }

    /// Takes part in the splits of a group of `size` members, with or without being one of them.
    fn join(
        &self,
        group: Group,
        members: Option<&[usize]>,
        size: usize,
        backend: Option<&Rc<dyn Backend>>,
    ) -> Result<Option<NcclGroup>, RankFailure> {
        let failed =
            |error: library::NcclError| self.failed(&format!("making group {group}"), error.to_string());
        let (api, all) = self.all(&mut self.lock())?;
        let me = members.and_then(|members| members.iter().position(|&member| member == self.me()));
        let split = |of: Option<(usize, usize)>| {
            let (color, key) = of.unzip();
            all.split(color, key.unwrap_or(0), self.settings.channels).map_err(failed)
        };
        // Groups of one kind have no rank in common, so their first ranks tell them apart.
        let first = members.and_then(|members| members.iter().min().copied());
        let whole = split(first.zip(me))?;
        let mut links = Vec::new();
        // The last rank of cp sends keys to the first, and the last node its states.
        let wraps = self.wraps || [Group::CONTEXT, Group::Nodes].contains(&group);
        if [Group::PIPELINE, Group::CONTEXT, Group::Nodes].contains(&group) {
            // Messages of cp and of nodes go one way.
            let used = |round: &Vec<MessageLink>| {
                group == Group::PIPELINE
                    || round.iter().all(|link| link.direction == links::Direction::Forward)
            };
            for round in links::rounds(size, wraps).into_iter().filter(used) {
                let mine = me.and_then(|me| {
                    let link = round.iter().find(|link| link.from == me || link.to == me)?;
                    Some((*link, usize::from(link.to == me)))
                });
                let color =
                    |link: MessageLink| members.map(|members| members[link.from].min(members[link.to]));
                let made = split(mine.and_then(|(link, key)| Some((color(link)?, key))))?;
                links.extend(made.zip(mine).map(|(handle, (link, _))| (link, handle)));
            }
        }
        let (Some(whole), Some(members), Some(me), Some(backend)) = (whole, members, me, backend) else {
            return Ok(None);
        };
        let make = |handle, name: &str| self.stream_communicator(api, handle, group, name, &**backend);
        let named = |(link, handle): (MessageLink, Handle)| {
            let name = format!("{group}, {} to {}", members[link.from], members[link.to]);
            (link, make(handle, &name))
        };
        let (collectives, links) = (make(whole, &group.to_string()), links.into_iter().map(named).collect());
        let parts = (group, members, me);
        Ok(Some(NcclGroup::new(Arc::clone(&self.state), parts, self.places.clone(), collectives, links)))
    }

    /// Free bytes of this process's GPU, at a moment when no rank allocates.
    fn free_bytes(&self) -> Result<Option<u64>, RankFailure> {
        self.barrier()?;
        let free = self
            .process
            .platform
            .gpu(self.process.gpu)
            .and_then(|gpu| gpu.memory())
            .ok()
            .map(|(free, _)| free);
        self.barrier()?;
        Ok(free)
    }

    fn lock(&self) -> MutexGuard<'_, Setup> {
        self.setup.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl World for NcclWorld {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn local_ranks(&self) -> Range<usize> {
        let rank = self.me().min(self.ranks);
        rank..(rank + 1).min(self.ranks)
    }

    fn group(
        &self,
        group: Group,
        members: &[usize],
        me: usize,
        backend: &Rc<dyn Backend>,
    ) -> Box<dyn Communicator> {
        assert_eq!(me, self.me(), "a process makes groups of its own rank");
        assert_eq!(
            backend.memory().address_space(),
            AddressSpace::Device,
            "NCCL transfers the memory of GPUs"
        );
        match self.join(group, Some(members), members.len(), Some(backend)) {
            Ok(Some(made)) => {
                warm_up(&made, &**backend);
                Box::new(made)
            }
            // A failure of the job has aborted the communicators.
            Ok(None) => Box::new(Solo),
            Err(failure) => {
                self.abort(failure);
                Box::new(Solo)
            }
        }
    }

    fn skip_group(&self, group: Group, size: usize) {
        if let Err(failure) = self.join(group, None, size, None) {
            self.abort(failure);
        }
    }

    fn is_on_device(&self) -> bool {
        true
    }

    fn transport_bytes(&self) -> Result<u64, RankFailure> {
        let Some(before) = self.lock().free else { return Ok(0) };
        let Some(after) = self.free_bytes()? else { return Ok(0) };
        Ok(before.saturating_sub(after) / self.process.gpu_ranks(self.ranks) as u64)
    }

    fn traffic(&self, rank: usize) -> Traffic {
        assert_eq!(rank, self.me(), "a process counts the bytes of its own rank");
        self.state.traffic()
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure> {
        self.process.rendezvous.gather(self.ranks, bytes)
    }

    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
        self.process.rendezvous.broadcast(self.ranks, bytes)
    }

    fn post(&self, bytes: &[u8]) {
        self.process.rendezvous.post(bytes);
    }

    fn take_post(&self, from: usize) -> Option<Vec<u8>> {
        self.process.rendezvous.take_post(from)
    }

    fn set_step_limit(&self, limit: Option<Duration>) {
        self.state.rendezvous.set_step_limit(limit);
    }

    fn finished_pieces(&self) -> u64 {
        self.process.rendezvous.pieces()
    }

    fn abort(&self, reason: RankFailure) {
        self.state.fail(RankFailure { host: Some(self.process.rendezvous.host.clone()), ..reason });
    }

    fn failure(&self) -> Option<RankFailure> {
        self.state.failure()
    }

    fn set_compute_time(&self, time: Duration) {
        self.process.rendezvous.set_compute_time(time);
    }

    fn compute_times(&self) -> Vec<Duration> {
        self.process.rendezvous.compute_times()
    }

    fn host_of(&self, rank: usize) -> Option<String> {
        Some(self.process.rendezvous.host_of(rank).to_owned())
    }

    fn host(&self) -> Option<String> {
        Some(self.process.rendezvous.host.clone())
    }
}

/// Runs every collective of a group once, and a message over every link: the library connects ranks, and allocates its
/// buffers, when it is first used.
///
/// The first message over a link blocks the host until its peer comes to the same link. All ranks take their links in the order of
/// the rounds, in each of which a rank has one link at most, so that none waits for a peer that waits for another.
fn warm_up(group: &NcclGroup, backend: &dyn Backend) {
    let (ranks, me) = (group.size(), group.rank());
    let scratch = || {
        let buffer = backend.allocate(64 * ranks, DType::F32, Category::Communication);
        backend.fill(0.0, buffer.view());
        buffer
    };
    for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
        drop(group.run(collective, scratch()));
    }
    let tag = |link: MessageLink| u64::from(link.direction == links::Direction::Backward);
    let message = |link: MessageLink| {
        if link.from == me {
            group.send(link.to, tag(link), scratch())
        } else {
            group.receive(link.from, tag(link), scratch())
        }
    };
    let messages: Vec<_> = group.links().map(message).collect();
    for message in messages {
        drop(group.wait(message));
    }
    backend.synchronize();
}

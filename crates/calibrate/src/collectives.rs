//! Times collectives and messages between the ranks of a mesh, as training runs them: all groups of an axis at once.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use kintsugi_comm::nccl::NcclSettings;
use kintsugi_comm::{Collective, Communicator, Connection, RankFailure, World, WorldOptions};
use kintsugi_plan::{Axis, Group, Mesh, Span};
use kintsugi_spec::{EmulatedLinks, Topology};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Backend, Buffer, Category, DType};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// A collective of the group.
    Collective(Collective),
    /// The MPI library's own all-reduce.
    LibraryAllReduce,
    /// A message from the first rank of the group to the second, and one back.
    PingPong,
}

/// The time of one kind of transfer, of one size, in one group.
#[derive(Clone, Copy, Debug)]
pub struct TransferTime {
    /// The group.
    pub group: Group,
    /// Ranks of the group.
    pub ranks: usize,
    /// What was timed.
    pub kind: TransferKind,
    /// Bytes of the buffer of one rank.
    pub bytes: usize,
    /// Seconds of one transfer, the median of all rounds.
    pub seconds: f64,
    /// Seconds that the host took to enqueue one transfer, the median of all rounds, if the transfers run on the device alone.
    pub enqueue: Option<f64>,
}

/// How the ranks are arranged and connected.
#[derive(Clone, Copy)]
pub struct Arrangement {
    /// The mesh, each of whose axes is a group.
    pub mesh: Mesh,
    /// Which ranks share a node.
    pub topology: Topology,
    /// Threads or processes.
    pub connection: Connection,
    /// Links whose speed the transfers are slowed down to.
    pub links: EmulatedLinks,
    /// The settings of NCCL, if the ranks communicate by it.
    pub nccl: NcclSettings,
}

/// How long a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Number of rounds. The result is their median. All kinds of transfer alternate in every round.
const ROUNDS: usize = 9;
/// Bytes that a round moves in each kind, at least, unless that takes too many transfers.
const ROUND_BYTES: usize = 8 << 20;
/// Device memory beside the largest buffer: a workspace, and small buffers.
const DEVICE_BYTES: u64 = 64 << 20;
/// Transfers of a round, at most.
const MAX_TRANSFERS: usize = 100;
/// Transfers of a round, at least, if they run on the device: the first call after a wait takes the host longer than others.
const MIN_ON_DEVICE: usize = 32;

/// Times transfers of every size in every group of more than one rank. If the ranks are processes, all of them call it, and
/// `on_time` is called in the process of rank 0.
pub fn time_transfers(
    arrangement: Arrangement,
    sizes: &[usize],
    mut on_time: impl FnMut(TransferTime) + Send,
) -> io::Result<()> {
    let Arrangement { mesh, topology, connection, links, nccl } = arrangement;
    let world = |library_sums| {
        let options = WorldOptions::for_exchange(mesh.ranks());
        connection.world(WorldOptions {
            places: topology.into(),
            timeout: TIMEOUT,
            library_sums,
            links,
            nccl,
            ..options
        })
    };
    let (ours, library) = (world(false), world(true));
    let local: Range<usize> = ours.local_ranks();
    let failures: Vec<RankFailure> = thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut on_time = Some(&mut on_time as &mut (dyn FnMut(TransferTime) + Send));
        for rank in local {
            let (ours, library) = (&ours, &library);
            let report = if rank == 0 { on_time.take() } else { None };
            let largest = sizes.iter().copied().max().unwrap_or(0);
            let run = move || Bench::new(arrangement, (ours, library), rank, largest)?.run(sizes, report);
            match thread::Builder::new().name(format!("rank {rank}")).spawn_scoped(scope, run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    // The ranks that have begun would wait for this one.
                    ours.abort(RankFailure::new(rank, "its start", error.to_string()));
                    return Err(error);
                }
            }
        }
        let joined = threads.into_iter().map(|thread| thread.join().expect("no rank panics"));
        io::Result::Ok(joined.filter_map(Result::err).collect())
    })?;
    failures.into_iter().next().map_or(Ok(()), |failure| Err(io::Error::other(failure)))
}

/// The transfers of one rank.
struct Bench<'a> {
    mesh: Mesh,
    rank: usize,
    connection: Connection,
    backend: Rc<dyn Backend>,
    /// All ranks, to begin every round together.
    all: Box<dyn Communicator>,
    groups: Vec<BenchGroup>,
    world: &'a Arc<dyn World>,
}

/// A group of this rank, with our own sums and with the library's.
struct BenchGroup {
    group: Group,
    ours: Box<dyn Communicator>,
    /// Only if the ranks communicate by MPI.
    library: Option<Box<dyn Communicator>>,
}

impl<'a> Bench<'a> {
    fn new(
        Arrangement { mesh, topology, connection, .. }: Arrangement,
        (world, library): (&'a Arc<dyn World>, &Arc<dyn World>),
        rank: usize,
        largest: usize,
    ) -> Result<Self, RankFailure> {
        let backend: Rc<dyn Backend> = match connection {
            Connection::Nccl(place) => {
                let bytes = largest as u64 + DEVICE_BYTES;
                let made = place.platform.backend(place.gpu, bytes, false);
                Rc::new(made.map_err(|error| RankFailure::new(rank, "its start", error.to_string()))?)
            }
            Connection::Threads | Connection::Mpi(_) => Rc::new(CpuBackend::new(Rc::new(Heap::default()), 1)),
        };
        let at = mesh.coordinate(rank);
        let everybody: Vec<usize> = (0..mesh.ranks()).collect();
        let axes = Axis::ALL.into_iter().rev().filter(|&axis| mesh.size(axis) > 1);
        let groups = axes.map(|axis| {
            let group = Group::Along(axis, Span::All);
            let members = mesh.group(group, at, topology);
            let join = |world: &Arc<dyn World>| world.group(group, &members, rank, &backend);
            let library = matches!(connection, Connection::Mpi(_)).then(|| join(library));
            BenchGroup { group, ours: join(world), library }
        });
        Ok(Bench {
            mesh,
            rank,
            connection,
            groups: groups.collect(),
            all: world.group(Group::Tied, &everybody, rank, &backend),
            backend,
            world,
        })
    }

    fn run(
        &self,
        sizes: &[usize],
        mut report: Option<&mut (dyn FnMut(TransferTime) + Send)>,
    ) -> Result<(), RankFailure> {
        for group in &self.groups {
            for &bytes in sizes {
                let kinds = self.kinds(group.group);
                let mut times = vec![Vec::with_capacity(ROUNDS); kinds.len()];
                for _ in 0..=ROUNDS {
                    for (kind, times) in kinds.iter().zip(&mut times) {
                        times.push(self.round(group, *kind, bytes)?);
                    }
                }
                let Some(report) = &mut report else { continue };
                for (&kind, times) in kinds.iter().zip(times) {
                    // The first round warms up.
                    let [whole, enqueue] = [|time: &RoundTime| time.whole, |time: &RoundTime| time.enqueue]
                        .map(|part| sorted(times[1..].iter().map(part)));
                    report(TransferTime {
                        group: group.group,
                        ranks: group.ours.size(),
                        kind,
                        bytes,
                        seconds: whole[ROUNDS / 2],
                        enqueue: self.world.is_on_device().then(|| enqueue[ROUNDS / 2]),
                    });
                }
            }
        }
        Ok(())
    }

    fn kinds(&self, group: Group) -> Vec<TransferKind> {
        let collectives =
            [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll];
        let mut kinds: Vec<TransferKind> = collectives.map(TransferKind::Collective).to_vec();
        if matches!(self.connection, Connection::Mpi(_)) {
            kinds.insert(1, TransferKind::LibraryAllReduce);
        }
        // By NCCL, only stages send messages.
        if group == Group::PIPELINE || !self.world.is_on_device() {
            kinds.push(TransferKind::PingPong);
        }
        kinds
    }

    /// The time of one transfer, over a round of them.
    fn round(&self, group: &BenchGroup, kind: TransferKind, bytes: usize) -> Result<RoundTime, RankFailure> {
        let fewest = if self.world.is_on_device() { MIN_ON_DEVICE } else { 1 };
        let times = (ROUND_BYTES / bytes.max(1)).clamp(fewest, MAX_TRANSFERS);
        let mut buffer = self.buffer(whole_chunks(kind, bytes, group.ours.size()));
        self.begin_together()?;
        let begun = Instant::now();
        for _ in 0..times {
            buffer = match kind {
                TransferKind::Collective(collective) => group.ours.run(collective, buffer),
                TransferKind::LibraryAllReduce => {
                    group.library.as_ref().expect("MPI has one").run(Collective::AllReduce, buffer)
                }
                TransferKind::PingPong => ping_pong(&*group.ours, buffer),
            };
        }
        let enqueued = begun.elapsed();
        self.backend.synchronize();
        let [enqueue, whole] = [enqueued, begun.elapsed()].map(|time| time.as_secs_f64() / times as f64);
        self.world.failure().map_or(Ok(RoundTime { enqueue, whole }), Err)
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        let buffer = self.backend.allocate(bytes / DType::F32.bytes(), DType::F32, Category::Communication);
        self.backend.fill(self.rank as f64, buffer.view());
        buffer
    }

    fn begin_together(&self) -> Result<(), RankFailure> {
        drop(self.all.run(Collective::AllReduce, self.buffer(DType::F32.bytes() * self.mesh.ranks())));
        self.backend.synchronize();
        self.world.failure().map_or(Ok(()), Err)
    }
}

/// Seconds of one transfer in a round: until it was enqueued, and until it had ended.
#[derive(Clone, Copy)]
struct RoundTime {
    enqueue: f64,
    whole: f64,
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Bytes of a buffer of about `bytes`: an all-to-all needs whole chunks of fp32.
fn whole_chunks(kind: TransferKind, bytes: usize, ranks: usize) -> usize {
    let unit = match kind {
        TransferKind::Collective(Collective::AllToAll) => 2 * ranks * DType::F32.bytes(),
        _ => 1,
    };
    bytes.next_multiple_of(unit)
}

/// A message there and back between the first two ranks of a group. The others do nothing.
fn ping_pong(group: &dyn Communicator, buffer: Buffer) -> Buffer {
    match group.rank() {
        0 => {
            let buffer = group.wait(group.send(1, 0, buffer));
            group.wait(group.receive(1, 1, buffer))
        }
        1 => {
            let buffer = group.wait(group.receive(0, 0, buffer));
            group.wait(group.send(0, 1, buffer))
        }
        _ => buffer,
    }
}

impl TransferTime {
    /// Bytes per second that a link carries, whatever the number of ranks: what each rank sends, or a message there and back.
    pub fn bandwidth(&self) -> f64 {
        let (bytes, ranks) = (self.bytes as f64, self.ranks as f64);
        let sent = match self.kind {
            TransferKind::Collective(Collective::AllReduce) | TransferKind::LibraryAllReduce => {
                2.0 * bytes * (ranks - 1.0) / ranks
            }
            TransferKind::Collective(Collective::AllGather | Collective::ReduceScatter) => {
                bytes * (ranks - 1.0) / ranks
            }
            TransferKind::Collective(Collective::AllToAll) => bytes / 2.0 * (ranks - 1.0) / ranks,
            TransferKind::PingPong => 2.0 * bytes,
        };
        sent / self.seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_timed_in_every_group() {
        let mesh = Mesh::ONE.with(Axis::Pipeline, 2).with(Axis::Tensor, 2);
        let (topology, links, nccl) = (Topology::ONE_NODE, EmulatedLinks::default(), NcclSettings::default());
        let arrangement = Arrangement { mesh, topology, connection: Connection::Threads, links, nccl };
        let mut times = Vec::new();
        time_transfers(arrangement, &[64, 4096], |time| times.push(time)).expect("no rank fails");
        let kinds = 5;
        assert_eq!(times.len(), 2 * 2 * kinds, "two groups, two sizes");
        assert!(times.iter().all(|time| time.seconds > 0.0 && time.bandwidth() > 0.0));
        assert_eq!((times[0].group, times[0].ranks, times[0].bytes), (Group::TENSOR, 2, 64));
    }
}

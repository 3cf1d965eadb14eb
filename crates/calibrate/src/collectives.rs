//! Times collectives and messages between the ranks of a mesh, as training runs them: all groups of an axis at once.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use kintsugi_comm::{Collective, Communicator, Connection, RankFailure, World, WorldOptions};
use kintsugi_plan::{Axis, Group, Mesh, Span};
use kintsugi_spec::Topology;
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
    /// Seconds of one transfer in the fastest round. Other programs only make a round longer.
    pub fastest: f64,
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
}

/// How long a rank waits for another.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Number of rounds. The result is their median. All kinds of transfer alternate in every round.
const ROUNDS: usize = 9;
/// Bytes that a round moves in each kind, at least, unless that takes too many transfers.
const ROUND_BYTES: usize = 8 << 20;
/// Transfers of a round, at most.
const MOST_TRANSFERS: usize = 100;

/// Times transfers of every size in every group of more than one rank. If the ranks are processes, all of them call it, and
/// `on_time` is called in the process of rank 0.
pub fn time_transfers(
    arrangement: Arrangement,
    sizes: &[usize],
    mut on_time: impl FnMut(TransferTime) + Send,
) -> io::Result<()> {
    let Arrangement { mesh, topology, connection } = arrangement;
    let world = |library_sums| {
        connection.world(WorldOptions { topology, ranks: mesh.ranks(), timeout: TIMEOUT, library_sums })
    };
    let (ours, library) = (world(false), world(true));
    let local: Range<usize> = ours.local_ranks();
    let failures: Vec<RankFailure> = thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut on_time = Some(&mut on_time as &mut (dyn FnMut(TransferTime) + Send));
        for rank in local {
            let (ours, library) = (&ours, &library);
            let report = if rank == 0 { on_time.take() } else { None };
            let run = move || Bench::new(arrangement, ours, library, rank).run(sizes, report);
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
    library: Box<dyn Communicator>,
}

impl<'a> Bench<'a> {
    fn new(
        Arrangement { mesh, topology, connection }: Arrangement,
        world: &'a Arc<dyn World>,
        library: &Arc<dyn World>,
        rank: usize,
    ) -> Self {
        let backend: Rc<dyn Backend> = Rc::new(CpuBackend::new(Rc::new(Heap::default()), 1));
        let at = mesh.coordinate(rank);
        let everybody: Vec<usize> = (0..mesh.ranks()).collect();
        let axes = [Axis::Tensor, Axis::Data, Axis::Pipeline].into_iter().filter(|&axis| mesh.size(axis) > 1);
        let groups = axes.map(|axis| {
            let group = Group::Along(axis, Span::All);
            let members = mesh.group(group, at, topology);
            let join = |world: &Arc<dyn World>| world.group(group, &members, rank, &backend);
            BenchGroup { group, ours: join(world), library: join(library) }
        });
        Bench {
            mesh,
            rank,
            connection,
            groups: groups.collect(),
            all: world.group(Group::Tied, &everybody, rank, &backend),
            backend,
            world,
        }
    }

    fn run(
        &self,
        sizes: &[usize],
        mut report: Option<&mut (dyn FnMut(TransferTime) + Send)>,
    ) -> Result<(), RankFailure> {
        for group in &self.groups {
            for &bytes in sizes {
                let kinds = self.kinds();
                let mut seconds = vec![Vec::with_capacity(ROUNDS); kinds.len()];
                for _ in 0..=ROUNDS {
                    for (kind, seconds) in kinds.iter().zip(&mut seconds) {
                        seconds.push(self.round(group, *kind, bytes)?);
                    }
                }
                let Some(report) = &mut report else { continue };
                for (&kind, mut seconds) in kinds.iter().zip(seconds) {
                    // The first round warms up.
                    seconds.remove(0);
                    seconds.sort_by(f64::total_cmp);
                    let ranks = group.ours.size();
                    let (median, fastest) = (seconds[ROUNDS / 2], seconds[0]);
                    report(TransferTime { group: group.group, ranks, kind, bytes, seconds: median, fastest });
                }
            }
        }
        Ok(())
    }

    fn kinds(&self) -> Vec<TransferKind> {
        let collectives = [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter];
        let mut kinds: Vec<TransferKind> = collectives.map(TransferKind::Collective).to_vec();
        if matches!(self.connection, Connection::Mpi(_)) {
            kinds.insert(1, TransferKind::LibraryAllReduce);
        }
        kinds.push(TransferKind::PingPong);
        kinds
    }

    /// Seconds of one transfer, over a round of them.
    fn round(&self, group: &BenchGroup, kind: TransferKind, bytes: usize) -> Result<f64, RankFailure> {
        let times = (ROUND_BYTES / bytes.max(1)).clamp(1, MOST_TRANSFERS);
        let mut buffer = self.buffer(bytes);
        self.begin_together()?;
        let begun = Instant::now();
        for _ in 0..times {
            buffer = match kind {
                TransferKind::Collective(collective) => group.ours.run(collective, buffer),
                TransferKind::LibraryAllReduce => group.library.run(Collective::AllReduce, buffer),
                TransferKind::PingPong => ping_pong(&*group.ours, buffer),
            };
        }
        let seconds = begun.elapsed().as_secs_f64() / times as f64;
        self.world.failure().map_or(Ok(seconds), Err)
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        let buffer = self.backend.allocate(bytes / DType::F32.bytes(), DType::F32, Category::Communication);
        self.backend.fill(self.rank as f64, buffer.view());
        buffer
    }

    fn begin_together(&self) -> Result<(), RankFailure> {
        drop(self.all.run(Collective::AllReduce, self.buffer(DType::F32.bytes() * self.mesh.ranks())));
        self.world.failure().map_or(Ok(()), Err)
    }
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
        let mesh = Mesh { pp: 2, dp: 1, tp: 2 };
        let arrangement = Arrangement { mesh, topology: Topology::ONE_NODE, connection: Connection::Threads };
        let mut times = Vec::new();
        time_transfers(arrangement, &[64, 4096], |time| times.push(time)).expect("no rank fails");
        let kinds = 4;
        assert_eq!(times.len(), 2 * 2 * kinds, "two groups, two sizes");
        assert!(times.iter().all(|time| time.seconds > 0.0 && time.bandwidth() > 0.0));
        assert_eq!((times[0].group, times[0].ranks, times[0].bytes), (Group::TENSOR, 2, 64));
    }
}

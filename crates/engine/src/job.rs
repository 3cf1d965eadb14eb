//! A job: a thread per rank, each with its own memory, backend and groups, in one world.
//!
//! A rank that fails or panics aborts the world, so that every other rank's wait ends at once; the first failure is the
//! job's.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use kintsugi_comm::threads::{Failure, World};
use kintsugi_comm::{Communicator, Solo};
use kintsugi_plan::{Coordinate, DeviceKind, Op, Plan, Program};
use kintsugi_rank::{Groups, Kept, Purpose, Rank, Source, Store, StoreError};
use kintsugi_tensor::cpu::memory::{Heap, Slab};
use kintsugi_tensor::cpu::{CpuBackend, counting};
use kintsugi_tensor::cuda::CudaBackend;
use kintsugi_tensor::{Backend, Device, Repeated};

use crate::threads::spawn;
use crate::verify::Fault;
use crate::{JobError, RankError, ThreadError};

/// Where ranks keep their tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryChoice {
    /// One slab of the planned size per rank, by stage.
    Slab(Vec<u64>),
    /// A heap allocation per tensor, each seen by the counting allocator.
    Heap,
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The plan.
    pub plan: Arc<Plan>,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// A deliberate mistake, to see that it is noticed.
    pub fault: Option<Fault>,
}

/// One rank of a running job, on its own thread.
pub struct Worker {
    /// The rank.
    pub rank: Rank,
    /// Its number.
    pub number: usize,
    /// Its place on the mesh.
    pub at: Coordinate,
    /// The world it belongs to.
    pub world: Arc<World>,
    /// Its device and memory.
    pub backend: Rc<dyn Backend>,
    fault: Option<Fault>,
}

/// The device of every rank on this machine: a GPU, or an even share of the cores.
pub fn device(plan: &Plan) -> Device {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    match plan.run.device {
        DeviceKind::Cpu => Device::Cpu { threads: (cores / plan.mesh.ranks()).max(1) },
        DeviceKind::Cuda => Device::Cuda { deterministic: plan.run.deterministic },
    }
}

/// Runs `body` once on every rank; gives back what each returned, in order of rank.
pub fn run_job<T: Send>(
    job: &Job,
    body: impl Fn(&mut Worker) -> Result<T, RankError> + Sync,
) -> Result<Vec<T>, JobError> {
    run_for(Purpose::Training, job, body)
}

/// The same with ranks for this purpose.
pub fn run_for<T: Send>(
    purpose: Purpose,
    job: &Job,
    body: impl Fn(&mut Worker) -> Result<T, RankError> + Sync,
) -> Result<Vec<T>, JobError> {
    silence_rank_panics();
    let ranks = job.plan.mesh.ranks();
    let world = World::new(job.plan.cluster.topology, ranks);
    world.set_timeout(Duration::from_secs(job.plan.run.communication_timeout));
    let results: Vec<Result<T, JobError>> = thread::scope(|scope| {
        let start = |number: usize| {
            let (world, body) = (&world, &body);
            let run = move || run_rank(purpose, job, number, world, body);
            spawn(scope, &format!("rank {number}"), run).map_err(|error| fail(world, number, error.into()))
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        let joined = |thread: ScopedJoinHandle<_>| thread.join().expect("a rank's panic is caught");
        threads.into_iter().map(|thread| thread.and_then(joined)).collect()
    });
    // The error of the first rank that failed: those of the others follow from it.
    match world.failure() {
        None => results.into_iter().collect(),
        Some(first) => {
            Err(results.into_iter().nth(first.rank).and_then(Result::err).unwrap_or(first.clone().into()))
        }
    }
}

fn run_rank<T: Send>(
    purpose: Purpose,
    job: &Job,
    number: usize,
    world: &Arc<World>,
    body: &(impl Fn(&mut Worker) -> Result<T, RankError> + Sync),
) -> Result<T, JobError> {
    let device = device(&job.plan);
    let guarded = || {
        counting::attribute(number);
        IS_RANK.set(true);
        let run = || body(&mut Worker::new(purpose, job, number, world, device)?);
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(result) => result.map_err(|error| fail(world, number, error)),
            Err(panic) => Err(panicked(world, number, message(&*panic))),
        }
    };
    let threads = match device {
        Device::Cpu { threads } if threads > 1 => threads,
        Device::Cpu { .. } | Device::Cuda { .. } => return guarded(),
    };
    // The rank itself is one of the pool's threads, so handing work to the others costs little.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let pool = pool.start_handler(move |_| counting::attribute(number)).build();
    match pool {
        Ok(pool) => pool.install(guarded),
        Err(error) => Err(fail(world, number, ThreadError::new("its pool of threads", error).into())),
    }
}

/// Stops the world because a rank cannot go on.
fn fail(world: &World, rank: usize, source: RankError) -> JobError {
    let during = DURING.get().to_string();
    world.abort(Failure { rank, during: during.clone(), reason: source.to_string() });
    JobError::Rank { rank, during, source }
}

/// Stops the world because a rank panicked. If the world had stopped already, that is why it did.
fn panicked(world: &World, rank: usize, reason: String) -> JobError {
    world.abort(Failure { rank, during: DURING.get().to_string(), reason });
    world.failure().expect("it has just stopped").clone().into()
}

/// What this thread's rank is doing, for the error message.
#[derive(Clone, Copy)]
pub(crate) enum During {
    SetUp,
    Loading,
    Op(Op),
    /// After the last op of a program, when what devices ran late is waited for, and copies are saved.
    EndOfStep,
    /// Reading the batch of the next step.
    Data,
}

impl During {
    pub fn set(self) {
        DURING.set(self);
    }
}

impl fmt::Display for During {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            During::SetUp => f.write_str("its set-up"),
            During::Loading => f.write_str("loading"),
            During::Op(op) => op.fmt(f),
            During::EndOfStep => f.write_str("the end of a step"),
            During::Data => f.write_str("reading data"),
        }
    }
}

impl Worker {
    fn new(
        purpose: Purpose,
        job: &Job,
        number: usize,
        world: &Arc<World>,
        device: Device,
    ) -> Result<Self, RankError> {
        let at = job.plan.mesh.coordinate(number);
        // Ranks that share a card would time each other's work.
        let lasting = purpose == Purpose::Training && job.plan.mesh.ranks() == 1;
        let backend = backend(&job.memory, at.pp, device, lasting)?;
        let groups = Groups::new(&job.plan, at, |name, members, _| {
            let group = || world.group(name, members, number);
            let group: Box<dyn Communicator> = match device {
                _ if members.len() == 1 => Box::new(Solo),
                Device::Cpu { .. } => Box::new(group()),
                Device::Cuda { .. } => Box::new(group().on_gpu(Rc::clone(&backend))),
            };
            group
        });
        let groups = match job.fault {
            Some(fault) => fault.in_groups(groups, Rc::clone(&backend)),
            None => groups,
        };
        let mut rank = Rank::for_purpose(Arc::clone(&job.plan), at, Rc::clone(&backend), groups, purpose);
        if let Some(fault) = job.fault {
            fault.in_rank(&mut rank, &job.plan, at);
        }
        Ok(Worker { rank, number, at, world: Arc::clone(world), backend, fault: job.fault })
    }

    /// Sets the weights.
    pub(crate) fn load(&self, weights: &dyn Store) -> Result<(), StoreError> {
        During::Loading.set();
        self.rank.load(weights, &[Kept::Weights])
    }

    /// The training program of this rank's stage.
    pub fn program(&self, plan: &Plan) -> Program {
        let program = plan.program(self.at.pp);
        match self.fault {
            Some(fault) => fault.in_program(program),
            None => program,
        }
    }

    /// Runs a program, remembering the op for the error message.
    pub fn run(&mut self, program: &Program, source: &mut dyn Source, mut watch: impl FnMut(&Rank, &Op)) {
        self.rank.run(program, source, |rank, op| {
            During::Op(*op).set();
            watch(rank, op);
        });
        During::EndOfStep.set();
    }

    /// The same for a program that is run again and again: see [`Rank::repeat`].
    pub fn repeat(
        &mut self,
        program: &Program,
        source: &mut dyn Source,
        mut watch: impl FnMut(&Rank, &Op),
    ) -> Repeated {
        let repeated = self.rank.repeat(program, source, |rank, op| {
            During::Op(*op).set();
            watch(rank, op);
        });
        During::EndOfStep.set();
        repeated
    }
}

/// A rank's device, with memory for a rank of stage `stage`; it may take its time to find out how it works best if the
/// work is `lasting`.
fn backend(
    memory: &MemoryChoice,
    stage: usize,
    device: Device,
    lasting: bool,
) -> Result<Rc<dyn Backend>, RankError> {
    Ok(match (device, memory) {
        (Device::Cpu { threads }, MemoryChoice::Slab(bytes)) => {
            Rc::new(CpuBackend::new(Rc::new(Slab::new(bytes[stage])?), threads))
        }
        (Device::Cpu { threads }, MemoryChoice::Heap) => {
            Rc::new(CpuBackend::new(Rc::new(Heap::default()), threads))
        }
        (Device::Cuda { deterministic }, MemoryChoice::Slab(bytes)) => {
            let backend = CudaBackend::new(0, bytes[stage], deterministic)?;
            Rc::new(if lasting { backend } else { backend.for_short_work() })
        }
        (Device::Cuda { .. }, MemoryChoice::Heap) => panic!("a GPU's memory is planned, not found"),
    })
}

thread_local! {
    static DURING: Cell<During> = const { Cell::new(During::SetUp) };
    /// Whether this thread runs a rank, whose panics become the job's error.
    static IS_RANK: Cell<bool> = const { Cell::new(false) };
}

/// Keeps the default report of a panic off the screen for ranks: the job's error says it in one sentence.
fn silence_rank_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IS_RANK.get() {
                previous(info);
            }
        }));
    });
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

//! A job: a thread per rank, each with its own memory, backend and groups, in one world.
//!
//! A rank that fails or panics aborts the world, which ends every other rank's wait at once. The job's error is the first
//! failure.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use kintsugi_comm::threads::{RankFailure, World};
use kintsugi_comm::{Communicator, Solo};
use kintsugi_plan::{Coordinate, DeviceKind, Op, Plan, Program};
use kintsugi_rank::{Groups, Purpose, Rank, Store, StoreError, StoredTensor, TokenSource};
use kintsugi_tensor::cpu::memory::{Heap, Slab};
use kintsugi_tensor::cpu::{CpuBackend, counting};
use kintsugi_tensor::cuda::CudaBackend;
use kintsugi_tensor::{Backend, Device, ReplayOutcome};

use crate::threads::spawn;
use crate::verify::Fault;
use crate::{JobError, RankError, ThreadError};

/// How ranks allocate their tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryChoice {
    /// One slab of the planned size per rank. The sizes are by stage.
    Slab(Vec<u64>),
    /// A heap allocation per tensor, counted by the counting allocator.
    Heap,
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The plan.
    pub plan: Arc<Plan>,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// A deliberate mistake, to test that it is detected.
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

/// The device of every rank on this machine: a GPU, or an equal share of the CPU cores.
pub fn device(plan: &Plan) -> Device {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    match plan.run.device {
        DeviceKind::Cpu => Device::Cpu { threads: (cores / plan.mesh.ranks()).max(1) },
        DeviceKind::Cuda => Device::Cuda { deterministic: plan.run.deterministic },
    }
}

/// Runs `body` once on every rank for training. Returns the results in order of rank.
pub fn run_job<T: Send>(
    job: &Job,
    body: impl Fn(&mut Worker) -> Result<T, RankError> + Sync,
) -> Result<Vec<T>, JobError> {
    run_for(Purpose::Training, job, body)
}

/// Runs `body` once on every rank. Returns the results in order of rank.
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
    // The error of the first rank that failed. The errors of the others are its consequences.
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
    // The rank itself runs on one of the pool's threads, so handing work to the others is cheap.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let pool = pool.start_handler(move |_| counting::attribute(number)).build();
    match pool {
        Ok(pool) => pool.install(guarded),
        Err(error) => Err(fail(world, number, ThreadError::new("its pool of threads", error).into())),
    }
}

/// Stops the world because a rank cannot continue.
fn fail(world: &World, rank: usize, source: RankError) -> JobError {
    let during = PHASE.get().to_string();
    world.abort(RankFailure { rank, during: during.clone(), reason: source.to_string() });
    JobError::Rank { rank, during, source }
}

/// Stops the world because a rank panicked. If the world has already stopped, the earlier failure is the cause of the panic.
fn panicked(world: &World, rank: usize, reason: String) -> JobError {
    world.abort(RankFailure { rank, during: PHASE.get().to_string(), reason });
    world.failure().expect("it has just stopped").clone().into()
}

/// What this thread's rank is doing, for error messages.
#[derive(Clone, Copy)]
pub(crate) enum Phase {
    SetUp,
    Loading,
    Op(Op),
    /// After the last op of a program: the rank waits for the device and copies its state for a checkpoint.
    EndOfStep,
    /// Reading the batch of the next step.
    Data,
}

impl Phase {
    pub fn set(self) {
        PHASE.set(self);
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Phase::SetUp => f.write_str("its set-up"),
            Phase::Loading => f.write_str("loading"),
            Phase::Op(op) => op.fmt(f),
            Phase::EndOfStep => f.write_str("the end of a step"),
            Phase::Data => f.write_str("reading data"),
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
        // Ranks that share a GPU would disturb each other's autotuning.
        let long_running = purpose == Purpose::Training && job.plan.mesh.ranks() == 1;
        let backend = backend(&job.memory, at.pp, device, long_running)?;
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
        Phase::Loading.set();
        self.rank.load(weights, &[StoredTensor::Weights])
    }

    /// The training program of this rank's stage.
    pub fn program(&self, plan: &Plan) -> Program {
        let program = plan.program(self.at.pp);
        match self.fault {
            Some(fault) => fault.in_program(program),
            None => program,
        }
    }

    /// Runs a program and records the current op for error messages.
    pub fn run(
        &mut self,
        program: &Program,
        source: &mut dyn TokenSource,
        mut watch: impl FnMut(&Rank, &Op),
    ) {
        self.rank.run(program, source, |rank, op| {
            Phase::Op(*op).set();
            watch(rank, op);
        });
        Phase::EndOfStep.set();
    }

    /// Runs the program of a training step, by replaying its graph if possible: see [`Rank::replay_step`].
    pub fn replay_step(
        &mut self,
        program: &Program,
        source: &mut dyn TokenSource,
        mut watch: impl FnMut(&Rank, &Op),
    ) -> ReplayOutcome {
        let repeated = self.rank.replay_step(program, source, |rank, op| {
            Phase::Op(*op).set();
            watch(rank, op);
        });
        Phase::EndOfStep.set();
        repeated
    }
}

/// The backend of a rank of stage `stage`, with its memory. It autotunes its kernels only if the job is `long_running`.
fn backend(
    memory: &MemoryChoice,
    stage: usize,
    device: Device,
    long_running: bool,
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
            Rc::new(if long_running { backend } else { backend.for_short_work() })
        }
        (Device::Cuda { .. }, MemoryChoice::Heap) => panic!("a GPU's memory is planned, not found"),
    })
}

thread_local! {
    static PHASE: Cell<Phase> = const { Cell::new(Phase::SetUp) };
    /// Whether this thread runs a rank, whose panics become the job's error.
    static IS_RANK: Cell<bool> = const { Cell::new(false) };
}

/// Suppresses the default panic message of rank threads, since the job's error reports the panic.
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

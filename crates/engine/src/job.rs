//! A job: the ranks of this process, a thread each with its own memory, backend and groups, in one world.
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

use kintsugi_comm::nccl::NcclSettings;
use kintsugi_comm::{Communicator, Connection, RankFailure, Solo, World, WorldOptions};
use kintsugi_gpu::{CUDA, HIP, Platform};
use kintsugi_plan::{Coordinate, DeviceKind, Group, Op, Plan, Program};
use kintsugi_rank::{Groups, Purpose, Rank, Store, StoreError, StoredTensor, TokenSource};
use kintsugi_spec::work;
use kintsugi_tensor::cpu::memory::{Heap, Slab};
use kintsugi_tensor::cpu::{CpuBackend, counting};
use kintsugi_tensor::{Backend, Device, ReplayOutcome};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::threads::spawn;
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
#[derive(Clone)]
pub struct Job {
    /// The plan.
    pub plan: Arc<Plan>,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// How the ranks are connected.
    pub connection: Connection,
}

impl Job {
    /// A job whose ranks are threads of this process.
    pub fn new(plan: Arc<Plan>, memory: MemoryChoice) -> Self {
        Job { plan, memory, connection: Connection::Threads }
    }

    /// The ranks of the job.
    pub fn world(&self) -> Arc<dyn World> {
        let run = &self.plan.run;
        self.connection.world(WorldOptions {
            places: self.plan.cluster.places(),
            ranks: self.plan.mesh.ranks(),
            timeout: Duration::from_secs(run.communication_timeout),
            library_sums: !run.deterministic,
            nccl: nccl_settings(&self.plan),
            wraps: self.plan.pipeline.virtual_stages > 1,
            links: self.plan.cluster.emulated,
        })
    }
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
    pub world: Arc<dyn World>,
    /// Its device and memory.
    pub backend: Rc<dyn Backend>,
    /// Bytes of the device that the transport itself holds.
    pub transport_bytes: u64,
}

/// The settings of NCCL in a plan.
pub fn nccl_settings(plan: &Plan) -> NcclSettings {
    let (run, defaults) = (&plan.run, NcclSettings::default());
    NcclSettings {
        channels: run.nccl_channels.map_or(defaults.channels, |channels| channels as u32),
        buffer: run.nccl_buffer.unwrap_or(defaults.buffer),
    }
}

/// The device of every rank: a GPU, or an equal share of the CPU cores of its node.
pub fn device(plan: &Plan, connection: Connection) -> Device {
    let device = match plan.run.device {
        DeviceKind::Cpu => Device::Cpu { threads: connection.threads_per_rank(plan.mesh.ranks()) },
        DeviceKind::Cuda => CUDA.device(plan.run.deterministic),
        DeviceKind::Hip => HIP.device(plan.run.deterministic),
    };
    if plan.may_use_attention_library() { device } else { device.without_attention_library() }
}

/// The GPUs of a kind of device. `None` for CPUs.
pub fn platform(device: DeviceKind) -> Option<&'static Platform> {
    match device {
        DeviceKind::Cpu => None,
        DeviceKind::Cuda => Some(&CUDA),
        DeviceKind::Hip => Some(&HIP),
    }
}

/// Runs `body` once on every rank, for training. Returns the results in order of rank in the process of rank 0, and `None` in
/// every other.
pub fn run_job<T: Send + Serialize + DeserializeOwned>(
    job: &Job,
    body: impl Fn(&mut Worker) -> Result<T, RankError> + Sync,
) -> Result<Option<Vec<T>>, JobError> {
    let world = job.world();
    let results = run_ranks(Purpose::Training, job, &world, body)?;
    gather(&*world, results)
}

/// Brings the results of all ranks to the process of rank 0, in order of rank. Other processes get `None`.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(
    world: &dyn World,
    results: Vec<T>,
) -> Result<Option<Vec<T>>, JobError> {
    let local = world.local_ranks();
    if local.len() == world.ranks() {
        return Ok(Some(results));
    }
    if local.is_empty() {
        return Ok(None);
    }
    let encoded = postcard::to_stdvec(&results).expect("results have lengths that are known");
    let Some(processes) = world.gather(encoded)? else { return Ok(None) };
    let decode =
        |bytes: &Vec<u8>| postcard::from_bytes::<Vec<T>>(bytes).expect("all processes run one version");
    Ok(Some(processes.iter().flat_map(decode).collect()))
}

/// Runs `body` once on every rank of this process. Returns their results in order of rank.
pub fn run_ranks<T: Send>(
    purpose: Purpose,
    job: &Job,
    world: &Arc<dyn World>,
    body: impl Fn(&mut Worker) -> Result<T, RankError> + Sync,
) -> Result<Vec<T>, JobError> {
    silence_rank_panics();
    let local = world.local_ranks();
    let results: Vec<Result<T, JobError>> = thread::scope(|scope| {
        let start = |number: usize| {
            let body = &body;
            let run = move || run_rank(purpose, job, number, world, body);
            spawn(scope, &format!("rank {number}"), run).map_err(|error| fail(&**world, number, error.into()))
        };
        let threads: Vec<_> = local.clone().map(start).collect();
        let joined = |thread: ScopedJoinHandle<_>| thread.join().expect("a rank's panic is caught");
        threads.into_iter().map(|thread| thread.and_then(joined)).collect()
    });
    // The error of the first rank that failed. The errors of the others are its consequences.
    match world.failure() {
        None => results.into_iter().collect(),
        Some(first) => {
            let result = first.rank.checked_sub(local.start).and_then(|index| results.into_iter().nth(index));
            Err(result.and_then(Result::err).unwrap_or(first.into()))
        }
    }
}

fn run_rank<T: Send>(
    purpose: Purpose,
    job: &Job,
    number: usize,
    world: &Arc<dyn World>,
    body: &(impl Fn(&mut Worker) -> Result<T, RankError> + Sync),
) -> Result<T, JobError> {
    let device = device(&job.plan, job.connection);
    let guarded = || {
        counting::attribute(number);
        IS_RANK.set(true);
        let failed = |error| fail(&**world, number, error);
        let run = || {
            let mut worker = Worker::new(purpose, job, number, world, device).map_err(failed)?;
            // The world knows of a failure before the worker's groups are dropped.
            body(&mut worker).map_err(failed)
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(result) => result,
            Err(panic) => Err(panicked(&**world, number, message(&*panic))),
        }
    };
    let threads = match device {
        Device::Cpu { threads } if threads > 1 => threads,
        Device::Cpu { .. } | Device::Gpu { .. } => return guarded(),
    };
    // The rank itself runs on one of the pool's threads, so handing work to the others is cheap.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    let pool = pool.start_handler(move |_| counting::attribute(number)).build();
    match pool {
        Ok(pool) => pool.install(guarded),
        Err(error) => Err(fail(&**world, number, ThreadError::new("its pool of threads", error).into())),
    }
}

/// Stops the world because a rank cannot continue.
fn fail(world: &dyn World, rank: usize, source: RankError) -> JobError {
    let during = ACTIVITY.get().to_string();
    if let RankError::Transfer(failure) = source {
        // The world has stopped. If this rank detected the failure, only this rank knows in which op.
        let op = if failure.rank == rank { Some(during) } else { failure.op.clone() };
        return RankFailure { op, ..*failure }.into();
    }
    world.abort(RankFailure::new(rank, during.clone(), source.to_string()));
    JobError::Rank { rank, host: world.host().map(Into::into), during: during.into(), source }
}

/// Stops the world because a rank panicked. If the world has already stopped, the earlier failure is the cause of the panic.
fn panicked(world: &dyn World, rank: usize, reason: String) -> JobError {
    world.abort(RankFailure::new(rank, ACTIVITY.get().to_string(), reason));
    world.failure().expect("it has just stopped").into()
}

/// What this thread's rank is doing, for error messages.
#[derive(Clone, Copy)]
pub(crate) enum RankActivity {
    SetUp,
    Loading,
    Op(Op),
    /// After the last op of a program: the rank waits for the device and copies its state for a checkpoint.
    EndOfStep,
    /// Reading the batch of the next step.
    Data,
}

impl RankActivity {
    pub fn set(self) {
        ACTIVITY.set(self);
    }
}

impl fmt::Display for RankActivity {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            RankActivity::SetUp => f.write_str("its set-up"),
            RankActivity::Loading => f.write_str("loading"),
            RankActivity::Op(op) => op.fmt(f),
            RankActivity::EndOfStep => f.write_str("the end of a step"),
            RankActivity::Data => f.write_str("reading data"),
        }
    }
}

impl Worker {
    fn new(
        purpose: Purpose,
        job: &Job,
        number: usize,
        world: &Arc<dyn World>,
        device: Device,
    ) -> Result<Self, RankError> {
        let at = job.plan.mesh.coordinate(number);
        // Ranks that share a GPU would disturb each other's autotuning.
        let long_running = purpose == Purpose::Training && job.plan.mesh.ranks() == 1;
        let backend = backend(job, at.pp(), device, long_running)?;
        // Making groups has no timeout, so all processes come to it together.
        world.barrier()?;
        let groups = Groups::new(&job.plan, at, |group, members| -> Box<dyn Communicator> {
            match members.len() {
                1 => Box::new(Solo),
                _ => world.group(group, members, number, &backend),
            }
        });
        // The tied stages are the only group that some ranks are not in.
        let tied_stages = (0..job.plan.mesh.pp()).filter(|&stage| job.plan.holds_tied_copy(stage)).count();
        if tied_stages > 1 && !job.plan.holds_tied_copy(at.pp()) {
            world.skip_group(Group::Tied, tied_stages);
        }
        if let Some(failure) = world.failure() {
            return Err(failure.into());
        }
        let transport_bytes = world.transport_bytes()?;
        let rank = Rank::for_purpose(Arc::clone(&job.plan), at, Rc::clone(&backend), groups, purpose);
        let world = Arc::clone(world);
        Ok(Worker { rank, number, at, world, backend, transport_bytes })
    }

    /// Sets the weights.
    pub(crate) fn load(&self, weights: &dyn Store) -> Result<(), StoreError> {
        RankActivity::Loading.set();
        self.rank.load(weights, &[StoredTensor::Weights])
    }

    /// The training program of this rank's stage.
    pub fn program(&self, plan: &Plan) -> Program {
        plan.program(self.at.pp())
    }

    /// Runs a program and records the current op for error messages.
    pub fn run(
        &mut self,
        program: &Program,
        source: &mut dyn TokenSource,
        mut watch: impl FnMut(&Rank, &Op),
    ) -> Result<(), RankFailure> {
        self.rank.run(program, source, |rank, op| {
            RankActivity::Op(*op).set();
            work::finish_piece();
            watch(rank, op);
        })?;
        work::finish_piece();
        RankActivity::EndOfStep.set();
        Ok(())
    }

    /// Runs the program of a training step, by replaying its graph if possible: see [`Rank::replay_step`].
    pub fn replay_step(
        &mut self,
        program: &Program,
        source: &mut dyn TokenSource,
        mut watch: impl FnMut(&Rank, &Op),
    ) -> Result<ReplayOutcome, RankFailure> {
        let outcome = self.rank.replay_step(program, source, |rank, op| {
            RankActivity::Op(*op).set();
            work::finish_piece();
            watch(rank, op);
        })?;
        work::finish_piece();
        RankActivity::EndOfStep.set();
        Ok(outcome)
    }
}

/// The backend of a rank of stage `stage`, with its memory. It autotunes its kernels only if the job is `long_running`.
fn backend(
    job: &Job,
    stage: usize,
    device: Device,
    long_running: bool,
) -> Result<Rc<dyn Backend>, RankError> {
    Ok(match (device, &job.memory) {
        (Device::Cpu { threads }, MemoryChoice::Slab(bytes)) => {
            Rc::new(CpuBackend::new(Rc::new(Slab::new(bytes[stage])?), threads))
        }
        (Device::Cpu { threads }, MemoryChoice::Heap) => {
            Rc::new(CpuBackend::new(Rc::new(Heap::default()), threads))
        }
        (Device::Gpu { .. }, MemoryChoice::Slab(bytes)) => {
            let (gpu, deterministic) = (job.connection.gpu(), job.plan.run.deterministic);
            let platform = platform(job.plan.run.device).expect("the device of a GPU's plan");
            let backend = platform.backend(gpu % platform.devices()?.max(1), bytes[stage], deterministic)?;
            Rc::new(if long_running { backend } else { backend.for_short_work() })
        }
        (Device::Gpu { .. }, MemoryChoice::Heap) => panic!("a GPU's memory is planned, not found"),
    })
}

thread_local! {
    static ACTIVITY: Cell<RankActivity> = const { Cell::new(RankActivity::SetUp) };
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

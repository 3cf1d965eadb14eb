//! The processes of a job: how they find each other, and how they agree before they begin.

mod agreement;
mod device;

use std::time::Duration;

use kintsugi_comm::Connection;
use kintsugi_comm::mpi::{ConnectError, Mpi, launched};
use kintsugi_comm::nccl::NcclSettings;
use kintsugi_comm::rendezvous::{self, Rendezvous, RendezvousError};
use kintsugi_engine::{nccl_settings, platform};
use kintsugi_gpu::Platform;
use kintsugi_plan::{DeviceKind, Plan, Transport};

pub use agreement::{agree, agree_for, agree_on, collect, share};
pub use device::DeviceChoice;

use crate::failure::{ErrorContext, Failure};
use crate::host;

/// This process among the others of its job, and the device of all ranks.
#[derive(Clone, Copy)]
pub struct JobConnection {
    /// How the processes are connected.
    pub connection: Connection,
    /// The device of every rank.
    pub device: DeviceKind,
}

/// Connects this process with the others of its job. If the configuration is not known, because it has a mistake, the launcher
/// decides: then the processes can still agree on who reports it.
pub fn connect(plan: Option<(&Plan, DeviceChoice)>) -> Result<JobConnection, Failure> {
    connect_by(match plan {
        Some((plan, choice)) => ConnectOptions {
            transport: Some(plan.run.transport),
            nccl: nccl_settings(plan),
            choice,
            ranks: plan.mesh.ranks(),
            limit: Duration::from_secs(plan.run.communication_timeout),
        },
        None => ConnectOptions {
            transport: None,
            nccl: NcclSettings::default(),
            choice: DeviceChoice::Given(DeviceKind::Cpu),
            ranks: 1,
            limit: DEFAULT_LIMIT,
        },
    })
}

/// How long processes wait for each other if the configuration is not known.
const DEFAULT_LIMIT: Duration = Duration::from_secs(600);

/// What connecting processes depends on.
#[derive(Clone, Copy)]
pub struct ConnectOptions {
    /// The transport, if it is known.
    pub transport: Option<Transport>,
    /// The settings of NCCL.
    pub nccl: NcclSettings,
    /// The device, or how it is chosen.
    pub choice: DeviceChoice,
    /// Number of ranks of the job.
    pub ranks: usize,
    /// How long a process waits for another that makes no progress.
    pub limit: Duration,
}

/// The same for options that the command line chose.
pub fn connect_by(options: ConnectOptions) -> Result<JobConnection, Failure> {
    let ConnectOptions { transport, choice, ranks, .. } = options;
    let launched = launched().filter(|launched| launched.size > 1);
    // All processes find the same mistake. The first one reports it.
    let reported = |failure: Failure| match launched {
        Some(launched) if launched.rank > 0 => Failure::ReportedElsewhere(failure.code()),
        _ => failure,
    };
    if launched.is_some() && rendezvous::is_arranged() {
        return connect_without_mpi(options, reported);
    }
    match (transport, launched) {
        (Some(Transport::Threads), Some(launched)) => {
            let processes = launched.size;
            Err(reported(Failure::mistake(format!(
                "run.transport = \"threads\" runs all ranks in one process, and {processes} were started; start one, or leave \
                 run.transport out"
            ))))
        }
        (Some(Transport::Nccl), None) => Err(Failure::mistake(
            "run.transport = \"nccl\" needs a process for every rank; start them with kintsugi launch, mpirun or srun",
        )),
        (Some(Transport::Threads | Transport::Auto) | None, None) => {
            Ok(JobConnection { connection: Connection::Threads, device: choice.on_threads(ranks) })
        }
        (Some(Transport::Auto | Transport::Mpi | Transport::Nccl) | None, _) => {
            connect_with_mpi(options, reported)
        }
    }
}

/// Connects processes whose launcher has set the address of rank 0. They communicate by NCCL.
fn connect_without_mpi(
    options: ConnectOptions,
    reported: impl Fn(Failure) -> Failure,
) -> Result<JobConnection, Failure> {
    match options.transport {
        Some(Transport::Threads | Transport::Mpi) => Err(reported(Failure::mistake(format!(
            "{} is set, which is for run.transport = \"nccl\"; unset it, or leave run.transport out",
            rendezvous::ADDRESS
        )))),
        Some(Transport::Auto) if !options.choice.may_use_gpus() => Err(reported(Failure::mistake(
            "processes without MPI communicate by NCCL, which needs run.device = \"cuda\" or \"hip\"; start them with MPI",
        ))),
        Some(Transport::Auto | Transport::Nccl) | None => {
            options.nccl.set_environment();
            let rendezvous = Rendezvous::connect(options.limit).map_err(rendezvous_failure)?;
            by_nccl(rendezvous, options.choice).map_err(reported)
        }
    }
}

/// Connects processes by MPI. If they may use NCCL and can, they communicate by it.
fn connect_with_mpi(
    options: ConnectOptions,
    reported: impl Fn(Failure) -> Failure,
) -> Result<JobConnection, Failure> {
    let ConnectOptions { transport, nccl: settings, choice, limit, .. } = options;
    let wants_nccl = transport == Some(Transport::Nccl);
    let may_use_nccl =
        wants_nccl || transport == Some(Transport::Auto) && choice != DeviceChoice::Given(DeviceKind::Cpu);
    if may_use_nccl {
        settings.set_environment();
    }
    let mpi = Mpi::connect(limit).map_err(|error| match error {
        ConnectError::NoProcessManager(_) => reported(Failure::mistake(error)),
        _ => reported(Failure::run(ErrorContext::new("connecting the processes by MPI", error))),
    })?;
    let rendezvous = mpi.rendezvous();
    // Looking for NCCL is an exchange of all processes. A process whose configuration has a mistake takes no part in it.
    if rendezvous.all(may_use_nccl)? {
        if wants_nccl {
            return by_nccl(rendezvous, choice).map_err(reported);
        }
        // Several ranks on one GPU work, but slowly: a user who wants that names NCCL.
        if let Ok(connection @ Connection::Nccl(process)) = Connection::nccl(rendezvous, gpus(choice))
            && !process.shares_gpus
        {
            return Ok(JobConnection { connection, device: choice.gpu_kind() });
        }
    }
    let connection = Connection::mpi(mpi)?;
    let (kind, number) = host::gpus();
    let enough = choice == DeviceChoice::Auto && number >= connection.ranks_here(mpi.size);
    let device = if rendezvous.all(enough)? { kind } else { DeviceKind::Cpu };
    Ok(JobConnection { connection, device: choice.given().unwrap_or(device) })
}

/// The GPUs of the ranks.
fn gpus(choice: DeviceChoice) -> &'static Platform {
    platform(choice.gpu_kind()).expect("a kind of GPU")
}

fn by_nccl(rendezvous: &'static Rendezvous, choice: DeviceChoice) -> Result<JobConnection, Failure> {
    let connection = Connection::nccl(rendezvous, gpus(choice))
        .map_err(|error| Failure::mistake(ErrorContext::new("run.transport = \"nccl\"", error)))?;
    Ok(JobConnection { connection, device: choice.gpu_kind() })
}

/// A wrong variable is a mistake. A process that does not come is a failure of the run.
fn rendezvous_failure(error: RendezvousError) -> Failure {
    match error {
        RendezvousError::Variable(_) | RendezvousError::EmptySecret | RendezvousError::Rank { .. } => {
            Failure::mistake(error)
        }
        _ => Failure::run(error),
    }
}

/// Ends the connections at the end of the process. With `end_others`, ends all other processes, too.
pub fn finish(code: u8, end_others: bool) {
    Rendezvous::finish(end_others);
    Mpi::finish(code.into(), end_others);
    Rendezvous::close();
}

/// Refuses to run a command as several processes that would all do the same.
pub fn refuse_several(command: &str) -> Result<(), Failure> {
    match launched().filter(|launched| launched.size > 1) {
        None => Ok(()),
        Some(launched) if launched.rank > 0 => Err(Failure::ReportedElsewhere(2)),
        Some(launched) => Err(Failure::mistake(format!(
            "{command} runs all ranks as threads of one process, and {} processes were started; start one",
            launched.size
        ))),
    }
}

//! The processes of a job: how they find each other, and how they agree before they begin.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kintsugi_comm::mpi::{ConnectError, Mpi, launched};
use kintsugi_comm::nccl::NcclSettings;
use kintsugi_comm::rendezvous::{self, Rendezvous, RendezvousError};
use kintsugi_comm::{Connection, World, WorldOptions};
use kintsugi_engine::nccl_settings;
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{DeviceKind, Plan, Transport};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::VERSION;
use crate::failure::Failure;
use crate::host;

/// How the device of the ranks is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// As the configuration says.
    Given(DeviceKind),
    /// `run.device = "auto"`: GPUs, if every host has one for each of its ranks.
    Auto,
}

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
    let ConnectOptions { transport, nccl: settings, choice, ranks, limit } = options;
    let launched = launched().filter(|launched| launched.size > 1);
    // What all processes find, the first one reports.
    let reported = |failure: Failure| match launched {
        Some(launched) if launched.rank > 0 => Failure::ReportedElsewhere(failure.code()),
        _ => failure,
    };
    let mistake = |text: String| Err(reported(Failure::Mistake(text)));
    if launched.is_some() && rendezvous::is_arranged() {
        return match transport {
            Some(Transport::Threads | Transport::Mpi) => mistake(format!(
                "{} is set, which is for run.transport = \"nccl\"; unset it, or leave run.transport out",
                rendezvous::ADDRESS
            )),
            Some(Transport::Auto) if !choice.may_use_gpus() => mistake(
                "processes without MPI communicate by NCCL, which needs run.device = \"cuda\"; start them with MPI".into(),
            ),
            Some(Transport::Auto | Transport::Nccl) | None => {
                settings.set_environment();
                let met = Rendezvous::connect(limit).map_err(|error| rendezvous_failure(&error))?;
                by_nccl(met).map_err(reported)
            }
        };
    }
    match (transport, launched) {
        (Some(Transport::Threads), Some(launched)) => {
            let processes = launched.size;
            return mistake(format!(
                "run.transport = \"threads\" runs all ranks in one process, and {processes} were started; start one, or leave \
                 run.transport out"
            ));
        }
        (Some(Transport::Nccl), None) => {
            return mistake(
                "run.transport = \"nccl\" needs a process for every rank; start them with kintsugi launch, mpirun or srun".into(),
            );
        }
        (Some(Transport::Threads | Transport::Auto) | None, None) => {
            let device = choice.on_threads(ranks);
            return Ok(JobConnection { connection: Connection::Threads, device });
        }
        (Some(Transport::Auto | Transport::Mpi | Transport::Nccl) | None, _) => {}
    }
    let wants_nccl = transport == Some(Transport::Nccl);
    let may_use_nccl =
        wants_nccl || transport == Some(Transport::Auto) && choice != DeviceChoice::Given(DeviceKind::Cpu);
    if may_use_nccl {
        settings.set_environment();
    }
    let mpi = Mpi::connect(limit).map_err(|error| match error {
        ConnectError::NoProcessManager(_) => reported(Failure::Mistake(error.to_string())),
        _ => reported(Failure::Run(format!("connecting the processes by MPI: {error}"))),
    })?;
    let rendezvous = mpi.rendezvous();
    // Looking for NCCL is an exchange of all processes. One whose configuration has a mistake takes no part in it.
    if rendezvous.all(may_use_nccl)? {
        if wants_nccl {
            return by_nccl(rendezvous).map_err(reported);
        }
        // Several ranks on one GPU work, but slowly: whoever wants that says so.
        if let Ok(connection @ Connection::Nccl(process)) = Connection::nccl(rendezvous)
            && !process.shares_gpus
        {
            return Ok(JobConnection { connection, device: DeviceKind::Cuda });
        }
    }
    let connection = Connection::mpi(mpi)?;
    let enough = choice == DeviceChoice::Auto && host::gpus() >= connection.ranks_here(mpi.size);
    let device = if rendezvous.all(enough)? { DeviceKind::Cuda } else { DeviceKind::Cpu };
    Ok(JobConnection { connection, device: choice.given().unwrap_or(device) })
}

fn by_nccl(rendezvous: &'static Rendezvous) -> Result<JobConnection, Failure> {
    let connection = Connection::nccl(rendezvous)
        .map_err(|error| Failure::Mistake(format!("run.transport = \"nccl\": {error}")))?;
    Ok(JobConnection { connection, device: DeviceKind::Cuda })
}

/// A wrong variable is a mistake. A process that does not come is a failure of the run.
fn rendezvous_failure(error: &RendezvousError) -> Failure {
    match error {
        RendezvousError::Variable(_) | RendezvousError::EmptySecret | RendezvousError::Rank { .. } => {
            Failure::Mistake(error.to_string())
        }
        _ => Failure::Run(error.to_string()),
    }
}

impl DeviceChoice {
    /// The choice of a configuration and its plan.
    pub fn of(source: &ConfigSource, plan: &Plan) -> Result<Self, Failure> {
        let is_auto = source.is_device_auto()?;
        Ok(if is_auto { DeviceChoice::Auto } else { DeviceChoice::Given(plan.run.device) })
    }

    /// The device, if it is already chosen.
    fn given(self) -> Option<DeviceKind> {
        match self {
            DeviceChoice::Given(device) => Some(device),
            DeviceChoice::Auto => None,
        }
    }

    fn may_use_gpus(self) -> bool {
        self.given().map_or_else(|| host::gpus() > 0, |device| device == DeviceKind::Cuda)
    }

    /// The device of ranks that are threads. They share the first GPU, so that only one rank has a GPU of its own.
    fn on_threads(self, ranks: usize) -> DeviceKind {
        let here = || if ranks == 1 && host::gpus() > 0 { DeviceKind::Cuda } else { DeviceKind::Cpu };
        self.given().unwrap_or_else(here)
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
        Some(launched) => Err(Failure::Mistake(format!(
            "{command} runs all ranks as threads of one process, and {} processes were started; start one",
            launched.size
        ))),
    }
}

/// What a process brings to the agreement.
#[derive(Serialize, Deserialize)]
struct Readiness {
    host: String,
    version: String,
    /// The whole configuration, or the exit code and the message of a failure.
    config: Result<String, (u8, String)>,
}

/// Compares what all processes have prepared. Succeeds only if all are ready, with the same version and configuration, and if
/// there are as many as the plan has ranks. Otherwise the process of rank 0 reports what is wrong, and all end.
pub fn agree<T>(
    connection: Connection,
    prepared: Result<T, Failure>,
    plan: impl Fn(&T) -> &Plan,
) -> Result<T, Failure> {
    let ranks = prepared.as_ref().ok().map(|prepared| plan(prepared).mesh.ranks());
    agree_for(connection, prepared, plan, ranks)
}

/// The same for any number of processes, if `ranks` is `None`.
pub fn agree_for<T>(
    connection: Connection,
    prepared: Result<T, Failure>,
    plan: impl Fn(&T) -> &Plan,
    ranks: Option<usize>,
) -> Result<T, Failure> {
    let Some(world) = world(connection) else { return prepared };
    let config = match &prepared {
        Ok(prepared) => Ok(plan(prepared).to_toml()),
        Err(failure) => Err((failure.code(), failure.to_string())),
    };
    let mine = Readiness { host: world.host().unwrap_or_default(), version: VERSION.to_owned(), config };
    let all: Option<Vec<Readiness>> = gather(&*world, &mine)?;
    let problem = all.map(|all| problem(&all, ranks));
    match broadcast(&*world, problem)? {
        None => prepared,
        Some(problem) => Err(ended(connection, problem)),
    }
}

/// Success, or the exit code and the message of a failure.
type Outcome = Result<(), (u8, String)>;

/// Compares whether all processes have succeeded. If not, the process of rank 0 reports the first failure, and all end.
pub fn agree_on(connection: Connection, result: Result<(), Failure>) -> Result<(), Failure> {
    let Some(world) = world(connection) else { return result };
    let mine: Outcome = result.map_err(|failure| (failure.code(), failure.to_string()));
    let named = (world.host().unwrap_or_default(), mine);
    let all: Option<Vec<(String, Outcome)>> = gather(&*world, &named)?;
    let problem = all.map(|all| {
        let failed =
            all.into_iter().enumerate().find_map(|(rank, (host, result))| Some((rank, host, result.err()?)));
        failed.map(|(rank, host, (code, message))| (code, format!("rank {rank} on {host}: {message}")))
    });
    broadcast(&*world, problem)?.map_or(Ok(()), |problem| Err(ended(connection, problem)))
}

/// Gives every process what the process of rank 0 made, or ends all of them if it failed to.
pub fn share<T: Serialize + DeserializeOwned>(
    connection: Connection,
    made: Option<Result<T, Failure>>,
) -> Result<T, Failure> {
    let Some(world) = world(connection) else { return made.expect("the only process has rank 0") };
    let (made, failure) = match made {
        Some(Ok(made)) => (Some(Ok(made)), None),
        Some(Err(failure)) => (Some(Err(failure.code())), Some(failure)),
        None => (None, None),
    };
    let made: Result<T, u8> = broadcast(&*world, made)?;
    made.map_err(|code| match failure {
        Some(failure) => Failure::Agreed(Box::new(failure)),
        None => Failure::ReportedElsewhere(code),
    })
}

/// All processes that the launcher started, if there are several.
fn world(connection: Connection) -> Option<Arc<dyn World>> {
    connection.processes().map(|processes| connection.world(WorldOptions::for_exchange(processes)))
}

fn gather<T: Serialize + DeserializeOwned>(world: &dyn World, mine: &T) -> Result<Option<Vec<T>>, Failure> {
    let bytes = encode(mine);
    let all = world.gather(bytes)?;
    let decode = |bytes: Vec<u8>| {
        postcard::from_bytes(&bytes)
            .map_err(|error| Failure::Run(format!("a process of another version has joined: {error}")))
    };
    all.map(|all| all.into_iter().map(decode).collect()).transpose()
}

/// Gives every process the value of the process of rank 0. The others pass `None`.
fn broadcast<T: Serialize + DeserializeOwned>(world: &dyn World, value: Option<T>) -> Result<T, Failure> {
    let bytes = value.map_or(Vec::new(), |value| encode(&value));
    let bytes = world.broadcast(bytes)?;
    postcard::from_bytes(&bytes)
        .map_err(|error| Failure::Run(format!("rank 0 is a process of another version: {error}")))
}

/// A message as bytes, in the format of everything that processes send to each other.
fn encode(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).expect("messages have lengths that are known")
}

/// Why the processes cannot begin together: an exit code and a message.
fn problem(all: &[Readiness], ranks: Option<usize>) -> Option<(u8, String)> {
    let name = |rank: usize| format!("rank {rank} on {}", all[rank].host);
    if let Some(rank) = (0..all.len()).find(|&rank| all[rank].version != all[0].version) {
        let (other, first) = (&all[rank].version, &all[0].version);
        return Some((2, format!("{} runs kintsugi {other}, and rank 0 runs kintsugi {first}", name(rank))));
    }
    let failures: Vec<_> =
        (0..all.len()).filter_map(|rank| Some((rank, all[rank].config.as_ref().err()?))).collect();
    if let Some((rank, (code, message))) = failures.first() {
        // A mistake that all processes find is the user's. One that only some find is about their machines.
        let everywhere =
            failures.len() == all.len() && failures.iter().all(|(_, (_, other))| other == message);
        let message = if everywhere { message.clone() } else { format!("{}: {message}", name(*rank)) };
        return Some((*code, message));
    }
    let config = |rank: usize| all[rank].config.as_deref().unwrap_or_default();
    if let Some(rank) = (0..all.len()).find(|&rank| config(rank) != config(0)) {
        let difference = first_difference(config(rank), config(0));
        return Some((2, format!("{} has another configuration than rank 0: {difference}", name(rank))));
    }
    let ranks = ranks.filter(|&ranks| ranks != all.len())?;
    Some((
        2,
        format!(
            "the configuration has {ranks} ranks (parallel.tp × pp × dp), and {} processes were started: start {ranks}, as \
             with kintsugi launch --ranks {ranks}",
            all.len()
        ),
    ))
}

/// The first key in which two configurations differ, with both values.
fn first_difference(one: &str, other: &str) -> String {
    let (one, other) = (values(one), values(other));
    let keys = one.keys().chain(other.keys());
    let Some(key) = keys.filter(|key| one.get(*key) != other.get(*key)).min() else {
        return "their text differs".to_owned();
    };
    let value = |values: &BTreeMap<String, String>| {
        values.get(key).map_or_else(|| format!("no {key}"), |value| format!("{key} = {value}"))
    };
    format!("it has {}, and rank 0 has {}", value(&one), value(&other))
}

/// The values of a configuration by their keys, as in `optimizer.lr`.
fn values(config: &str) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    for (table, contents) in config.parse::<toml::Table>().unwrap_or_default() {
        match contents {
            toml::Value::Table(keys) => {
                values.extend(
                    keys.into_iter().map(|(key, value)| (format!("{table}.{key}"), value.to_string())),
                );
            }
            value => drop(values.insert(table, value.to_string())),
        }
    }
    values
}

fn ended(connection: Connection, (code, message): (u8, String)) -> Failure {
    if !connection.is_first() {
        return Failure::ReportedElsewhere(code);
    }
    let failure = if code == 2 { Failure::Mistake(message) } else { Failure::Run(message) };
    Failure::Agreed(Box::new(failure))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(host: &str, config: &str) -> Readiness {
        Readiness { host: host.into(), version: "1".into(), config: Ok(config.into()) }
    }

    fn broken(host: &str, message: &str) -> Readiness {
        Readiness { host: host.into(), version: "1".into(), config: Err((2, message.into())) }
    }

    #[test]
    fn equal_processes_begin() {
        assert_eq!(problem(&[ready("a", "x"), ready("b", "x")], Some(2)), None);
    }

    #[test]
    fn a_mistake_of_all_is_told_once_and_one_of_some_with_their_name() {
        let all = [broken("a", "no"), broken("b", "no")];
        assert_eq!(problem(&all, None), Some((2, "no".into())));
        let one = [ready("a", "x"), broken("b", "no file")];
        assert_eq!(problem(&one, Some(2)), Some((2, "rank 1 on b: no file".into())));
    }

    #[test]
    fn another_configuration_or_version_is_refused_by_name() {
        let config = |lr: &str| format!("[model]\nlayers = 2\n\n[optimizer]\nlr = {lr}\n");
        let all = [ready("a", &config("0.1")), ready("a", &config("0.1")), ready("b", &config("0.2"))];
        let (_, message) = problem(&all, Some(3)).expect("they differ");
        assert_eq!(
            message,
            "rank 2 on b has another configuration than rank 0: it has optimizer.lr = 0.2, and rank 0 has optimizer.lr = 0.1"
        );
        let resumed = format!("{}[run]\nresume = true\nsteps = 3\n", config("0.1"));
        let begun = format!("{}[run]\nsteps = 3\n", config("0.1"));
        let (_, message) =
            problem(&[ready("a", &begun), ready("b", &resumed)], Some(2)).expect("they differ");
        assert!(message.ends_with("it has run.resume = true, and rank 0 has no run.resume"), "{message}");
        let newer = Readiness { version: "2".into(), ..ready("b", "x") };
        let (_, message) = problem(&[ready("a", "x"), newer], Some(2)).expect("they differ");
        assert_eq!(message, "rank 1 on b runs kintsugi 2, and rank 0 runs kintsugi 1");
    }

    #[test]
    fn there_are_as_many_processes_as_ranks() {
        let (code, message) = problem(&[ready("a", "x"), ready("a", "x")], Some(8)).expect("too few");
        assert_eq!(code, 2);
        assert!(message.contains("8 ranks") && message.contains("2 processes"), "{message}");
    }
}

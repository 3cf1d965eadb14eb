//! How the processes of a job agree before they begin: on one version, one configuration, and who reports what is wrong.

use std::collections::BTreeMap;
use std::sync::Arc;

use kintsugi_comm::{Connection, World, WorldOptions};
use kintsugi_plan::Plan;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::VERSION;
use crate::failure::{ErrorContext, Failure};

/// What a process tells the others before they begin.
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

/// Brings what every process has to the process of rank 0, in order of rank. Other processes get `None`.
pub fn collect<T: Serialize + DeserializeOwned>(
    connection: Connection,
    mine: &T,
) -> Result<Option<Vec<T>>, Failure> {
    let world = world(connection).expect("one process has nobody to collect from");
    gather(&*world, mine)
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
        postcard::from_bytes(&bytes).map_err(|error| {
            Failure::run(ErrorContext::new("a process of another version has joined", error))
        })
    };
    all.map(|all| all.into_iter().map(decode).collect()).transpose()
}

/// Gives every process the value of the process of rank 0. The others pass `None`.
fn broadcast<T: Serialize + DeserializeOwned>(world: &dyn World, value: Option<T>) -> Result<T, Failure> {
    let bytes = value.map_or(Vec::new(), |value| encode(&value));
    let bytes = world.broadcast(bytes)?;
    postcard::from_bytes(&bytes)
        .map_err(|error| Failure::run(ErrorContext::new("rank 0 is a process of another version", error)))
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
    let failure = if code == 2 { Failure::mistake(message) } else { Failure::run(message) };
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
    fn a_mistake_of_all_processes_is_printed_once_and_that_of_one_names_it() {
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

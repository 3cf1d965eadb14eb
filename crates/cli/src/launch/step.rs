//! Ranks as a job step of Slurm: `launch --mpirun srun` inside an allocation. Every attempt is a step of its own, so MPI starts anew, and
//! it is placed on nodes that are not known to have failed.

use std::path::Path;
use std::process::{Command, Stdio};

use kintsugi_run::Verdict;

use super::slurm::plugin_of_mpi;
use crate::failure::{ErrorContext, Failure};
use crate::output;

/// The options of srun for ranks on `nodes` nodes, or on all of the allocation. `out` is the folder of a run that is started again if a
/// rank fails.
pub fn options(nodes: Option<u32>, ranks: u32, out: Option<&Path>) -> Result<Vec<String>, Failure> {
    if std::env::var_os("SLURM_JOB_ID").is_none() {
        return Err(Failure::mistake(
            "--mpirun srun starts ranks in an allocation of Slurm, and this is none; begin with salloc or sbatch, or use --slurm",
        ));
    }
    let mut options = vec![
        format!("--mpi={}", plugin_of_mpi()?),
        // Consecutive ranks share a node: tp is the innermost axis of the mesh.
        "--distribution=block".to_owned(),
        // This command runs beside the step, and outlives it.
        "--overlap".to_owned(),
        "--no-kill".to_owned(),
        // Ranks that outlive another say which one has failed, and end by themselves.
        "--kill-on-bad-exit=0".to_owned(),
        "--wait=60".to_owned(),
    ];
    let Some(nodes) = nodes else { return Ok(options) };
    options.push(format!("--nodes={nodes}"));
    options.push(format!("--ntasks-per-node={}", ranks / nodes));
    let all = answer("scontrol", &["show", "hostnames"])?;
    let all: Vec<&str> = all.lines().collect();
    let states = node_states(&all)?;
    let accused = out.map_or_else(Vec::new, |out| hosts_of_culprits(&Verdict::read_all(out)));
    let excluded = excluded(&all, &states, &accused, nodes as usize)?;
    if !excluded.is_empty() {
        output::stderr(&format!("note     without node {}", excluded.join(", ")));
        options.push(format!("--exclude={}", excluded.join(",")));
    }
    Ok(options)
}

/// The step of Slurm with agents of the nodes of the allocation that have none: `None` if there is no such node.
pub fn agents(connected: &[String]) -> Result<Option<Command>, Failure> {
    let all = answer("scontrol", &["show", "hostnames"])?;
    let all: Vec<&str> = all.lines().collect();
    let states = node_states(&all)?;
    let missing: Vec<String> = all
        .iter()
        .filter(|&&node| !is_down(&states, node) && connected.iter().all(|one| one != node))
        .map(|&node| node.to_owned())
        .collect();
    if missing.is_empty() {
        return Ok(None);
    }
    let mut command = Command::new("srun");
    // They share the resources of the ranks, and one of them may be lost.
    command.args(["--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]);
    command.args(["--input=all", "--ntasks-per-node=1"]);
    command.args([format!("--ntasks={}", missing.len()), format!("--nodes={}", missing.len())]);
    command.arg(format!("--nodelist={}", missing.join(",")));
    let program = std::env::current_exe()
        .map_err(|error| Failure::run(ErrorContext::new("cannot find kintsugi", error)))?;
    command.arg(program);
    Ok(Some(command))
}

/// How many nodes of the allocation are neither down nor silent.
pub fn nodes_left() -> Result<u32, Failure> {
    let all = answer("scontrol", &["show", "hostnames"])?;
    let all: Vec<&str> = all.lines().collect();
    let states = node_states(&all)?;
    Ok(all.iter().filter(|node| !is_down(&states, node)).count() as u32)
}

/// What Slurm says of nodes.
fn node_states(all: &[&str]) -> Result<String, Failure> {
    answer("sinfo", &["--noheader", "--Node", "--format=%N %T", "--nodes", &all.join(",")])
}

/// Whether Slurm says that a node is down or does not answer. A node that is drained keeps its jobs.
fn is_down(states: &str, node: &str) -> bool {
    let mut states = states.lines().filter_map(|line| line.split_once(' '));
    let state = states.find(|(name, _)| *name == node).map_or("", |(_, state)| state);
    state.ends_with('*') || ["down", "fail", "unknown", "error"].iter().any(|bad| state.starts_with(bad))
}

/// The nodes of an allocation that are not used: those that Slurm says are down or do not answer, and, as long as enough are left, those
/// of ranks that have failed, the latest first.
fn excluded(all: &[&str], states: &str, accused: &[String], needed: usize) -> Result<Vec<String>, Failure> {
    let down = all.iter().filter(|&&node| is_down(states, node));
    let mut excluded: Vec<String> = down.map(|&node| node.to_owned()).collect();
    let left = all.len() - excluded.len();
    if left < needed {
        return Err(Failure::run(format!(
            "{needed} nodes are needed, and {left} of the {} of the allocation are left: node {} is down",
            all.len(),
            excluded.join(", ")
        )));
    }
    for node in accused {
        if all.len() - excluded.len() > needed && all.contains(&node.as_str()) && !excluded.contains(node) {
            excluded.push(node.clone());
        }
    }
    Ok(excluded)
}

/// The hosts of the ranks that were the cause of failures, the latest first.
fn hosts_of_culprits(verdicts: &[Verdict]) -> Vec<String> {
    let host = |verdict: &Verdict| {
        let last = verdict.ranks.iter().find(|last| Some(last.rank) == verdict.culprit)?;
        // As the flight recorder says it: `host/node, CPU`.
        let (place, _) = last.place.split_once(',')?;
        Some(place.rsplit('/').next().unwrap_or(place).to_owned())
    };
    verdicts.iter().rev().filter_map(host).collect()
}

/// What a program of Slurm prints.
fn answer(program: &str, arguments: &[&str]) -> Result<String, Failure> {
    let failed = |reason: String| Failure::run(ErrorContext::new(format!("cannot ask {program}"), reason));
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use kintsugi_run::LastOps;

    use super::*;

    #[test]
    fn nodes_that_are_down_or_whose_ranks_have_failed_are_left_out() {
        let all = ["n1", "n2", "n3", "n4"];
        let states = "n1 allocated\nn2 down*\nn3 allocated\nn4 draining\n";
        let accused = ["n3".to_owned(), "n1".to_owned(), "elsewhere".to_owned()];
        let names = |needed| excluded(&all, states, &accused, needed).map_err(|failure| failure.to_string());
        assert_eq!(names(3), Ok(vec!["n2".to_owned()]));
        assert_eq!(names(2), Ok(vec!["n2".to_owned(), "n3".to_owned()]));
        assert_eq!(names(1), Ok(vec!["n2".to_owned(), "n3".to_owned(), "n1".to_owned()]));
        let few = "4 nodes are needed, and 3 of the 4 of the allocation are left: node n2 is down";
        assert_eq!(names(4), Err(few.to_owned()));
    }

    #[test]
    fn the_host_of_a_culprit_is_in_its_flight_recorder() {
        let last = |rank, place: &str| LastOps { rank, place: place.to_owned(), ..LastOps::default() };
        let verdict = |culprit, ranks| Verdict { culprit, ranks, ..Verdict::default() };
        let verdicts = [
            verdict(Some(2), vec![last(2, "vm/n2, CPU"), last(0, "vm/n1, CPU")]),
            verdict(None, vec![last(0, "n1, CPU")]),
            verdict(Some(1), vec![last(1, "n1, GPU 3")]),
        ];
        assert_eq!(hosts_of_culprits(&verdicts), ["n1", "n2"]);
    }
}

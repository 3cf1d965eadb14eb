//! `tune --executor srun`: trials as steps of a Slurm allocation, side by side on disjoint nodes.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use kintsugi_tune::trials::{NodePool, Processes};

use super::Arguments;
use super::candidates::Candidates;
use crate::failure::Failure;
use crate::launch::plugin_of_mpi;

/// The same with steps of srun on the nodes of the allocation. As many trials run at a time as the smallest of them have nodes.
pub fn with_steps(
    processes: Processes,
    arguments: &Arguments,
    candidates: &Candidates,
) -> Result<Processes, Failure> {
    if arguments.memory.is_some() {
        return Err(Failure::mistake(
            "--memory limits the processes of this machine, and those of --executor srun are on others; Slurm limits them",
        ));
    }
    let names = nodes_of_allocation()?;
    let (base, _) = arguments.config.read()?.search_base()?;
    let least = candidates.all.iter().map(|candidate| candidate.ranks).min().unwrap_or(1);
    let most = candidates.all.iter().map(|candidate| candidate.ranks).max().unwrap_or(1);
    let pool = NodePool::new(names, base.cluster.topology.per_node.unwrap_or(most));
    let slots = pool.trials_of(least);
    if slots == 0 {
        let nodes = pool.nodes_for(least);
        return Err(Failure::mistake(format!(
            "a trial of {least} ranks needs {nodes} nodes (cluster.per_node), and the allocation has fewer; ask for more nodes"
        )));
    }
    // Without --exact: a step has all cores of its nodes, as the job of `launch --slurm` has.
    let options = ["--nodes={nodes}", "--ntasks={ranks}", "--nodelist={nodelist}", "--distribution=block"];
    let mut launcher = options.map(str::to_owned).to_vec();
    launcher.push("--kill-on-bad-exit=0".to_owned());
    // srun reads the variable itself.
    if std::env::var_os("SLURM_MPI_TYPE").is_none() {
        launcher.push(format!("--mpi={}", plugin_of_mpi()?));
    }
    launcher.push(processes.program.display().to_string());
    Ok(Processes {
        program: PathBuf::from("srun"),
        launcher,
        nodes: Some(pool),
        slots,
        memory: None,
        ..processes
    })
}

/// The names of the nodes that Slurm has given to this job.
fn nodes_of_allocation() -> Result<Vec<String>, Failure> {
    let Ok(list) = std::env::var("SLURM_JOB_NODELIST") else {
        return Err(Failure::mistake(
            "--executor srun needs an allocation of Slurm: run it by salloc or in a job",
        ));
    };
    let answer = Command::new("scontrol").args(["show", "hostnames", &list]).stdin(Stdio::null()).output();
    let names = answer.ok().filter(|answer| answer.status.success()).map(|answer| {
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    });
    names.filter(|names| !names.is_empty()).ok_or_else(|| {
        Failure::run(format!("scontrol does not name the nodes of SLURM_JOB_NODELIST = {list}"))
    })
}

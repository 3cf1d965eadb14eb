//! `kintsugi launch --slurm`: writes a batch script for a plan and submits it.

mod script;
mod site;
mod submit;

use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use clap::Args;
use kintsugi_checkpoint::CheckpointFolder;
use kintsugi_comm::mpi::{Abi, Mpi};
use kintsugi_placement::compressed;
use kintsugi_plan::{Plan, Resume, Transport};

use crate::failure::{ErrorContext, Failure};
use crate::output;
use crate::plan::place;
use crate::status::{job_name, whole_path};
use crate::train;
use script::{Hosts, Job};
use site::Site;

/// The file in a run's folder with the nodes of its job.
const PLACEMENT: &str = "placement.toml";

/// The arguments of jobs.
#[derive(Args)]
pub struct SlurmArguments {
    /// Writes a job for the plan and submits it with sbatch, for train; --print shows the script only
    ///
    /// Ranks, nodes and the folder of the log follow from the configuration. Ranks per node are `cluster.per_node`; without
    /// it, all ranks are on one node, or on --nodes.
    #[arg(long, conflicts_with_all = ["ranks", "no_mpi", "mpirun", "restarts"])]
    slurm: bool,
    /// What jobs need on this cluster: cpu, nvidia, frontier, or a file like those
    #[arg(long, value_name = "NAME|FILE", requires = "slurm")]
    site: Option<String>,
    /// The account of the job, instead of the site's
    #[arg(long, value_name = "NAME", requires = "slurm")]
    account: Option<String>,
    /// The partition of the job, instead of the site's
    #[arg(long, value_name = "NAME", requires = "slurm")]
    partition: Option<String>,
    /// The time limit of the job, instead of the site's, as in 2:00:00
    #[arg(long, value_name = "TIME", requires = "slurm")]
    time: Option<String>,
    /// Submits N jobs, of which each continues the run of the one before; when the run has finished, the rest is cancelled
    #[arg(long, value_name = "N", requires = "slurm", value_parser = clap::value_parser!(u32).range(1..=1000))]
    chain: Option<u32>,
    /// Chooses nodes of this table and the order of ranks on them, as kintsugi plan --place does, and asks for these nodes
    #[arg(long, value_name = "FILE", requires = "slurm")]
    place: Option<PathBuf>,
}

impl SlurmArguments {
    /// Whether a job is asked for.
    pub fn is_given(&self) -> bool {
        self.slurm
    }
}

/// Submits the job of a training, or prints its script.
pub fn run(
    arguments: &SlurmArguments,
    nodes: Option<u32>,
    print: bool,
    train: &train::Arguments,
    command: &[OsString],
) -> Result<(), Failure> {
    let mut plan = train.plan()?;
    check(&plan)?;
    if let Some(table) = &arguments.place {
        plan = place::placed(&plan, table)?.plan;
    }
    let site = Site::find(arguments.site.as_deref(), &plan)?.with(&[
        ("account", arguments.account.as_ref()),
        ("partition", arguments.partition.as_ref()),
        ("time", arguments.time.as_ref()),
    ])?;
    let nodes = nodes_of(plan.mesh.ranks(), plan.cluster.topology.per_node, nodes)?;
    let here = |error| Failure::run(ErrorContext::new("cannot find the folder of the job", error));
    let (working, program) = (std::env::current_dir().map_err(here)?, std::env::current_exe().map_err(here)?);
    let out = whole_path(&plan.run.out).map_err(here)?;
    let mut words = words(command, [&working, &out, &program])?;
    let placement = plan.cluster.placement.as_ref();
    let file = out.join(PLACEMENT);
    if placement.is_some() {
        words.extend(["--placement".to_owned(), file.display().to_string()]);
    }
    let resumed = resumed(&words);
    let continues = words == resumed || plan.run.resume == Resume::Newest;
    if !continues && !CheckpointFolder::of_run(&out).list()?.is_empty() {
        return Err(Failure::mistake(format!(
            "{} has checkpoints of an earlier run; add --resume to continue it, or set another run.out",
            out.display()
        )));
    }
    let mpi = match &site.mpi {
        Some(mpi) => mpi.clone(),
        None => plugin_of_mpi()?.to_owned(),
    };
    let chain = arguments.chain.unwrap_or(1);
    let job = Job {
        site: &site,
        mpi: &mpi,
        mesh: plan.mesh,
        nodes,
        hosts: placement
            .map(|placement| Hosts { list: compressed(&placement.nodes), file: place::hosts_path(&file) }),
        name: &job_name(&out),
        program: &program,
        working: &working,
        out: &out,
        chain,
        command: &words,
        resumed: &resumed,
    };
    let script = job.script();
    if print {
        return output::stdout(&script);
    }
    // Slurm writes the log there, and does not create the folder.
    let created = DirBuilder::new().recursive(true).mode(0o700).create(&out);
    created.map_err(|error| Failure::file("create", &out, error))?;
    if let Some(placement) = placement {
        place::write(&plan, placement, &file)?;
    }
    let jobs = submit::submit(&script, chain, &site)?;
    let list = jobs.join(", ");
    let noun = if jobs.len() == 1 { "job" } else { "jobs" };
    output::stdout(&format!(
        "submitted {noun} {list} for {}: see kintsugi status {}\n",
        out.display(),
        plan.run.out.display()
    ))
}

/// Refuses plans whose ranks are not processes, or that a later job could not continue.
fn check(plan: &Plan) -> Result<(), Failure> {
    if plan.run.transport == Transport::Threads {
        return Err(Failure::mistake(
            "run.transport = \"threads\" runs all ranks in one process, and --slurm starts a process for each; leave \
             run.transport out",
        ));
    }
    if plan.run.keep == 0 {
        return Err(Failure::mistake(
            "--slurm needs checkpoints, by which a requeued job continues, and run.keep = 0 saves none; set it to 1 or more",
        ));
    }
    Ok(())
}

/// The number of nodes that the ranks fill evenly.
fn nodes_of(ranks: usize, per_node: Option<usize>, nodes: Option<u32>) -> Result<usize, Failure> {
    let most = per_node.unwrap_or(ranks);
    match nodes.map(|nodes| nodes as usize) {
        Some(nodes) if !ranks.is_multiple_of(nodes) => Err(Failure::mistake(format!(
            "the {ranks} ranks of the configuration cannot be divided equally over --nodes {nodes}"
        ))),
        Some(nodes) if per_node.is_some() && ranks / nodes > most => Err(Failure::mistake(format!(
            "--nodes {nodes} puts {} ranks on a node, and cluster.per_node = {most} is the most",
            ranks / nodes
        ))),
        Some(nodes) => Ok(nodes),
        None if ranks <= most => Ok(1),
        None if ranks.is_multiple_of(most) => Ok(ranks / most),
        None => Err(Failure::mistake(format!(
            "the {ranks} ranks of the configuration (parallel.tp × pp × dp) do not fill nodes of cluster.per_node = {most}; \
             change one of these, or give --nodes"
        ))),
    }
}

/// The words of the command. They and the folders stand in the script: in its command, and the folders in options of sbatch, where
/// a backslash has a meaning of its own.
fn words(command: &[OsString], folders: [&Path; 3]) -> Result<Vec<String>, Failure> {
    let refused = |word: &OsStr, what: &str| {
        let word = word.to_string_lossy();
        let word = word.escape_debug();
        Failure::mistake(format!("\"{word}\" cannot stand in a batch script: it {what}"))
    };
    let text = |word: &OsStr| match word.to_str() {
        Some(text) if !text.contains(char::is_control) => Ok(text.to_owned()),
        _ => Err(refused(word, "has a control character or is not UTF-8")),
    };
    for folder in folders {
        if text(folder.as_os_str())?.contains('\\') {
            return Err(refused(folder.as_os_str(), "has a backslash"));
        }
    }
    command.iter().map(|word| text(word)).collect()
}

/// A command that resumes from the newest checkpoint of its run.
fn resumed(command: &[String]) -> Vec<String> {
    if command.iter().any(|word| word == "--resume") {
        return command.to_vec();
    }
    let others = command.iter().filter(|word| !word.starts_with("--resume=")).cloned();
    others.chain(["--resume".to_owned()]).collect()
}

/// The plugin of srun for the MPI that ranks would load on this machine.
pub fn plugin_of_mpi() -> Result<&'static str, Failure> {
    match Mpi::find() {
        Ok((_, Abi::Mpich, _)) => Ok("pmi2"),
        Ok((_, Abi::OpenMpi | Abi::Standard, _)) => Ok("pmix"),
        Err(error) => Err(Failure::mistake(format!(
            "no MPI is found on this machine to choose srun --mpi by ({error}); set mpi in a file and name it with --site"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use kintsugi_plan::config::ConfigSource;

    use super::*;

    /// The script of a run of 4 ranks on 2 nodes, or as the cluster's preset says.
    fn script(site: &str, sets: &[&str], chain: u32, command: &str) -> String {
        let plan = ConfigSource::demo().sets(sets).plan().expect("a plan");
        let site = Site::find(Some(site), &plan).expect("a site");
        let nodes = nodes_of(plan.mesh.ranks(), plan.cluster.topology.per_node, None).expect("full nodes");
        let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let job = Job {
            site: &site,
            mpi: site.mpi.as_deref().unwrap_or("pmix"),
            mesh: plan.mesh,
            nodes,
            hosts: None,
            name: "kintsugi-a-0123456789",
            program: &PathBuf::from("/opt/kintsugi"),
            working: &PathBuf::from("/home/me/my runs"),
            out: &PathBuf::from("/home/me/my runs/100%"),
            chain,
            command: &command,
            resumed: &resumed(&command),
        };
        job.script()
    }

    #[test]
    fn scripts() {
        let two_nodes = ["parallel.dp=1", "cluster.per_node=2"];
        insta::assert_snapshot!("cpu", script("cpu", &two_nodes, 1, "train run.toml"));
        insta::assert_snapshot!(
            "chain",
            script("cpu", &two_nodes, 3, "train it's.toml --set run.log=[] --resume=other")
        );
        let frontier = [
            "cluster.preset=frontier",
            "parallel.tp=8",
            "model.heads=8",
            "model.hidden=256",
            "parallel.dp=4",
        ];
        insta::assert_snapshot!("frontier", script("frontier", &frontier, 1, "train --resume"));
        let nvidia = ["cluster.preset=h100", "parallel.dp=4"];
        insta::assert_snapshot!("nvidia", script("nvidia", &nvidia, 1, "train --resume"));
    }

    #[test]
    fn ranks_fill_their_nodes() {
        let nodes =
            |ranks, per_node, nodes| nodes_of(ranks, per_node, nodes).map_err(|failure| failure.to_string());
        assert_eq!(nodes(16, Some(8), None), Ok(2));
        assert_eq!(nodes(4, Some(8), None), Ok(1));
        assert_eq!(nodes(4, None, None), Ok(1));
        assert_eq!(nodes(4, None, Some(2)), Ok(2));
        assert!(nodes(12, Some(8), None).unwrap_err().contains("do not fill nodes of cluster.per_node = 8"));
        assert!(
            nodes(12, Some(8), Some(5)).unwrap_err().contains("cannot be divided equally over --nodes 5")
        );
        assert!(nodes(32, Some(8), Some(2)).unwrap_err().contains("puts 16 ranks on a node"));
    }
}

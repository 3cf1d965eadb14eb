//! Whether this process was started by an MPI launcher, before MPI itself is asked.

use std::env;
use std::ffi::OsString;

use super::library::Abi;

/// The launcher's view of this process, from the environment that it set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchedProcess {
    /// This process's rank.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// The family of the launcher, if it belongs to one.
    pub(super) abi: Option<Abi>,
    /// Whether srun started the tasks without the interface by which MPI finds the others (`srun --mpi=none`).
    pub(super) lacks_pmi: bool,
}

/// The variables of rank and size that launchers set, most specific first.
const VARIABLES: [(&str, &str, Option<Abi>); 6] = [
    // kintsugi launch --no-mpi.
    ("KINTSUGI_RANK", "KINTSUGI_RANKS", None),
    // Open MPI's mpirun.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", Some(Abi::OpenMpi)),
    // MVAPICH's mpirun_rsh.
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", Some(Abi::Mpich)),
    // Hydra (MPICH's and Intel's mpirun), and srun --mpi=pmi2.
    ("PMI_RANK", "PMI_SIZE", Some(Abi::Mpich)),
    // srun --mpi=pmix, which Open MPI uses.
    ("PMIX_RANK", "SLURM_NTASKS", Some(Abi::OpenMpi)),
    // srun with any other plugin, as cray_shasta.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None),
];

/// How the variables of process managers begin: those of PMI in all versions, Open MPI's, and HPE's PALS.
const PROCESS_MANAGERS: [&str; 3] = ["PMI", "OMPI_", "PALS_"];

/// How a launcher started this process, or `None` if it was started by itself.
pub fn launched() -> Option<LaunchedProcess> {
    let is_managed = |(name, _): (OsString, OsString)| {
        let name = name.to_string_lossy();
        PROCESS_MANAGERS.iter().any(|begin| name.starts_with(begin))
    };
    launched_by(|name| env::var(name).ok(), env::vars_os().any(is_managed))
}

fn launched_by(variable: impl Fn(&str) -> Option<String>, is_managed: bool) -> Option<LaunchedProcess> {
    let number = |name: &str| variable(name).and_then(|value| value.parse().ok());
    VARIABLES.into_iter().find_map(|(rank, size, abi)| {
        let lacks_pmi = rank == "SLURM_PROCID" && !is_managed;
        Some(LaunchedProcess { rank: number(rank)?, size: number(size)?, abi, lacks_pmi })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Option<(usize, usize, Option<Abi>)> {
        let value = |name: &str| {
            variables.iter().find(|(found, _)| *found == name).map(|(_, value)| (*value).to_owned())
        };
        launched_by(value, true).map(|launched| (launched.rank, launched.size, launched.abi))
    }

    #[test]
    fn tasks_of_srun_without_a_process_manager_are_recognised() {
        let lacks_pmi = |names: [&str; 2], is_managed: bool| {
            let value = |name: &str| names.contains(&name).then(|| "2".to_owned());
            launched_by(value, is_managed).map(|launched| launched.lacks_pmi)
        };
        assert_eq!(lacks_pmi(["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"], false), Some(true));
        assert_eq!(lacks_pmi(["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"], true), Some(false));
        assert_eq!(lacks_pmi(["KINTSUGI_RANK", "KINTSUGI_RANKS"], false), Some(false));
    }

    #[test]
    fn every_launcher_is_recognised() {
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[("KINTSUGI_RANK", "1"), ("KINTSUGI_RANKS", "3")]), Some((1, 3, None)));
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "8"), ("PMIX_RANK", "3")];
        assert_eq!(found(&open_mpi), Some((3, 8, Some(Abi::OpenMpi))));
        assert_eq!(found(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]), Some((1, 2, Some(Abi::Mpich))));
        let pmix = [("PMIX_RANK", "0"), ("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")];
        assert_eq!(found(&pmix), Some((0, 4, Some(Abi::OpenMpi))));
        let other = [("SLURM_PROCID", "5"), ("SLURM_STEP_NUM_TASKS", "6")];
        assert_eq!(found(&other), Some((5, 6, None)));
    }

    #[test]
    fn a_batch_script_is_no_task_of_a_step() {
        // sbatch sets SLURM_PROCID and SLURM_NTASKS for the script itself, which is one process.
        assert_eq!(found(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), None);
    }
}

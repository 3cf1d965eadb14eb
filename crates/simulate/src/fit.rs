//! Whether a plan fits into memory, with the largest consumers if it does not.

use std::fmt;

use kintsugi_plan::Plan;
use kintsugi_rank::RankMemory;
use kintsugi_spec::units;

use crate::Prediction;

/// Why a plan does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// First rank that does not fit.
    pub rank: usize,
    /// The memory that it needs.
    pub memory: RankMemory,
    /// The memory that is available.
    pub available: u64,
    /// The owner of that memory: a device, or this machine for all ranks together.
    pub holder: String,
    /// How many ranks share it.
    pub sharing: usize,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut categories = self.memory.categories();
        categories.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        let parts: Vec<String> = categories
            .into_iter()
            .filter(|&(_, bytes)| bytes > 0)
            .map(|(name, bytes)| format!("{name} {}", units::bytes(bytes)))
            .collect();
        let need = units::bytes(self.memory.reserved + self.memory.transport);
        write!(f, "rank {} needs {need} ({})", self.rank, parts.join(", "))?;
        if self.sharing > 1 {
            write!(f, " and all {} ranks together must fit into", self.sharing)?;
        } else {
            f.write_str(" but has")?;
        }
        write!(f, " {} ({})", units::bytes(self.available), self.holder)
    }
}

/// Checks every rank against its device and, if ranks share this machine's memory, all of them against `host_memory`.
pub fn check_fit(plan: &Plan, prediction: &Prediction, host_memory: Option<u64>) -> Result<(), Misfit> {
    check_memory(plan, &prediction.stages, host_memory)
}

/// The same, from the memory of one rank of each stage.
pub fn check_memory(plan: &Plan, stages: &[RankMemory], host_memory: Option<u64>) -> Result<(), Misfit> {
    let ranks_per_stage = plan.mesh.dp * plan.mesh.tp;
    let misfit = |stage: usize, available, holder: String, sharing| Misfit {
        rank: stage * ranks_per_stage,
        memory: stages[stage],
        available,
        holder,
        sharing,
    };
    if let Some(available) = plan.cluster.device.memory {
        let too_large = stages.iter().position(|memory| memory.reserved + memory.transport > available);
        if let Some(stage) = too_large {
            return Err(misfit(stage, available, plan.cluster.device.name.clone(), 1));
        }
    }
    if let Some(available) = host_memory {
        let one_of_each: u128 = stages.iter().map(|memory| u128::from(memory.reserved)).sum();
        if one_of_each * ranks_per_stage as u128 > u128::from(available) {
            let largest = (0..stages.len()).max_by_key(|&s| stages[s].reserved);
            return Err(misfit(largest.unwrap_or(0), available, "this machine".into(), plan.mesh.ranks()));
        }
    }
    Ok(())
}

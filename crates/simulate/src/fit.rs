//! Whether a plan fits into memory, with the largest consumers if it does not.

use std::fmt;

use kintsugi_plan::Plan;
use kintsugi_rank::RankMemory;
use kintsugi_spec::units;

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

impl std::error::Error for Misfit {}

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

/// Checks the memory of one rank of each stage against its device and, if ranks share this machine's memory, all of them
/// together against `host_memory`. For runs: what the device has besides is known when the run starts.
pub fn check_memory(plan: &Plan, stages: &[RankMemory], host_memory: Option<u64>) -> Result<(), Misfit> {
    let device = plan.cluster.device.memory.map(|bytes| (bytes, plan.cluster.device.name.clone()));
    check(plan, stages, device, host_memory)
}

/// The same for plans, which leave the headroom of the device free.
pub fn check_planned(plan: &Plan, stages: &[RankMemory], host_memory: Option<u64>) -> Result<(), Misfit> {
    let spec = &plan.cluster.device;
    let device = spec.memory.zip(spec.planned_memory()).map(|(all, available)| {
        let headroom = units::bytes(all - available);
        let holder = match all - available {
            0 => spec.name.clone(),
            _ => format!("{}: {} less a headroom of {headroom}", spec.name, units::bytes(all)),
        };
        (available, holder)
    });
    check(plan, stages, device, host_memory)
}

fn check(
    plan: &Plan,
    stages: &[RankMemory],
    device: Option<(u64, String)>,
    host_memory: Option<u64>,
) -> Result<(), Misfit> {
    let ranks_per_stage = plan.mesh.ranks_per_stage();
    let misfit = |stage: usize, available, holder: String, sharing| Misfit {
        rank: stage * ranks_per_stage,
        memory: stages[stage],
        available,
        holder,
        sharing,
    };
    if let Some((available, holder)) = device {
        let too_large = stages.iter().position(|memory| memory.reserved + memory.transport > available);
        if let Some(stage) = too_large {
            return Err(misfit(stage, available, holder, 1));
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

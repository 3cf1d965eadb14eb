//! A set of copies: those of the states of all ranks after one step, on the nodes that are left.

use kintsugi_plan::Plan;
use serde::{Deserialize, Serialize};

use super::CopyRecord;
use crate::RunProgress;

/// A whole set of copies that a run begins with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopySet {
    /// The progress of the run.
    pub progress: RunProgress,
    /// The copies of ranks whose nodes do not have them.
    pub passes: Vec<CopyPass>,
}

/// A copy that passes from node to node, to the rank whose states they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyPass {
    /// That rank.
    pub rank: usize,
    /// How many nodes before it, along the ring, the copy is.
    pub nodes: usize,
}

impl CopySet {
    /// The newest whole set. `found` has for every rank the copies on its node. Copies of before the last of `rollbacks` returns to a
    /// checkpoint do not count: the run has given these steps up.
    pub fn newest(plan: &Plan, found: &[Vec<CopyRecord>], rollbacks: u64) -> Option<Self> {
        let counts = |record: &&CopyRecord| record.progress.spikes.rollbacks == rollbacks;
        let of_first = found.iter().flatten().filter(counts).filter(|record| record.rank == 0);
        let mut candidates: Vec<&RunProgress> = of_first.map(|record| &record.progress).collect();
        candidates.sort_by_key(|progress| std::cmp::Reverse(progress.step));
        let (nodes, _) = plan.nodes();
        let has = |holder: usize, rank: usize, step: u64| {
            let mut copies = found[holder].iter().filter(counts);
            copies.any(|record| (record.rank, record.progress.step) == (rank, step))
        };
        candidates.into_iter().find_map(|progress| {
            let pass = |rank: usize| {
                let nodes =
                    (0..nodes).find(|&nodes| has(plan.rank_before(rank, nodes), rank, progress.step))?;
                Some(CopyPass { rank, nodes })
            };
            let all: Vec<CopyPass> = (0..plan.mesh.ranks()).map(pass).collect::<Option<_>>()?;
            let passes = all.into_iter().filter(|pass| pass.nodes > 0).collect();
            Some(CopySet { progress: progress.clone(), passes })
        })
    }
}

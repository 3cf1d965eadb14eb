//! Ranks that are threads of a CPU share its cores.
//!
//! Then nothing overlaps: a rank copies what it sends, and while one rank waits another computes. So a step takes at least
//! the work of all ranks divided by the cores, and at least the time of one stage that has all cores.

use kintsugi_plan::Plan;

use crate::Timing;

/// How the ranks of a plan share cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharing {
    /// How many times longer a rank of a stage takes than with a core of its own.
    pub slower: f64,
    /// How much longer all stages together take than what they take one after the other.
    crowded: f64,
}

impl Sharing {
    /// How ranks share cores; `None` where each has a device of its own.
    pub fn of(plan: &Plan) -> Option<Self> {
        let cores = plan.cluster.cores? as f64;
        let in_node = |ranks: usize| plan.cluster.topology.per_node.map_or(ranks, |n| n.min(ranks)) as f64;
        let (ranks, stage) = (in_node(plan.mesh.ranks()), in_node(plan.mesh.dp * plan.mesh.tp));
        if ranks <= cores {
            // The remaining cores are divided evenly, as threads of the ranks.
            return Some(Sharing { slower: 1.0 / (cores / ranks).floor(), crowded: 0.0 });
        }
        let slower = (stage / cores).max(1.0);
        Some(Sharing { slower, crowded: stage / cores / slower })
    }

    /// Extends a step to the time that the cores need for the work of all ranks, if that is longer.
    pub fn crowd(self, timing: Timing, stages: usize) -> Timing {
        let working = timing.compute_s + timing.tensor_s + timing.exposed_s.iter().sum::<f64>();
        let step_s = working * stages as f64 * self.crowded + timing.fixed_s;
        if step_s <= timing.step_s {
            return timing;
        }
        // Some rank always computes: what looked like waiting for another stage was waiting for a core.
        let each = (step_s - timing.fixed_s) / working;
        Timing {
            step_s,
            compute_s: timing.compute_s * each,
            tensor_s: timing.tensor_s * each,
            exposed_s: timing.exposed_s.map(|seconds| seconds * each),
            idle_s: 0.0,
            bubble: 0.0,
            ..timing
        }
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use crate::time;

    const MACHINE: &str = "[cluster]\ncores = 2\n[cluster.device]\npeak_fp32 = 1e11\nmemory_bandwidth = 1e10\n\
                           [cluster.links.node]\nlatency = 0\nstart = 0\nbandwidth = 1e15\n[model]\npreset = \"demo\"\n";

    fn step(tp: usize, pp: usize, dp: usize) -> f64 {
        let sets = [format!("parallel.tp={tp}"), format!("parallel.pp={pp}"), format!("parallel.dp={dp}")];
        let plan = ConfigSource::text(MACHINE).sets(sets).set("batch.global=32").plan();
        time(&plan.unwrap()).unwrap().step_s
    }

    #[test]
    fn more_ranks_than_cores_are_no_faster() {
        let (two, four, eight) = (step(1, 1, 2), step(1, 1, 4), step(1, 1, 8));
        assert!(four >= 0.999 * two && eight >= 0.999 * four, "{two} {four} {eight}");
        assert!(eight < 1.2 * two, "the same work on the same cores: {two} {eight}");
    }

    #[test]
    fn a_pipeline_with_more_ranks_than_cores_has_no_bubble() {
        let (replicas, stages) = (step(1, 1, 8), step(1, 4, 2));
        assert!(stages < 1.1 * replicas, "{stages} {replicas}");
    }

    #[test]
    fn a_rank_alone_has_all_cores() {
        let (one, two) = (step(1, 1, 1), step(1, 1, 2));
        assert!((one / two - 1.0).abs() < 0.1, "{one} {two}");
    }
}

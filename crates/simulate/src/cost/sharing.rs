//! Ranks that are threads of a CPU and share its cores.
//!
//! A rank, or its progress thread, copies the data of its transfers on these cores, so copying does not overlap with computing.
//! Time on emulated links does. While one rank waits, another one computes. So a step takes at least the work of all ranks
//! divided by the cores, and at least the time of one stage that has all cores.

use kintsugi_plan::Plan;

use crate::Timing;

/// How the ranks of a plan share cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharing {
    /// How many times longer a rank of a stage takes than with a core of its own.
    pub slowdown: f64,
    /// The time that the cores of a machine need for all of its ranks, relative to the time of one rank. 0 if every rank has a
    /// core.
    core_ratio: f64,
    /// Whether links are emulated: waiting for them is no work.
    emulated: bool,
}

impl Sharing {
    /// How ranks share cores; `None` if each rank has its own device.
    pub fn of(plan: &Plan) -> Option<Self> {
        let cores = plan.cluster.cores? as f64;
        let emulated = plan.cluster.emulated.iter().any(Option::is_some);
        let sharing = |ranks: usize| plan.cluster.ranks_of_machine(ranks) as f64;
        let (ranks, stage) = (sharing(plan.mesh.ranks()), sharing(plan.mesh.ranks_per_stage()));
        if ranks <= cores {
            // The remaining cores are divided evenly, as threads of the ranks.
            return Some(Sharing { slowdown: 1.0 / (cores / ranks).floor(), core_ratio: 0.0, emulated });
        }
        let slowdown = (stage / cores).max(1.0);
        Some(Sharing { slowdown, core_ratio: ranks / cores / slowdown, emulated })
    }

    /// Extends a step to the time that the cores need for the work of all ranks, if that is longer.
    pub fn limit_by_cores(self, timing: Timing) -> Timing {
        let waiting = timing.tensor_s + timing.exposed_s.iter().sum::<f64>();
        let working = timing.compute_s + if self.emulated { 0.0 } else { waiting };
        let step_s = working * self.core_ratio + timing.fixed_s;
        if step_s <= timing.step_s {
            return timing;
        }
        // Some rank always computes, so the time that seemed to be a wait for another stage was a wait for a core.
        let each = (step_s - timing.fixed_s) / working;
        let each_wait = if self.emulated { 0.0 } else { each };
        Timing {
            step_s,
            compute_s: timing.compute_s * each,
            tensor_s: timing.tensor_s * each_wait,
            exposed_s: timing.exposed_s.map(|seconds| seconds * each_wait),
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
    fn the_cores_of_a_node_are_for_its_own_ranks() {
        let step = |per_node: usize| {
            let sets = ["parallel.tp=1", "parallel.pp=4", "parallel.dp=2", "batch.global=64"];
            let plan =
                ConfigSource::text(MACHINE).sets(sets).set(format!("cluster.per_node={per_node}")).plan();
            time(&plan.unwrap()).unwrap().step_s
        };
        assert!(step(4) < 0.7 * step(8), "two nodes have twice the cores: {} {}", step(4), step(8));
    }

    #[test]
    fn nodes_with_emulated_links_are_one_machine() {
        let step = |per_node: usize, bandwidth: f64| {
            let layout = ["parallel.dp=8", "parallel.tp=1", "parallel.pp=1", "batch.global=64"];
            // Copies between ranks of different nodes take no time, as those inside a node.
            let copies =
                ["latency=0", "start=0", "bandwidth=1e15"].map(|key| format!("cluster.links.cluster.{key}"));
            let nodes = [
                format!("cluster.per_node={per_node}"),
                format!("cluster.emulated.cluster.bandwidth={bandwidth}"),
            ];
            time(&ConfigSource::text(MACHINE).sets(layout).sets(copies).sets(nodes).plan().unwrap())
                .unwrap()
                .step_s
        };
        let (one_node, four_nodes) = (step(8, 1e15), step(2, 1e15));
        assert!((four_nodes / one_node - 1.0).abs() < 0.01, "the same cores: {one_node} {four_nodes}");
        assert!(step(2, 1e6) > 1.5 * four_nodes, "the links take time");
    }

    #[test]
    fn a_rank_alone_has_all_cores() {
        let (one, two) = (step(1, 1, 1), step(1, 1, 2));
        assert!((one / two - 1.0).abs() < 0.1, "{one} {two}");
    }
}

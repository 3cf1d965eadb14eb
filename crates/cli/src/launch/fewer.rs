//! `launch --restarts N --min-ranks M`: goes on with fewer ranks when too few nodes are left.
//!
//! The planner searches the best layout for the ranks that are left. The global batch stays, so the losses follow the same curve.

use std::ffi::OsString;
use std::path::Path;

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_run::files::LAYOUT;
use kintsugi_simulate::{Coverage, predict};

use super::step;
use crate::failure::Failure;
use crate::files::write_whole;
use crate::fit;
use crate::host::planned_device;
use crate::output;
use crate::plan::fastest;
use crate::train;

/// How many ranks run, and on how many nodes, if that is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSize {
    pub ranks: u32,
    pub nodes: Option<u32>,
}

impl JobSize {
    /// Ranks of a node. Without nodes, ranks are lost one by one.
    fn per_node(self) -> u32 {
        self.nodes.map_or(1, |nodes| self.ranks / nodes)
    }

    /// The size with so many nodes at most.
    fn on_nodes(self, nodes: u32) -> Self {
        let nodes = nodes.min(self.ranks / self.per_node());
        JobSize { ranks: nodes * self.per_node(), nodes: self.nodes.map(|_| nodes) }
    }

    fn without_a_node(self) -> Self {
        self.on_nodes((self.ranks / self.per_node()).saturating_sub(1))
    }
}

/// What an attempt runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The command and its arguments.
    pub words: Vec<OsString>,
    /// Its ranks and nodes.
    pub size: JobSize,
}

/// A run that may go on with fewer ranks.
pub struct FewerRanks {
    train: train::Arguments,
    plan: Plan,
    min_ranks: u32,
    /// Whether Slurm says which nodes are left.
    in_slurm: bool,
}

impl FewerRanks {
    /// A run that goes on with `min_ranks` ranks at least.
    pub fn new(train: train::Arguments, min_ranks: u32, in_slurm: bool) -> Result<Self, Failure> {
        let plan = train.plan()?;
        if plan.cluster.placement.is_some() {
            return Err(Failure::mistake(
                "--min-ranks cannot be combined with cluster.placement, which is for all nodes; leave one of them out",
            ));
        }
        Ok(FewerRanks { train, plan, min_ranks, in_slurm })
    }

    /// The next attempt after one of the size `last`, which has failed. `has_trained` says whether it came to the end of a step.
    pub fn next(&self, first: &Attempt, last: JobSize, has_trained: bool) -> Result<Attempt, Failure> {
        let left = self.left(first.size, last, has_trained)?;
        if left == first.size {
            return Ok(first.clone());
        }
        let per_node = first.size.per_node();
        let nodes = left.nodes.map_or_else(String::new, |nodes| format!("{nodes} nodes with "));
        let found = (self.min_ranks..=left.ranks)
            .rev()
            .filter(|ranks| ranks.is_multiple_of(per_node))
            .find_map(|ranks| self.layout(ranks));
        let Some(Layout { plan, text, reason }) = found else {
            return Err(Failure::run(format!(
                "{nodes}{} ranks are left, and no layout of --min-ranks {} or more of them fits with batch.global = {}",
                left.ranks, self.min_ranks, self.plan.batch.global
            )));
        };
        let ranks = plan.mesh.ranks() as u32;
        let size = first.size.on_nodes(ranks / per_node);
        let layout = kintsugi_report::plan::layout(&plan);
        output::stderr(&format!(
            "note     {nodes}{} ranks are left: the run goes on with {ranks}, {layout}: {reason}; batch.global stays {}",
            left.ranks, self.plan.batch.global
        ));
        let path = self.plan.run.out.join(LAYOUT);
        write_whole(&path, text.as_bytes())?;
        Ok(Attempt { words: self.words(&path), size })
    }

    /// What is left of the first size. Slurm knows the nodes that are down. Otherwise, and if Slurm does not know it yet, an attempt
    /// that did not come to the end of a step has lost a node.
    fn left(&self, first: JobSize, last: JobSize, has_trained: bool) -> Result<JobSize, Failure> {
        let expected = if has_trained { last } else { last.without_a_node() };
        if !self.in_slurm {
            return Ok(expected);
        }
        let left = first.on_nodes(step::nodes_left()?);
        // Nodes that have come back are used again.
        Ok(if has_trained || left.ranks < expected.ranks { left } else { expected })
    }

    /// The best layout of so many ranks that fits.
    fn layout(&self, ranks: u32) -> Option<Layout> {
        let config = self.train.config();
        let global = format!("batch.global={}", self.plan.batch.global);
        // One node has no neighbour that could keep copies of its states.
        let (_, per_node) = self.plan.nodes();
        let without_copies = (ranks as usize <= per_node).then(|| "run.replicate_every=0".to_owned());
        let sets = [Some(global), without_copies].into_iter().flatten();
        let (source, given) = (config.read().ok()?.sets(sets.clone()), config.given().ok()?.sets(sets));
        match fastest(&source, ranks as usize) {
            Ok(Some((plan, fitting))) => {
                let text = given.with_strategy_of(&plan, "kintsugi launch").ok()?;
                Some(Layout {
                    plan,
                    text,
                    reason: format!("the best by the prediction, of {fitting} that fit"),
                })
            }
            Ok(None) => None,
            // Without the speed of the device no layouts can be compared: that of before stays, with fewer replicas.
            Err(_) => self.fewer_replicas(&source, &given, ranks),
        }
    }

    fn fewer_replicas(&self, source: &ConfigSource, given: &ConfigSource, ranks: u32) -> Option<Layout> {
        let replicas = |source: &ConfigSource, dp: usize| source.clone().set(format!("parallel.dp={dp}"));
        let of_replica = self.plan.mesh.ranks() / self.plan.mesh.dp();
        let dp = (ranks as usize)
            .checked_div(of_replica)
            .filter(|dp| dp * of_replica == ranks as usize && *dp > 0)?;
        let plan = replicas(source, dp).plan().ok()?;
        fit::planned(
            &plan,
            &predict(&plan, planned_device(&plan, plan.mesh.ranks()), Coverage::quick(&plan)),
        )
        .ok()?;
        let text = replicas(given, dp).with_strategy_of(&plan, "kintsugi launch").ok()?;
        let reason =
            "the layout of before with fewer replicas, because the speed of cluster.device is unknown"
                .to_owned();
        Some(Layout { plan, text, reason })
    }

    /// The command with the configuration in a file.
    fn words(&self, config: &Path) -> Vec<OsString> {
        let json = self.train.json().then(|| OsString::from("--json"));
        [OsString::from("train"), config.into()].into_iter().chain(json).collect()
    }
}

/// A layout that was chosen.
struct Layout {
    plan: Plan,
    /// Its configuration.
    text: String,
    /// Why it was chosen.
    reason: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_loses_whole_nodes() {
        let size = |ranks, nodes| JobSize { ranks, nodes };
        assert_eq!(size(8, Some(4)).without_a_node(), size(6, Some(3)));
        assert_eq!(size(8, Some(4)).on_nodes(9), size(8, Some(4)));
        assert_eq!(size(2, Some(1)).without_a_node(), size(0, Some(0)));
        assert_eq!(size(4, None).without_a_node(), size(3, None));
    }
}

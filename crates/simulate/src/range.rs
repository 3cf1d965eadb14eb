//! The range of a predicted step: from the errors on runs like it, and from the links between nodes.
//!
//! What collectives reach of the links between nodes differs most from one machine to the next, and with the number of
//! ranks; and transfers that run beside kernels slow both down. So a plan on several nodes is also timed with slow links,
//! with full links, and without overlap.

use kintsugi_plan::Plan;
use kintsugi_spec::{Level, LinkSpec, Spread};
use serde::Serialize;

use crate::{Timing, time};

/// The shares of the bandwidth between nodes that collectives may reach: the least and the most.
pub const LINK_EFFICIENCY: [f64; 2] = [0.2, 1.0];

/// The range of a step's time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimeRange {
    /// Seconds at best and at worst.
    pub step_s: [f64; 2],
    /// How far measured steps were from predicted ones.
    pub spread: Spread,
    /// Whether these were runs of the same framework, in one node or on several as this one.
    pub alike: bool,
    /// The step over the range of links, for a plan on several nodes.
    pub links: Option<LinkTimes>,
}

/// The seconds of a step over the range of what transfers between nodes may reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkTimes {
    /// Collectives reach the least of [`LINK_EFFICIENCY`].
    pub slow_s: f64,
    /// Collectives reach the most of [`LINK_EFFICIENCY`].
    pub full_s: f64,
    /// Links are as described, and no transfer overlaps with kernels.
    pub no_overlap_s: f64,
}

impl LinkTimes {
    /// From the times of the plans of [`link_scenarios`].
    pub fn new([slow_s, full_s, no_overlap_s]: [f64; 3]) -> Self {
        LinkTimes { slow_s, full_s, no_overlap_s }
    }
}

impl TimeRange {
    /// The range of a plan that is predicted to take `timing`, and `links` over the range of links.
    pub fn new(plan: &Plan, timing: &Timing, links: Option<LinkTimes>) -> Self {
        let like = spread_of_runs_like(plan);
        let spread = like.unwrap_or_else(Spread::unseen);
        let over_links = links.unwrap_or(LinkTimes::new([timing.step_s; 3]));
        let low = (timing.step_s * spread.low).min(over_links.full_s);
        let high = (timing.step_s * spread.high).max(over_links.slow_s).max(over_links.no_overlap_s);
        TimeRange { step_s: [low, high], spread, alike: like.is_some(), links }
    }

    /// The range of a plan; `None` if the speed of its device is unknown.
    pub fn of(plan: &Plan, timing: &Timing) -> Option<Self> {
        let links = if uses_links_between_nodes(plan) {
            let [slow, full, no_overlap] = link_scenarios(plan).map(|plan| time(&plan));
            Some(LinkTimes::new([slow?.step_s, full?.step_s, no_overlap?.step_s]))
        } else {
            None
        };
        Some(TimeRange::new(plan, timing, links))
    }
}

/// The spread of runs like a plan. The engine's own runs were on calibrated devices.
fn spread_of_runs_like(plan: &Plan) -> Option<Spread> {
    let framework = plan.framework.preset.as_deref();
    if framework.is_none() && plan.cluster.device.products.is_empty() {
        return None;
    }
    Spread::like(framework, uses_links_between_nodes(plan))
}

/// Whether a plan's ranks are on several nodes.
pub fn uses_links_between_nodes(plan: &Plan) -> bool {
    plan.cluster.topology.per_node.is_some_and(|per_node| plan.mesh.ranks() > per_node)
}

/// The plan with slow links between nodes, with full ones, and without overlap.
pub fn link_scenarios(plan: &Plan) -> [Plan; 3] {
    let [slow, full] = LINK_EFFICIENCY.map(|share| with_link_efficiency(plan, share));
    let mut no_overlap = plan.clone();
    no_overlap.pipeline.overlap = false;
    [slow, full, no_overlap]
}

/// The plan on links between nodes of which collectives reach this share.
fn with_link_efficiency(plan: &Plan, share: f64) -> Plan {
    let mut plan = plan.clone();
    let links = &mut plan.cluster.links;
    if links.iter().all(|link| link.level != Level::Cluster) {
        links.push(LinkSpec {
            level: Level::Cluster,
            bandwidth: None,
            latency: None,
            efficiency: None,
            start: None,
            short: None,
            rings: None,
            inner_latency: None,
        });
    }
    links
        .iter_mut()
        .filter(|link| link.level == Level::Cluster)
        .for_each(|link| link.efficiency = Some(share));
    // The share is all that collectives reach, so the framework's own share does not apply on top.
    plan.framework.between_nodes = 1.0;
    plan.framework.replicas_between_nodes = None;
    plan
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    fn range(sets: &[&str]) -> TimeRange {
        let common =
            ["model.preset=gpt-1.4b", "cluster.preset=h100", "precision.compute=bf16", "batch.sequence=2048"];
        let plan = ConfigSource::text("").sets(common).sets(sets).plan().expect("a right configuration");
        TimeRange::of(&plan, &time(&plan).expect("a known speed")).expect("a known speed")
    }

    #[test]
    fn a_plan_in_one_node_does_not_depend_on_links_between_nodes() {
        let range = range(&["parallel.dp=8", "framework.preset=llm-foundry"]);
        assert_eq!(range.links, None);
        assert!(range.alike && range.step_s[0] < range.step_s[1], "{range:?}");
    }

    #[test]
    fn slow_links_widen_the_range_of_a_plan_that_leans_on_them() {
        let pipeline = range(&["parallel.pp=16", "batch.global=64"]);
        let sharded = range(&["parallel.dp=16", "batch.global=16", "sharding.zero=3"]);
        let links = |range: &TimeRange| range.links.expect("two nodes");
        let ratio = |range: &TimeRange| links(range).slow_s / links(range).full_s;
        let (sharded_loses, pipeline_loses) = (ratio(&sharded) - 1.0, ratio(&pipeline) - 1.0);
        assert!(sharded_loses > 0.3 && pipeline_loses < sharded_loses / 4.0, "{sharded:?} {pipeline:?}");
        assert!(links(&sharded).no_overlap_s > links(&sharded).full_s);
        assert!(!sharded.alike, "this engine was never measured on several nodes");
        assert!(sharded.step_s[1] >= links(&sharded).slow_s.max(links(&sharded).no_overlap_s));
    }
}

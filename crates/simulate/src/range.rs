//! The range of a predicted step: from the errors on runs that the constants had not seen, and from what was not measured.
//!
//! What collectives reach of the links between nodes differs most from one machine to the next, and with the number of
//! ranks; and transfers that run beside kernels slow both down. So a plan on several nodes is also timed with slow links,
//! with full links, and without overlap. The host of a framework is another unknown: a plan is also timed with a faster and a slower
//! one, which matters for small models only.

use kintsugi_plan::Plan;
use kintsugi_spec::{Level, LinkSpec, Spread};
use serde::Serialize;

use crate::{Timing, time};

/// The shares of the bandwidth between nodes that collectives may reach: the least and the most.
pub const LINK_EFFICIENCY: [f64; 2] = [0.2, 1.0];

/// How many times longer or shorter another host may take for a kernel of a framework.
const HOST_FACTOR: f64 = 2.0;

/// The part of the way to the ends of [`LINK_EFFICIENCY`] that most machines go.
const LINK_SHARE: f64 = 0.5;

/// The range of a step's time: nine of ten runs should be inside.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimeRange {
    /// Seconds at best and at worst.
    pub step_s: [f64; 2],
    /// How far measured steps were from predicted ones.
    pub spread: Spread,
    /// Whether the plan's device was measured by `calibrate`, as those of the spread.
    pub calibrated: bool,
    /// What the host and the links may change.
    pub unknowns: Unknowns,
    /// The step over the range of links, for a plan on several nodes.
    pub links: Option<LinkTimes>,
    /// What a search judges the plan by: half of the way from the expected seconds to the worse ones of slow links and no overlap.
    pub pessimistic_s: f64,
}

/// What may make a step faster or slower because it was not measured: logarithms of the ratio to the predicted time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Unknowns {
    /// All that could make it faster, together.
    pub faster: f64,
    /// All that could make it slower, together.
    pub slower: f64,
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

impl Unknowns {
    /// Those of a plan that is predicted to take `timing`, and `links` over the range of links. They do not depend on each other, so
    /// their squares are added.
    pub fn of(plan: &Plan, timing: &Timing, links: Option<LinkTimes>) -> Self {
        let ratio = |seconds: f64| (seconds / timing.step_s).ln();
        let host = |factor: f64| {
            let timing = Some(plan.framework.host).filter(|&host| host > 0.0).and_then(|host| {
                let mut other = plan.clone();
                other.framework.host = host * factor;
                time(&other)
            });
            timing.map_or(0.0, |timing| ratio(timing.step_s))
        };
        let (full, slow) = links
            .map_or((0.0, 0.0), |links| (ratio(links.full_s), ratio(links.slow_s.max(links.no_overlap_s))));
        let faster = host(1.0 / HOST_FACTOR).min(0.0).hypot(LINK_SHARE * full.min(0.0));
        let slower = host(HOST_FACTOR).max(0.0).hypot(LINK_SHARE * slow.max(0.0));
        Unknowns { faster, slower }
    }

    /// What a spread has to explain of the logarithm of measured over predicted time.
    pub fn unexplained(self, logarithm: f64) -> f64 {
        let known = if logarithm < 0.0 { self.faster } else { self.slower };
        (logarithm * logarithm - known * known).max(0.0).sqrt().copysign(logarithm)
    }

    /// The factors on the predicted time at best and at worst, together with a spread.
    pub fn factors(self, spread: Spread) -> [f64; 2] {
        [(-self.faster.hypot(spread.low.ln())).exp(), self.slower.hypot(spread.high.ln()).exp()]
    }
}

/// Half of the way from an expected value to the worst one, as ratios: most machines are on the way.
pub fn pessimistic(expected: f64, worst: f64) -> f64 {
    expected * (worst.max(expected) / expected).powf(LINK_SHARE)
}

impl TimeRange {
    /// The range of a plan that is predicted to take `timing`, and `links` over the range of links.
    pub fn new(plan: &Plan, timing: &Timing, links: Option<LinkTimes>) -> Self {
        let calibrated = is_calibrated(plan);
        let spread = if calibrated { Spread::calibrated() } else { Spread::described() };
        let unknowns = Unknowns::of(plan, timing, links);
        let step_s = unknowns.factors(spread).map(|factor| factor * timing.step_s);
        let worst = links.map_or(timing.step_s, |links| links.slow_s.max(links.no_overlap_s));
        let pessimistic_s = pessimistic(timing.step_s, worst);
        TimeRange { step_s, spread, calibrated, unknowns, links, pessimistic_s }
    }

    /// The range of a plan that is predicted to take `timing`.
    pub fn of(plan: &Plan, timing: &Timing) -> Self {
        TimeRange::new(plan, timing, link_times(plan))
    }
}

/// The step over the range of links, for a plan on several nodes of a device whose speed is known.
pub fn link_times(plan: &Plan) -> Option<LinkTimes> {
    if !uses_links_between_nodes(plan) {
        return None;
    }
    let [slow, full, no_overlap] = link_scenarios(plan).map(|plan| time(&plan));
    Some(LinkTimes::new([slow?.step_s, full?.step_s, no_overlap?.step_s]))
}

/// Whether `calibrate` measured the device of a plan of this engine in one node.
fn is_calibrated(plan: &Plan) -> bool {
    plan.framework.preset.is_none()
        && !plan.cluster.device.products.is_empty()
        && !uses_links_between_nodes(plan)
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

/// The plan if collectives reach this share of the links between nodes.
fn with_link_efficiency(plan: &Plan, share: f64) -> Plan {
    let mut plan = plan.clone();
    let links = &mut plan.cluster.links;
    // A cluster with pods always has their links.
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
    links.iter_mut().filter(|link| link.level >= Level::Pod).for_each(|link| link.efficiency = Some(share));
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
        TimeRange::of(&plan, &time(&plan).expect("a known speed"))
    }

    #[test]
    fn a_plan_in_one_node_does_not_depend_on_links_between_nodes() {
        let range = range(&["parallel.dp=8", "framework.preset=llm-foundry"]);
        assert_eq!(range.links, None);
        assert!(!range.calibrated && range.step_s[0] < range.step_s[1], "{range:?}");
    }

    #[test]
    fn a_slower_host_matters_if_kernels_are_short() {
        let slower = |micro: &str| {
            let micro = format!("batch.micro={micro}");
            range(&["parallel.dp=8", "framework.preset=megatron-deepspeed", "batch.global=256", &micro])
                .unknowns
                .slower
        };
        assert!(slower("1") > 4.0 * slower("16"), "{} {}", slower("1"), slower("16"));
        let own = range(&["parallel.dp=8"]);
        assert!(own.unknowns == Unknowns::default(), "this engine's host is not an unknown: {own:?}");
    }

    #[test]
    fn a_spread_explains_what_unknowns_leave() {
        let unknowns = Unknowns { faster: 0.3, slower: 0.4 };
        let rest = [-0.5, 0.5, 0.2].map(|logarithm| unknowns.unexplained(logarithm));
        assert!((rest[0] + 0.4).abs() < 1e-12 && (rest[1] - 0.3).abs() < 1e-12 && rest[2].abs() < 1e-12);
        let [low, high] = unknowns.factors(Spread { runs: 2, low: (-0.4_f64).exp(), high: 0.3_f64.exp() });
        assert!((low.ln() + 0.5).abs() < 1e-12 && (high.ln() - 0.5).abs() < 1e-12);
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
        assert!(!sharded.calibrated, "this engine was never measured on several nodes");
        assert!(sharded.unknowns.slower > pipeline.unknowns.slower, "{sharded:?} {pipeline:?}");
    }
}

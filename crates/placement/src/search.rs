//! The search for the fastest placement.

use std::collections::BTreeMap;

use kintsugi_plan::Plan;
use kintsugi_spec::{
    Placement,
    splitmix64::{GOLDEN, mix},
};

use crate::bound::bound;
use crate::layout::Layout;
use crate::orders::{Order, all, banded};
use crate::table::FreeNode;
use crate::timer::Timer;

/// At most as many orders are timed one by one.
const MAX_ORDERS: usize = 20_000;
/// Random orders whose mean is told.
const RANDOM_ORDERS: u64 = 3;

/// Why there is no placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// The plan needs more nodes than are free.
    #[error("{ranks} ranks need {needed} nodes of {per_node}, and the table has {free} free")]
    TooFewNodes {
        /// Ranks of the plan.
        ranks: usize,
        /// Nodes that they need.
        needed: usize,
        /// Ranks of a node.
        per_node: usize,
        /// Nodes of the table.
        free: usize,
    },
    /// It is unknown how many ranks share a node.
    #[error("a placement needs cluster.per_node, the ranks of a node")]
    NoNodes,
    /// The time of a step is unknown.
    #[error(
        "the time of a step is unknown without the speed of the device; set cluster.preset or cluster.profile"
    )]
    UnknownSpeed,
}

/// How a placement was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Every order was timed.
    Exact {
        /// Their number.
        orders: usize,
    },
    /// Only orders that keep stages or pipelines together were.
    Heuristic {
        /// Their number.
        orders: usize,
    },
}

/// A placement, and what it gains.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The nodes in the order of ranks.
    pub placement: Placement,
    /// Predicted seconds of a step.
    pub step_s: f64,
    /// How it was found.
    pub how: How,
    /// No placement has a shorter step.
    pub bound_s: f64,
    /// The first nodes by name, in the order of their names: what Slurm does without being asked.
    pub by_name: Placement,
    /// Predicted seconds of a step in that order.
    pub by_name_s: f64,
    /// The mean of random orders of random nodes.
    pub random_s: f64,
}

/// The fastest placement of a plan on free nodes. The order of `free` means nothing.
pub fn place(plan: &Plan, free: &[FreeNode]) -> Result<Found, PlaceError> {
    let per_node = plan.cluster.topology.per_node.ok_or(PlaceError::NoNodes)?;
    let (ranks, layout) = (plan.mesh.ranks(), Layout::of(plan, per_node));
    let needed = layout.nodes();
    if free.len() < needed {
        return Err(PlaceError::TooFewNodes { ranks, needed, per_node, free: free.len() });
    }
    let pods = Pods::of(free);
    let room: Vec<usize> = pods.nodes.iter().map(Vec::len).collect();
    let timer = Timer::new(plan);
    let seconds = |order: &[usize]| timer.seconds(order).ok_or(PlaceError::UnknownSpeed);
    let by_name = pods.by_name(needed);
    let by_name_s = seconds(&by_name)?;
    let (orders, is_exact) = match all(needed, &room, MAX_ORDERS) {
        Some(orders) => (orders, true),
        None => (banded(layout, &room), false),
    };
    let how = match (is_exact, orders.len()) {
        (true, orders) => How::Exact { orders },
        (false, orders) => How::Heuristic { orders: orders + 1 },
    };
    let mut best = (by_name_s, spread(&by_name), by_name.clone());
    for order in orders {
        let found = (seconds(&order)?, spread(&order), order);
        if found.0.total_cmp(&best.0).then_with(|| (found.1, &found.2).cmp(&(best.1, &best.2))).is_lt() {
            best = found;
        }
    }
    let (step_s, _, order) = best;
    let bound_s = match how {
        How::Exact { .. } => step_s,
        How::Heuristic { .. } => {
            let bound = bound(&timer, layout, room.first().copied().unwrap_or(0));
            bound.ok_or(PlaceError::UnknownSpeed)?.min(step_s)
        }
    };
    let random: Result<Vec<f64>, PlaceError> =
        (0..RANDOM_ORDERS).map(|seed| seconds(&pods.random(needed, seed))).collect();
    let random_s = random?.iter().sum::<f64>() / RANDOM_ORDERS as f64;
    let (placement, by_name) = (pods.placement(&order), pods.placement(&by_name));
    Ok(Found { placement, step_s, how, bound_s, by_name, by_name_s, random_s })
}

/// The number of pods of an order, and how often the next node is in another one: of two orders that are as fast, the one with
/// less of both is taken.
fn spread(order: &[usize]) -> (usize, usize) {
    let mut pods = order.to_vec();
    pods.sort_unstable();
    pods.dedup();
    (pods.len(), order.windows(2).filter(|two| two[0] != two[1]).count())
}

/// Free nodes by pod: the largest pod first, then by its name.
struct Pods {
    names: Vec<String>,
    /// The free nodes of each, by name.
    nodes: Vec<Vec<String>>,
    /// The pod of every node, in the order of their names.
    all: Vec<usize>,
}

impl Pods {
    fn of(free: &[FreeNode]) -> Self {
        let mut free: Vec<&FreeNode> = free.iter().collect();
        free.sort_by(|a, b| crate::hosts::by_name(&a.name, &b.name));
        let mut by_pod: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for node in &free {
            by_pod.entry(&node.pod).or_default().push(node.name.clone());
        }
        let mut pods: Vec<(&str, Vec<String>)> = by_pod.into_iter().collect();
        pods.sort_by(|a, b| b.1.len().cmp(&a.1.len()).then_with(|| crate::hosts::by_name(a.0, b.0)));
        let number: BTreeMap<&str, usize> =
            pods.iter().enumerate().map(|(i, (name, _))| (*name, i)).collect();
        let all = free.iter().map(|node| number[node.pod.as_str()]).collect();
        let (names, nodes) = pods.into_iter().map(|(name, nodes)| (name.to_owned(), nodes)).unzip();
        Pods { names, nodes, all }
    }

    /// The pods of the first nodes by name.
    fn by_name(&self, nodes: usize) -> Order {
        self.all[..nodes].to_vec()
    }

    /// The pods of random nodes in random order.
    fn random(&self, nodes: usize, seed: u64) -> Order {
        let mut pods = self.all.clone();
        for at in 0..nodes {
            let draw = mix((seed << 32 | (at as u64 + 1)).wrapping_mul(GOLDEN)) as usize;
            let other = at + draw % (pods.len() - at);
            pods.swap(at, other);
        }
        pods.truncate(nodes);
        pods
    }

    /// Nodes for an order: those of a pod by name.
    fn placement(&self, order: &[usize]) -> Placement {
        let mut next = vec![0; self.names.len()];
        let node = |&pod: &usize| {
            next[pod] += 1;
            self.nodes[pod][next[pod] - 1].clone()
        };
        let nodes = order.iter().map(node).collect();
        Placement { nodes, pods: order.iter().map(|&pod| self.names[pod].clone()).collect() }
    }
}

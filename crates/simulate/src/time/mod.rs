//! How long a step takes and what it consumes: the programs of a plan played against clocks.
//!
//! Kernels come from the paper trace and are priced by the device, transfers by the links, and everything else
//! (overlap, bubbles, stragglers, contention) follows from the programs.

mod costs;
mod energy;
mod kernel;
mod links;
mod play;
mod sharing;
mod trace;

pub use costs::{Costs, Spent, Time};
pub use energy::{Consumption, Training};
pub use kernel::DeviceModel;
pub use links::{Among, Links};
pub use play::{Account, play};
pub use sharing::Sharing;

use kintsugi_plan::Plan;
use kintsugi_spec::Level;
use serde::Serialize;

/// How long a step takes, and what the time goes into: means over the stages, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// One step.
    pub step_s: f64,
    /// Kernels.
    pub compute_s: f64,
    /// Transfers of tensor parallelism, which nothing overlaps.
    pub tensor_s: f64,
    /// Waiting for weights and gradients over the links of a package, a node and the cluster.
    pub exposed_s: [f64; 3],
    /// Waiting for other stages and their messages.
    pub idle_s: f64,
    /// What the framework adds to every step.
    pub fixed_s: f64,
    /// The share of the step in which a stage waits for others.
    pub bubble: f64,
}

impl Timing {
    /// Waiting for weights and gradients over a level.
    pub fn exposed(&self, level: Level) -> f64 {
        self.exposed_s[level as usize]
    }
}

/// How long a step of a plan takes; `None` where its device's speed is not known.
pub fn time(plan: &Plan) -> Option<Timing> {
    let device = DeviceModel::new(&plan.cluster.device, &plan.framework)?;
    Some(crate::Clock::new(&device).time(plan))
}

/// Sums over the stages, and when the last is done.
#[derive(Clone, Copy)]
pub(crate) struct Totals(pub(crate) [u128; 7]);

impl Totals {
    /// These, and others so many times.
    pub(crate) fn and(self, other: Totals, times: u128) -> Totals {
        Totals(std::array::from_fn(|i| self.0[i] + times * other.0[i]))
    }

    /// In picoseconds, where they were counted in 2ⁿ of them.
    pub(crate) fn unscaled(self, n: u32) -> Totals {
        Totals(self.0.map(|time| time << n))
    }
}

pub(crate) fn timing(totals: Totals, stages: usize, fixed: Time) -> Timing {
    let [end, compute, tensor, package, node, cluster, idle] = totals.0.map(|time| time as f64 * 1e-12);
    let mean = |sum: f64| sum / stages as f64;
    let fixed_s = fixed as f64 * 1e-12;
    let step_s = end + fixed_s;
    Timing {
        step_s,
        compute_s: mean(compute),
        tensor_s: mean(tensor),
        exposed_s: [package, node, cluster].map(mean),
        idle_s: mean(idle),
        fixed_s,
        bubble: if step_s > 0.0 { mean(idle) / step_s } else { 0.0 },
    }
}

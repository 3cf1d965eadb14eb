//! What every op of a plan costs, in picoseconds: kernels priced by the device, transfers by the links.

use std::collections::HashMap;

use kintsugi_comm::Collective;
use kintsugi_comm::paper::{Entry, Transfer};
use kintsugi_plan::{Axis, Block, Message, MessageKind, Op, Over, Plan, Unit};
use kintsugi_spec::{FrameworkSpec, Level};

use super::kernel::DeviceModel;
use super::links::{Among, Links};
use super::sharing::Sharing;
use super::trace::{Trace, Traced, cut_down, kind, trace};

/// Picoseconds.
pub type Time = u64;

/// What an op costs the rank that runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// In kernels, or waiting for a host that is slower.
    pub compute: Time,
    /// In transfers inside the op, which nothing overlaps.
    pub links: Time,
    /// The transfer that the op only starts, and the level it keeps busy.
    pub started: Option<(Level, Time)>,
}

/// What every op costs on every stage of a plan.
#[derive(Clone, Debug)]
pub struct Costs {
    ops: HashMap<Op, Spent>,
    /// Of ops over a whole stage, by what the stage holds: the ends of the model and each layer.
    first: HashMap<Op, Spent>,
    layer: HashMap<Op, Spent>,
    last: HashMap<Op, Spent>,
    stages: usize,
    layers: Vec<usize>,
    messages: Vec<[(Level, Time); 2]>,
    /// Seconds of a sum of a few numbers over each axis.
    sums: [(Level, Time); 3],
    tied: (Level, Time),
    /// How much slower kernels are beside a transfer, in 1/1024.
    pub interference: u64,
    /// At the end of every step.
    pub fixed: Time,
}

/// Seconds to picoseconds.
pub fn picoseconds(seconds: f64) -> Time {
    (seconds * 1e12).round() as Time
}

impl Spent {
    pub(crate) fn plus(self, other: Spent) -> Spent {
        Spent {
            compute: self.compute.saturating_add(other.compute),
            links: self.links.saturating_add(other.links),
            started: None,
        }
    }

    fn minus(self, other: Spent) -> Spent {
        Spent {
            compute: self.compute.saturating_sub(other.compute),
            links: self.links.saturating_sub(other.links),
            started: None,
        }
    }

    /// What it costs a rank that shares its core and copies what it sends by itself.
    fn shared(self, sharing: Sharing) -> Spent {
        let slower = |time: Time| (time as f64 * sharing.slower).round() as Time;
        let copied = self.started.map_or(0, |(_, time)| time);
        Spent { compute: slower(self.compute + copied), links: slower(self.links), started: None }
    }

    fn times(self, n: u64) -> Spent {
        Spent { compute: self.compute.saturating_mul(n), links: self.links.saturating_mul(n), started: None }
    }
}

impl Costs {
    /// Traces a plan and prices what it does.
    pub fn new(plan: &Plan, device: &DeviceModel) -> Self {
        Costs::over(&Links::new(&plan.cluster, plan.mesh, &plan.framework), plan, device)
    }

    /// The same over the links of the plan's mesh, which many plans have in common.
    pub(crate) fn over(links: &Links, plan: &Plan, device: &DeviceModel) -> Self {
        let host_collective = host_collective(plan);
        let sharing = Sharing::of(plan);
        let slower = sharing.map_or(1.0, |sharing| sharing.slower);
        let small = cut_down(plan, 3);
        let traces: Vec<Trace> = (0..3).map(|stage| trace(&small, stage)).collect();
        let price = |trace: &Trace| -> HashMap<Op, Spent> {
            trace
                .iter()
                .map(|(&op, traced)| {
                    let spent = price(op, traced, device, links, host_collective);
                    (op, sharing.map_or(spent, |sharing| spent.shared(sharing)))
                })
                .collect()
        };
        let [first, layer, last] = [0, 1, 2].map(|stage| price(&traces[stage]));
        let whole = |of: &HashMap<Op, Spent>| -> HashMap<Op, Spent> {
            WHOLE.iter().map(|&op| (op, of.get(&op).copied().unwrap_or_default().minus(layer[&op]))).collect()
        };
        let (first_ends, last_ends) = (whole(&first), whole(&last));
        let mut ops = first.clone();
        ops.extend(&layer);
        ops.extend(&last);
        if plan.framework.recompute_whole {
            let layer = Block::Layer(0);
            let forward = ops[&Op::Forward { block: layer, micro: 0 }];
            ops.insert(Op::Recompute { block: layer, micro: 0 }, forward);
        }
        // One stage has both ends, and a tied table only once.
        let (first_ends, last_ends) = if plan.mesh.pp == 1 {
            let one = price(&trace(&cut_down(plan, 1), 0));
            ops.extend(&one);
            (whole(&one), HashMap::new())
        } else {
            (first_ends, last_ends)
        };
        let message = |stage: usize, to: usize| {
            let bytes = message_bytes(&traces[0]);
            let scattered = plan.framework.scatter_messages && !plan.sequence_parallel && plan.mesh.tp > 1;
            let (level, seconds) = links.message(stage, to, bytes, scattered);
            (level, picoseconds(seconds * slower))
        };
        let pp = plan.mesh.pp;
        let around = |stage: usize| [message(stage, (stage + 1) % pp), message(stage, (stage + pp - 1) % pp)];
        let sum = |among| {
            let (level, seconds) = links.collective(among, Collective::AllReduce, 12.0);
            (level, picoseconds(seconds * slower))
        };
        let table = ops.get(&Op::ReduceStart { unit: Unit::Table, over: Over::Tied });
        Costs {
            layer: WHOLE.iter().map(|&op| (op, layer[&op])).collect(),
            first: first_ends,
            last: last_ends,
            stages: pp,
            layers: plan.stage_layers(),
            messages: (0..pp).map(around).collect(),
            sums: [sum(Among::Pipeline), sum(Among::Data), sum(Among::Tensor)],
            tied: table.and_then(|spent| spent.started).unwrap_or((Level::Node, 0)),
            interference: (plan.framework.interference * 1024.0) as u64,
            fixed: picoseconds(plan.framework.step),
            ops,
        }
    }

    /// What an op costs on a stage.
    pub fn of(&self, stage: usize, op: Op) -> Spent {
        match op {
            Op::Measure | Op::Clip | Op::Step | Op::Begin => self.whole(stage, op),
            Op::NormStart { .. }
            | Op::NormWait { .. }
            | Op::SendStart { .. }
            | Op::SendWait { .. }
            | Op::ReceiveStart { .. }
            | Op::ReceiveWait { .. } => Spent::default(),
            op => self.ops.get(&kind(op)).copied().unwrap_or_default(),
        }
    }

    /// How long a message from a stage travels, and over which level.
    pub fn message(&self, stage: usize, message: Message) -> (Level, Time) {
        let onward = message.kind == MessageKind::Activation;
        self.messages[stage][usize::from(!onward)]
    }

    /// How long the norm takes over an axis.
    pub fn sum(&self, axis: Axis) -> (Level, Time) {
        self.sums[match axis {
            Axis::Pipeline => 0,
            Axis::Data => 1,
            Axis::Tensor => 2,
        }]
    }

    /// How long the two copies of a tied table take to be summed.
    pub fn tied(&self) -> (Level, Time) {
        self.tied
    }

    fn whole(&self, stage: usize, op: Op) -> Spent {
        let of = |part: &HashMap<Op, Spent>| part.get(&op).copied().unwrap_or_default();
        let mut spent = of(&self.layer).times(self.layers[stage] as u64);
        if stage == 0 {
            spent = spent.plus(of(&self.first));
        }
        if stage + 1 == self.stages {
            spent = spent.plus(of(&self.last));
        }
        spent
    }
}

/// The ops that a stage does for all it holds at once.
const WHOLE: [Op; 4] = [Op::Begin, Op::Measure, Op::Clip, Op::Step];

/// Seconds of the host for each collective of tp.
fn host_collective(plan: &Plan) -> f64 {
    let staged = plan.mesh.pp > 1 && plan.cluster.topology.per_node.is_some_and(|n| plan.mesh.ranks() > n);
    let FrameworkSpec { host_collective, host_staged, .. } = plan.framework;
    plan.mesh.tp as f64 * if staged { host_staged } else { host_collective }
}

fn price(op: Op, traced: &Traced, device: &DeviceModel, links: &Links, host_collective: f64) -> Spent {
    let kernels: f64 = traced.kernels.iter().map(|kernel| device.seconds(kernel)).sum();
    let host =
        traced.kernels.len() as f64 * device.host_seconds() + traced.transfers.len() as f64 * host_collective;
    let whole = links.whole_sums() && matches!(op, Op::ReduceStart { .. });
    let transfers = traced.transfers.iter().filter_map(|&entry| collective(entry, links, whole));
    if starts_a_transfer(op) {
        let started = transfers.map(|(level, seconds)| (level, picoseconds(seconds))).next();
        return Spent { compute: picoseconds(kernels), links: 0, started };
    }
    let inside: f64 = transfers.map(|(_, seconds)| seconds).sum();
    let waiting = (host - kernels - inside).max(0.0);
    Spent { compute: picoseconds(kernels + waiting), links: picoseconds(inside), started: None }
}

fn starts_a_transfer(op: Op) -> bool {
    matches!(
        op,
        Op::GatherStart { .. } | Op::ReduceStart { .. } | Op::RefreshStart { .. } | Op::NormStart { .. }
    )
}

/// Seconds of a collective; with `whole` no rank is left with a shard of a sum only.
fn collective(entry: Entry, links: &Links, whole: bool) -> Option<(Level, f64)> {
    let Transfer::Collective(collective) = entry.transfer else { return None };
    let collective = if whole { Collective::AllReduce } else { collective };
    let among = match entry.group {
        "tp" => Among::Tensor,
        "dp" => Among::Data,
        "tied" => Among::Tied,
        _ => Among::Pipeline,
    };
    Some(links.collective(among, collective, (entry.len * entry.dtype.bytes()) as f64))
}

/// The bytes of a message between stages, as the first stage sends it.
fn message_bytes(first: &Trace) -> f64 {
    let sends = first.iter().filter(|(op, _)| matches!(op, Op::SendStart { .. }));
    let entries = sends.flat_map(|(_, traced)| &traced.transfers);
    entries.map(|entry| (entry.len * entry.dtype.bytes()) as f64).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    #[test]
    fn a_whole_sum_takes_up_to_twice_a_shard_of_it() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"h100\"\n\
                    [parallel]\ndp = 16\n[batch]\nglobal = 16\nmicro = 1\n[sharding]\nzero = 1";
        let sum = |whole: bool| {
            let plan = ConfigSource::text(file).set(format!("framework.whole_sums={whole}")).plan().unwrap();
            let device = DeviceModel::new(&plan.cluster.device, &plan.framework).unwrap();
            let op = Op::ReduceStart { unit: Unit::Layer(0), over: Over::Data };
            Costs::new(&plan, &device).of(0, op).started.expect("it starts a transfer").1
        };
        let (whole, shard) = (sum(true), sum(false));
        assert!(whole > shard && whole <= 2 * shard, "{whole} {shard}");
    }
}

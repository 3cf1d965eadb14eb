//! The kernels and transfers of each op, from the paper trace of a model reduced to three stages of one layer each.
//!
//! Blocks of one kind do the same, so one of each is traced. The first stage has the embedding, the last the head, and
//! the middle one only a layer. The ops of a whole stage are assembled from these.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::TransferObserver;
use kintsugi_comm::paper::{Entry, Log, Transfer as PaperTransfer};
use kintsugi_plan::{Axis, Batch, Coordinate, OpKind, Pipeline, Plan, ScheduleKind};
use kintsugi_rank::{NoTokens, Rank, paper_groups};
use kintsugi_tensor::paper::{Kernel, Paper};
use kintsugi_tensor::{Backend, Device};

/// The kernels and transfers of an op.
#[derive(Clone, Debug, Default)]
pub struct OpTrace {
    /// The kernels it runs.
    pub kernels: Vec<Kernel>,
    /// The transfers it starts, in order. Messages to receive are not among them.
    pub transfers: Vec<Entry>,
    /// When it starts them and waits for them, in order. It may leave the wait to another op.
    pub events: Vec<TransferEvent>,
}

/// An op starts a transfer or waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferEvent {
    /// The kernels of the op before it.
    pub kernels: usize,
    /// The number of the transfer in the op.
    pub transfer: usize,
    /// Whether it waits.
    pub waits: bool,
}

/// The trace of every kind of op on one stage.
pub type Trace = HashMap<OpKind, OpTrace>;

/// The traces of a plan. They do not depend on the constants of its cluster and its framework.
#[derive(Clone, Debug)]
pub struct PlanTraces {
    /// A first, a middle and a last stage of one layer.
    pub(super) stages: [Trace; 3],
    /// A single stage, which has both ends of the model but a tied table only once, if the plan has no other.
    pub(super) single: Option<Trace>,
}

impl PlanTraces {
    /// Traces a plan.
    pub fn new(plan: &Plan) -> Self {
        let small = cut_down(plan, 3);
        PlanTraces {
            stages: [0, 1, 2].map(|stage| whole_trace(plan, &small, stage)),
            single: (plan.mesh.pp() == 1).then(|| whole_trace(plan, &cut_down(plan, 1), 0)),
        }
    }
}

/// The trace of a small plan's stage, whose layers are trained, with the ops of frozen layers if the plan has any: with a gradient
/// to pass on, and without.
fn whole_trace(plan: &Plan, small: &Plan, stage: usize) -> Trace {
    let mut trace = mean_trace(plan, small, stage);
    if (0..plan.mesh.pp()).any(|stage| plan.trained_layers(stage) < plan.stage_layers()[stage]) {
        for frozen_embedding in [false, true] {
            let frozen = plan.frozen.with_layers(small.model.layers).with_embedding(frozen_embedding);
            let of_frozen = mean_trace(plan, &Plan { frozen, ..small.clone() }, stage);
            for (kind, traced) in of_frozen {
                trace.entry(kind).or_insert(traced);
            }
        }
    }
    trace
}

/// The plan reduced to `stages` stages of one layer.
pub fn cut_down(plan: &Plan, stages: usize) -> Plan {
    let mut small = plan.clone();
    small.model.layers = stages;
    small.frozen = plan.frozen.with_layers(0);
    small.mesh = plan.mesh.with(Axis::Pipeline, stages);
    let schedule = match plan.pipeline.schedule {
        ScheduleKind::ZeroBubble => ScheduleKind::ZeroBubble,
        ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward | ScheduleKind::Interleaved => {
            ScheduleKind::OneForwardOneBackward
        }
    };
    small.pipeline =
        Pipeline { schedule, virtual_stages: 1, layers: vec![1; stages], ..plan.pipeline.clone() };
    // The first micro-batch writes gradients and the others accumulate, so the last one is representative.
    let micro_batches = plan.micro_batches().min(2);
    small.batch = Batch { global: micro_batches * plan.batch.micro * plan.mesh.dp(), ..plan.batch };
    small
}

/// The trace of a small plan's stage. A kernel has the mean of its work in the layers of `plan` with and without a window.
fn mean_trace(plan: &Plan, small: &Plan, stage: usize) -> Trace {
    let share = plan.window_share();
    let with_window = |window: Option<usize>| trace(&small.clone().with_uniform_window(window), stage);
    if share <= 0.0 || share >= 1.0 {
        return with_window(plan.any_window());
    }
    let (mut mean, windows) = (with_window(None), with_window(plan.any_window()));
    for (kind, traced) in &mut mean {
        for (kernel, other) in traced.kernels.iter_mut().zip(&windows[kind].kernels) {
            let of =
                |work: u64, other: u64| ((1.0 - share) * work as f64 + share * other as f64).round() as u64;
            (kernel.flops, kernel.bytes) = (of(kernel.flops, other.flops), of(kernel.bytes, other.bytes));
        }
    }
    mean
}

/// Runs a stage of a small plan on paper and records the last run of each kind of op.
pub fn trace(plan: &Plan, stage: usize) -> Trace {
    let paper = Rc::new(Paper::new(Device::Cpu { threads: 1 }).tracing());
    let log = Rc::new(RefCell::new(Log::default()));
    let at = Coordinate::of_stage(stage);
    let mut groups = paper_groups(plan, at, &log);
    let observer = Rc::new(OrderObserver { paper: Rc::clone(&paper), order: RefCell::default() });
    groups.observe(&(Rc::clone(&observer) as Rc<dyn TransferObserver>));
    let backend: Rc<dyn Backend> = Rc::clone(&paper) as Rc<dyn Backend>;
    let mut rank = Rank::new(Arc::new(plan.clone()), at, backend, groups);
    let mut trace = Trace::new();
    for op in &plan.program(stage).ops {
        paper.take_trace();
        *observer.order.borrow_mut() = Order { begin: paper.totals().kernels, ..Order::default() };
        rank.execute(op, &mut NoTokens).expect("paper moves nothing that could fail");
        let Order { transfers, events, .. } = observer.order.take();
        trace.insert(op.kind(), OpTrace { kernels: paper.take_trace(), transfers, events });
    }
    trace
}

/// Records the order of an op's kernels and transfers.
struct OrderObserver {
    paper: Rc<Paper>,
    order: RefCell<Order>,
}

#[derive(Default)]
struct Order {
    /// Kernels before the op.
    begin: u64,
    transfers: Vec<Entry>,
    /// The address of each transfer's buffer until it is awaited.
    pending: Vec<Option<u64>>,
    events: Vec<TransferEvent>,
}

impl OrderObserver {
    fn event(&self, order: &mut Order, transfer: usize, waits: bool) {
        let kernels = (self.paper.totals().kernels - order.begin) as usize;
        order.events.push(TransferEvent { kernels, transfer, waits });
    }
}

impl TransferObserver for OrderObserver {
    fn starts(&self, transfer: Entry, address: u64) {
        if matches!(transfer.transfer, PaperTransfer::Receive { .. }) {
            return;
        }
        let order = &mut *self.order.borrow_mut();
        order.transfers.push(transfer);
        order.pending.push(Some(address));
        self.event(order, order.transfers.len() - 1, false);
    }

    fn waits(&self, address: u64) {
        let order = &mut *self.order.borrow_mut();
        // A transfer that an earlier op started is not among them.
        if let Some(transfer) = order.pending.iter().position(|&pending| pending == Some(address)) {
            order.pending[transfer] = None;
            self.event(order, transfer, true);
        }
    }

    fn ended(&self, _: u64) {}
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_plan::{Computation, Op, Transfer};
    use proptest::prelude::{any, prop_assert_eq, proptest};
    use proptest::sample::select;

    use super::*;

    /// Traces the three kinds of stages of a plan on the reduced plan.
    fn of_small(plan: &Plan) -> Trace {
        let stages = if plan.mesh.pp() == 1 { 1 } else { 3 };
        let small = cut_down(plan, stages);
        (0..stages).flat_map(|stage| trace(&small, stage)).collect()
    }

    #[test]
    fn every_op_of_a_plan_with_frozen_weights_has_a_cost() {
        let step_s = |patterns: &[&str], layout: &str| {
            let group = |pattern: &&str| format!("{{ parameters = \"{pattern}\", frozen = true }}");
            let groups: Vec<String> = patterns.iter().map(group).collect();
            let text = format!(
                "model = {{ preset = \"gpt2-124m\", layers = 8, tied = false }}\nbatch = {{ micro = 1, global = 16 }}\n\
                 cluster.preset = \"h100\"\noptimizer.groups = [{}]\n{layout}",
                groups.join(", ")
            );
            let plan = ConfigSource::text(text).plan().unwrap_or_else(|error| panic!("{error}"));
            crate::time(&plan).expect("the device is known").step_s
        };
        for layout in [
            "",
            "parallel = { pp = 4, schedule = \"1f1b\" }\nmemory.recompute = \"full\"",
            "parallel = { pp = 2, schedule = \"gpipe\" }",
            "parallel = { pp = 2, dp = 2, schedule = \"zero-bubble\" }\nsharding.zero = 3",
            "parallel = { tp = 2, pp = 2, schedule = \"interleaved\", virtual_stages = 2 }",
        ] {
            let trained = step_s(&[], layout);
            let below = ["table.*", "positions.*", "layer.0.*", "layer.1.*", "layer.2.*", "layer.3.*"];
            for frozen in [
                &below[..],
                &["layer.2.*"],
                &["head.*"],
                &["layer.*"],
                &["table.*", "positions.*", "layer.*"],
            ] {
                let faster = step_s(frozen, layout);
                assert!(faster < trained, "{frozen:?} {layout}: {faster} and {trained}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_plan_cut_down_does_what_the_plan_does(
            (pp, chunks) in (1..=4_usize, 1..=2_usize),
            (tp, dp, sequence, overlap) in (1..=2_usize, 1..=2_usize, any::<bool>(), any::<bool>()),
            (zero, prefetch) in (0..=3_usize, 0..=2_usize),
            schedule in select(vec!["1f1b", "gpipe", "zero-bubble", "interleaved"]),
            recompute in select(vec!["none", "selective", "full"]),
            tied in any::<bool>(),
        ) {
            let chunks = if schedule == "interleaved" { 1 + chunks } else { 1 };
            let schedule = if pp == 1 { "1f1b" } else { schedule };
            let chunks = if pp == 1 { 1 } else { chunks };
            let plan = ConfigSource::text(format!(
                "model = {{ preset = \"demo\", tied = {tied}, layers = {} }}\nbatch = {{ micro = 1, global = {} }}\n\
                 parallel = {{ tp = {tp}, pp = {pp}, dp = {dp}, schedule = \"{schedule}\", virtual_stages = {chunks}, \
                 prefetch = {prefetch}, sequence_parallel = {}, overlap_tp = {overlap} }}\nsharding.zero = {zero}\nmemory.recompute = \"{recompute}\"\n",
                2 * pp * chunks,
                2 * pp * dp,
                sequence && tp > 1,
            ));
            let plan = plan.plan().unwrap_or_else(|error| panic!("{error}"));
            let small = of_small(&plan);
            for stage in 0..pp {
                for (kind, real) in trace(&plan, stage) {
                    let op = kind.op();
                    // These ops depend on everything that a stage holds, and messages on its neighbours.
                    if matches!(op, Op::Step(_) | Op::Start(Transfer::Send(_))) {
                        continue;
                    }
                    // If gradients are reduced for every micro-batch, the delay of the weight parts decides whether an
                    // input part writes the gradients of the norms or accumulates them. Only the kernels differ, and
                    // only a little.
                    let begins_or_adds = schedule == "zero-bubble" && zero >= 2;
                    let writes = matches!(op.computation(), Some(Computation::Backward(_)))
                        || matches!(op, Op::Start(Transfer::Reduce { .. }));
                    if begins_or_adds && writes {
                        prop_assert_eq!(small.get(&kind).map(|t| &t.transfers), Some(&real.transfers));
                        continue;
                    }
                    let traced = small.get(&kind);
                    prop_assert_eq!(traced.map(|t| &t.kernels), Some(&real.kernels), "{} on stage {}", op, stage);
                    prop_assert_eq!(traced.map(|t| &t.transfers), Some(&real.transfers), "{} on stage {}", op, stage);
                    prop_assert_eq!(traced.map(|t| &t.events), Some(&real.events), "{} on stage {}", op, stage);
                }
            }
        }
    }
}

//! The predicted step of an order.

use std::cell::RefCell;
use std::collections::HashMap;

use kintsugi_plan::Plan;
use kintsugi_simulate::{TracedStep, links_of};
use kintsugi_spec::Placement;

/// Times orders of one plan. Orders whose links are the same take as long.
pub struct Timer<'a> {
    plan: &'a Plan,
    step: TracedStep,
    known: RefCell<HashMap<String, Option<f64>>>,
}

impl<'a> Timer<'a> {
    /// Traces the plan.
    pub fn new(plan: &'a Plan) -> Self {
        Timer { plan, step: TracedStep::new(plan), known: RefCell::default() }
    }

    /// Whether the first and the last stage sum the gradients of one table.
    pub fn is_tied(&self) -> bool {
        self.plan.model.tied && self.plan.mesh.pp() > 1
    }

    /// Seconds of a step if the nodes are in these pods; `None` if the speed of the device is unknown.
    pub fn seconds(&self, pods: &[usize]) -> Option<f64> {
        let names = |of: fn(usize, usize) -> usize| {
            pods.iter().enumerate().map(|(node, &pod)| of(node, pod).to_string()).collect()
        };
        let placement = Placement { nodes: names(|node, _| node), pods: names(|_, pod| pod) };
        let mut plan = self.plan.clone();
        plan.cluster = self.plan.cluster.placed(placement);
        let links = links_of(&plan);
        if let Some(&seconds) = self.known.borrow().get(&links) {
            return seconds;
        }
        let seconds = self.step.time(&plan).map(|timing| timing.step_s);
        self.known.borrow_mut().insert(links, seconds);
        seconds
    }
}

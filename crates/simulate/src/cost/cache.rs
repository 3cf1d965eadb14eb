//! The costs of many plans of one model and batch. Parts that several plans share are computed once.

use std::cell::OnceCell;
use std::sync::Arc;

use kintsugi_plan::{Mesh, Plan};

use super::bound::StepBound;
use super::costs::{BlockCosts, Costs, Messages, UnitCosts};
use super::device::DeviceModel;
use super::links::Links;
use super::trace::PlanTraces;
use crate::keys::{BlockCostKey, MessageCostKey, UnitCostKey};
use crate::memo::Memo;

/// Costs of plans that differ only in their strategy.
pub struct CostCache<'a> {
    device: &'a DeviceModel,
    links: Memo<Mesh, Links>,
    blocks: Memo<BlockCostKey, Arc<BlockCosts>>,
    units: Memo<UnitCostKey, Arc<UnitCosts>>,
    messages: Memo<MessageCostKey, Arc<Messages>>,
}

impl<'a> CostCache<'a> {
    /// Costs on a device.
    pub fn new(device: &'a DeviceModel) -> Self {
        CostCache {
            device,
            links: Memo::default(),
            blocks: Memo::default(),
            units: Memo::default(),
            messages: Memo::default(),
        }
    }

    /// The costs of a plan's ops.
    pub fn of(&self, plan: &Plan) -> Costs {
        let found = OnceCell::new();
        let costs = || found.get_or_init(|| self.compute(plan));
        Costs {
            blocks: self.blocks.get(BlockCostKey::of(plan), || Arc::clone(&costs().blocks)),
            units: self.units.get(UnitCostKey::of(plan), || Arc::clone(&costs().units)),
            messages: self.messages.get(MessageCostKey::of(plan), || Arc::clone(&costs().messages)),
        }
    }

    /// A time that no step of the plan is shorter than.
    pub fn bound(&self, plan: &Plan) -> StepBound {
        StepBound::of_step(plan, &self.of(plan))
    }

    /// The same for every plan that differs from this one only in its sharding.
    pub fn bound_of_passes(&self, plan: &Plan) -> StepBound {
        // Sharding decides whether a backward adds to gradients or begins them anew, which is all it changes in blocks.
        let adds = Plan { sharding: plan.sharding.unsharded(), ..plan.clone() };
        let begins = adds.with_micro_batches(1);
        let blocks = [&adds, &begins]
            .map(|plan| self.blocks.get(BlockCostKey::of(plan), || Arc::clone(&self.compute(plan).blocks)));
        let messages =
            self.messages.get(MessageCostKey::of(plan), || Arc::clone(&self.compute(plan).messages));
        StepBound::of_passes(plan, &blocks, &messages)
    }

    fn compute(&self, plan: &Plan) -> Costs {
        let links = self.links.get(plan.mesh, || Links::new(&plan.cluster, plan.mesh, &plan.framework));
        Costs::new(plan, &PlanTraces::new(plan), self.device, &links)
    }
}

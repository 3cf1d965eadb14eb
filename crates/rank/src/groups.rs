//! The groups that a rank belongs to.

use std::cell::RefCell;
use std::rc::Rc;

use kintsugi_comm::paper::{Log, PaperGroup};
use kintsugi_comm::{Communicator, Observed, RankFailure, Solo, TransferObserver};
use kintsugi_plan::{Coordinate, Group, Plan};

/// A rank's communicators: one for each axis of the mesh, for each part of the data-parallel axis if it is divided, and for
/// the tied token table.
pub struct Groups {
    /// The tensor-parallel group.
    pub tensor: Box<dyn Communicator>,
    /// The data-parallel group.
    pub data: Box<dyn Communicator>,
    /// The parts of the data-parallel group, if it is divided by level.
    pub data_parts: Vec<(Group, Box<dyn Communicator>)>,
    /// The stages of this rank's pipeline.
    pub pipeline: Box<dyn Communicator>,
    /// The first and the last stage, if both hold the tied token table.
    pub tied: Option<Box<dyn Communicator>>,
}

impl Groups {
    /// Makes the groups of the rank at `at`. `make` receives each group and its members, in order.
    pub fn new(
        plan: &Plan,
        at: Coordinate,
        mut make: impl FnMut(Group, &[usize]) -> Box<dyn Communicator>,
    ) -> Self {
        let mut group = |group| make(group, &plan.mesh.group(group, at, plan.cluster.topology));
        let parts: Vec<Group> = plan.sharding.groups().filter(|&part| part != Group::DATA).collect();
        Groups {
            data_parts: parts.into_iter().map(|part| (part, group(part))).collect(),
            tensor: group(Group::TENSOR),
            data: group(Group::DATA),
            pipeline: group(Group::PIPELINE),
            tied: plan.holds_tied_copy(at.pp()).then(|| group(Group::Tied)),
        }
    }

    /// This rank's communicator of a group.
    pub fn get(&self, group: Group) -> &dyn Communicator {
        match group {
            Group::TENSOR => &*self.tensor,
            Group::DATA => &*self.data,
            Group::PIPELINE => &*self.pipeline,
            Group::Tied => self.tied.as_deref().expect("only stages with a tied copy reduce it"),
            Group::Along(..) => {
                let part = self.data_parts.iter().find(|(part, _)| *part == group);
                &*part.unwrap_or_else(|| panic!("{group} is no part of this plan")).1
            }
        }
    }

    /// Tells an observer about every transfer from now on.
    pub fn observe(&mut self, observer: &Rc<dyn TransferObserver>) {
        let observed = |group: &mut Box<dyn Communicator>, name| {
            let inner = std::mem::replace(group, Box::new(Solo));
            *group = Box::new(Observed::new(inner, name, Rc::clone(observer)));
        };
        observed(&mut self.tensor, Group::TENSOR);
        observed(&mut self.data, Group::DATA);
        observed(&mut self.pipeline, Group::PIPELINE);
        if let Some(tied) = &mut self.tied {
            observed(tied, Group::Tied);
        }
        for (group, part) in &mut self.data_parts {
            observed(part, *group);
        }
    }

    /// Why a transfer of this rank failed, if one did.
    pub fn failure(&self) -> Option<RankFailure> {
        let parts = self.data_parts.iter().map(|(_, part)| part);
        let groups = [&self.tensor, &self.data, &self.pipeline].into_iter().chain(&self.tied).chain(parts);
        groups.into_iter().find_map(|group| group.failure())
    }
}

/// Groups that only log what would be sent.
pub fn paper_groups(plan: &Plan, at: Coordinate, log: &Rc<RefCell<Log>>) -> Groups {
    Groups::new(plan, at, |group, members| {
        let index = plan.mesh.group_index(group, at, plan.cluster.topology);
        Box::new(PaperGroup::new(group, members.len(), index, Rc::clone(log)))
    })
}

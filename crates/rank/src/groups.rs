//! The groups that a rank belongs to.

use std::cell::RefCell;
use std::rc::Rc;

use kintsugi_comm::paper::{Log, PaperGroup};
use kintsugi_comm::{Communicator, ObservedGroup, RankFailure, Solo, TransferObserver};
use kintsugi_plan::{Axis, Coordinate, Group, Plan, Span};

/// A rank's communicators: one for each axis of the mesh, for each part of the data-parallel axis if it is divided, for
/// the tied token table if its stage holds a copy, and for the nodes if states are copied.
pub struct Groups(Vec<(Group, Box<dyn Communicator>)>);

impl Groups {
    /// Makes the groups of the rank at `at`. `make` receives each group and its members, in order.
    pub fn new(
        plan: &Plan,
        at: Coordinate,
        mut make: impl FnMut(Group, &[usize]) -> Box<dyn Communicator>,
    ) -> Self {
        let parts = plan.sharding.groups().filter(|&part| part != Group::DATA);
        let axes = Axis::ALL.into_iter().rev().map(|axis| Group::Along(axis, Span::All));
        let tied = plan.holds_tied_copy(at.pp()).then_some(Group::Tied);
        let nodes = plan.copies_states().then_some(Group::Nodes);
        let mut with_members =
            |group| (group, make(group, &plan.mesh.group(group, at, plan.cluster.topology)));
        Groups(parts.chain(axes).chain(tied).chain(nodes).map(&mut with_members).collect())
    }

    /// This rank's communicator of a group.
    pub fn get(&self, group: Group) -> &dyn Communicator {
        let own = self.0.iter().find(|(own, _)| *own == group);
        &*own.unwrap_or_else(|| panic!("this rank has no group \"{group}\"")).1
    }

    /// Replaces each communicator by what `wrap` makes of it.
    pub fn wrap(&mut self, wrap: impl Fn(Group, Box<dyn Communicator>) -> Box<dyn Communicator>) {
        for (group, communicator) in &mut self.0 {
            *communicator = wrap(*group, std::mem::replace(communicator, Box::new(Solo)));
        }
    }

    /// Tells an observer about every transfer from now on.
    pub fn observe(&mut self, observer: &Rc<dyn TransferObserver>) {
        self.wrap(|group, inner| Box::new(ObservedGroup::new(inner, group, Rc::clone(observer))));
    }

    /// Why a transfer of this rank failed, if one did.
    pub fn failure(&self) -> Option<RankFailure> {
        self.0.iter().find_map(|(_, group)| group.failure())
    }
}

/// Groups that only log what would be sent.
pub fn paper_groups(plan: &Plan, at: Coordinate, log: &Rc<RefCell<Log>>) -> Groups {
    Groups::new(plan, at, |group, members| {
        let index = plan.mesh.group_index(group, at, plan.cluster.topology);
        Box::new(PaperGroup::new(group, members.len(), index, Rc::clone(log)))
    })
}

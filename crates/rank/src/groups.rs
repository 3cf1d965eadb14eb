//! The groups that a rank belongs to.

use std::cell::RefCell;
use std::rc::Rc;

use kintsugi_comm::Communicator;
use kintsugi_comm::paper::{Log, PaperGroup};
use kintsugi_plan::{Axis, Coordinate, Over, Plan};

/// A rank's communicators, one per axis of the mesh and one for the tied token table.
pub struct Groups {
    /// The tensor-parallel group: ranks that hold parts of the same matrices.
    pub tensor: Box<dyn Communicator>,
    /// The data-parallel group: ranks that hold the same parameters and read different samples.
    pub data: Box<dyn Communicator>,
    /// The stages of this rank's pipeline.
    pub pipeline: Box<dyn Communicator>,
    /// The first and the last stage, if both hold the tied token table.
    pub tied: Option<Box<dyn Communicator>>,
}

impl Groups {
    /// Makes the groups of the rank at `at`. `make` receives each group's name, its members and this rank's index.
    pub fn new(
        plan: &Plan,
        at: Coordinate,
        mut make: impl FnMut(&'static str, &[usize], usize) -> Box<dyn Communicator>,
    ) -> Self {
        let mut axis = |axis: Axis, index| make(axis.name(), &plan.mesh.group(axis, at), index);
        let tensor = axis(Axis::Tensor, at.tp);
        let data = axis(Axis::Data, at.dp);
        let pipeline = axis(Axis::Pipeline, at.pp);
        let tied = plan
            .holds_tied_copy(at.pp)
            .then(|| make("tied", &plan.mesh.tied_group(at), usize::from(at.pp > 0)));
        Groups { tensor, data, pipeline, tied }
    }

    /// The group along an axis.
    pub fn axis(&self, axis: Axis) -> &dyn Communicator {
        match axis {
            Axis::Tensor => &*self.tensor,
            Axis::Data => &*self.data,
            Axis::Pipeline => &*self.pipeline,
        }
    }

    /// The group over which a gradient is reduced.
    pub fn over(&self, over: Over) -> &dyn Communicator {
        match over {
            Over::Tensor => &*self.tensor,
            Over::Data => &*self.data,
            Over::Tied => self.tied.as_deref().expect("only stages with a tied copy reduce it"),
        }
    }
}

/// Groups that only log what would be sent.
pub fn paper_groups(plan: &Plan, at: Coordinate, log: &Rc<RefCell<Log>>) -> Groups {
    Groups::new(plan, at, |name, members, index| {
        Box::new(PaperGroup::new(name, members.len(), index, Rc::clone(log)))
    })
}

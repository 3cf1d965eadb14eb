//! The nodes of a plan as a grid: which of them hold which stages and replicas.

use kintsugi_plan::Plan;
use kintsugi_spec::Axis;

/// The nodes of a plan in the order of its ranks, as rows of stages. Node `width · row + column` holds the ranks of a row of
/// stages in a column; messages between stages go along columns, and the replicas of a stage are in its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Stages, or groups of stages that share a node. 1 if nodes and stages have no common boundaries.
    pub rows: usize,
    /// Nodes of a row.
    pub width: usize,
    /// Whether only the replicas of a stage communicate along a row, and only stages along a column.
    pub is_exact: bool,
}

impl Layout {
    /// The layout of a plan on nodes of `per_node` ranks.
    pub fn of(plan: &Plan, per_node: usize) -> Self {
        let (ranks, stage) = (plan.mesh.ranks(), plan.mesh.ranks_per_stage());
        let nodes = ranks.div_ceil(per_node);
        let inside = plan.mesh.stride(Axis::Data) <= per_node;
        if stage.is_multiple_of(per_node) {
            Layout { rows: plan.mesh.pp(), width: stage / per_node, is_exact: inside }
        } else if per_node.is_multiple_of(stage) {
            Layout { rows: nodes, width: 1, is_exact: true }
        } else {
            Layout { rows: 1, width: nodes, is_exact: false }
        }
    }

    /// The number of nodes.
    pub fn nodes(self) -> usize {
        self.rows * self.width
    }
}

//! The grid of ranks. Its axes and their order are those of [`Axis::ALL`].

use std::collections::BTreeMap;
use std::fmt;

use kintsugi_spec::{Axis, ByAxis, Group, Level, Span, Topology};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The sizes of the axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh(ByAxis<usize>);

/// A rank's position on the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinate(ByAxis<usize>);

impl Mesh {
    /// A single rank.
    pub const ONE: Mesh = Mesh([1; Axis::ALL.len()]);

    /// The same mesh with another size of an axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, size: usize) -> Mesh {
        self.0[axis] = size;
        self
    }

    /// The sizes of all axes, outermost first.
    pub fn sizes(&self) -> ByAxis<usize> {
        self.0
    }

    /// Size of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.0[axis]
    }

    /// Pipeline stages.
    pub fn pp(&self) -> usize {
        self.size(Axis::Pipeline)
    }

    /// Data-parallel replicas.
    pub fn dp(&self) -> usize {
        self.size(Axis::Data)
    }

    /// Context-parallel ranks, which share the tokens of a sample.
    pub fn cp(&self) -> usize {
        self.size(Axis::Context)
    }

    /// Tensor-parallel parts.
    pub fn tp(&self) -> usize {
        self.size(Axis::Tensor)
    }

    /// The ranks that hold the same parameters: those of dp and cp, which are next to each other in the mesh.
    pub fn replicas(&self) -> usize {
        self.dp() * self.cp()
    }

    /// The number of a rank among those that hold the same parameters.
    pub fn replica(&self, at: Coordinate) -> usize {
        at.dp() * self.cp() + at.cp()
    }

    /// The position with another number among the ranks that hold the same parameters.
    fn with_replica(&self, at: Coordinate, replica: usize) -> Coordinate {
        at.with(Axis::Data, replica / self.cp()).with(Axis::Context, replica % self.cp())
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.iter().product()
    }

    /// Number of ranks of a stage.
    pub fn ranks_per_stage(&self) -> usize {
        self.stride(Axis::Pipeline)
    }

    /// How far apart two ranks are that are next to each other along an axis.
    pub fn stride(&self, axis: Axis) -> usize {
        self.0[axis as usize + 1..].iter().product()
    }

    /// The rank at a coordinate.
    pub fn rank(&self, at: Coordinate) -> usize {
        Axis::ALL.into_iter().fold(0, |rank, axis| rank * self.size(axis) + at.along(axis))
    }

    /// The coordinate of a rank.
    pub fn coordinate(&self, rank: usize) -> Coordinate {
        Coordinate(Axis::ALL.map(|axis| rank / self.stride(axis) % self.size(axis)))
    }

    /// The number of data-parallel ranks inside one package, node, pod or cluster; `None` if not all of these have the same
    /// number.
    pub fn replicas_inside(&self, level: Level, topology: Topology) -> Option<usize> {
        let unit = topology.ranks_inside(level).unwrap_or(usize::MAX);
        let (all, stride) = (self.replicas(), self.stride(Axis::Context));
        if self.ranks() <= unit {
            return Some(all);
        }
        if stride >= unit || all == 1 {
            return Some(1);
        }
        let replicas = unit / stride;
        let aligned = unit.is_multiple_of(stride);
        (aligned && (all.is_multiple_of(replicas) || replicas.is_multiple_of(all))).then(|| replicas.min(all))
    }

    /// Number of ranks in a group.
    pub fn group_size(&self, group: Group, topology: Topology) -> usize {
        match group {
            Group::Along(axis, span) => self.steps(axis, span, topology).0,
            Group::Tied => 2,
            Group::Nodes => self.ranks().div_ceil(self.ranks_of_node(topology)),
        }
    }

    /// The index in a group of the rank at `at`.
    pub fn group_index(&self, group: Group, at: Coordinate, topology: Topology) -> usize {
        match group {
            Group::Along(axis, span) => {
                let (ranks, stride) = self.steps(axis, span, topology);
                self.place(axis, at) / stride % ranks
            }
            Group::Tied => usize::from(at.pp() > 0),
            Group::Nodes => self.rank(at) / self.ranks_of_node(topology),
        }
    }

    /// Member `index` of the group of the rank at `at`.
    pub fn group_member(&self, group: Group, at: Coordinate, index: usize, topology: Topology) -> usize {
        self.rank(match group {
            Group::Nodes => {
                let per_node = self.ranks_of_node(topology);
                return index * per_node + self.rank(at) % per_node;
            }
            Group::Along(axis, span) => {
                let stride = self.steps(axis, span, topology).1;
                let first = self.place(axis, at) - self.group_index(group, at, topology) * stride;
                let place = first + index * stride;
                if axis == Axis::Data { self.with_replica(at, place) } else { at.with(axis, place) }
            }
            Group::Tied => at.with(Axis::Pipeline, index * (self.pp() - 1)),
        })
    }

    /// The members of the group of the rank at `at`, in order.
    pub fn group(&self, group: Group, at: Coordinate, topology: Topology) -> Vec<usize> {
        let ranks = self.group_size(group, topology);
        (0..ranks).map(|index| self.group_member(group, at, index, topology)).collect()
    }

    /// Ranks of a node.
    fn ranks_of_node(&self, topology: Topology) -> usize {
        topology.per_node.map_or(self.ranks(), |ranks| ranks.min(self.ranks()))
    }

    /// The place of a rank along an axis; along dp that among all ranks with the same parameters.
    fn place(&self, axis: Axis, at: Coordinate) -> usize {
        if axis == Axis::Data { self.replica(at) } else { at.along(axis) }
    }

    /// The number of ranks in a span of an axis, and the distance between two of them along the axis. Only the
    /// data-parallel axis is divided by level, and only by levels that divide it evenly.
    fn steps(&self, axis: Axis, span: Span, topology: Topology) -> (usize, usize) {
        let inside = |level: Level| {
            assert_eq!(axis, Axis::Data, "only dp is divided by level");
            let ranks = self.replicas_inside(level, topology);
            ranks.unwrap_or_else(|| panic!("{level:?}s divide {} replicas unevenly", self.replicas()))
        };
        match span {
            Span::All if axis == Axis::Data => (self.replicas(), 1),
            Span::All => (self.size(axis), 1),
            Span::Inside(level) => (inside(level), 1),
            Span::Across(level) => (self.replicas() / inside(level), inside(level)),
            Span::Between(inner, outer) => (inside(outer) / inside(inner), inside(inner)),
        }
    }
}

/// As in "tp 8 · pp 4 · dp 2", or "tp 8 · cp 2 · pp 4 · dp 2" if sequences are divided.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "tp {} · ", self.tp())?;
        if self.cp() > 1 {
            write!(f, "cp {} · ", self.cp())?;
        }
        write!(f, "pp {} · dp {}", self.pp(), self.dp())
    }
}

impl Coordinate {
    /// The first rank of a stage.
    pub fn of_stage(stage: usize) -> Coordinate {
        Coordinate([0; Axis::ALL.len()]).with(Axis::Pipeline, stage)
    }

    /// The same position with another one along an axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, position: usize) -> Coordinate {
        self.0[axis] = position;
        self
    }

    /// The position along an axis.
    pub fn along(self, axis: Axis) -> usize {
        self.0[axis]
    }

    /// Pipeline stage.
    pub fn pp(self) -> usize {
        self.along(Axis::Pipeline)
    }

    /// Replica.
    pub fn dp(self) -> usize {
        self.along(Axis::Data)
    }

    /// Context-parallel rank: which slices of a sample it has.
    pub fn cp(self) -> usize {
        self.along(Axis::Context)
    }

    /// Tensor-parallel part.
    pub fn tp(self) -> usize {
        self.along(Axis::Tensor)
    }
}

/// Written as a map from the names of the axes to their sizes.
impl Serialize for Mesh {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(Axis::ALL.map(|axis| (axis.name(), self.size(axis))))
    }
}

/// An axis that is not named has one rank.
impl<'de> Deserialize<'de> for Mesh {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let sizes: BTreeMap<String, usize> = Deserialize::deserialize(deserializer)?;
        Ok(Mesh(Axis::ALL.map(|axis| sizes.get(axis.name()).copied().unwrap_or(1))))
    }
}

/// The divisors of a number, smallest first: the possible sizes of an axis.
pub fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |&divisor| n.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(pp: usize, dp: usize, tp: usize) -> Mesh {
        Mesh::ONE.with(Axis::Pipeline, pp).with(Axis::Data, dp).with(Axis::Tensor, tp)
    }

    #[test]
    fn ranks_and_coordinates_are_inverse_and_tp_is_innermost() {
        let mesh = mesh(3, 4, 2);
        for rank in 0..mesh.ranks() {
            assert_eq!(mesh.rank(mesh.coordinate(rank)), rank);
        }
        let at = Coordinate::of_stage(1).with(Axis::Data, 2).with(Axis::Tensor, 1);
        let members = |group| mesh.group(group, at, Topology::ONE_NODE);
        assert_eq!(members(Group::TENSOR), [12, 13]);
        assert_eq!(members(Group::DATA), [9, 11, 13, 15]);
        assert_eq!(members(Group::PIPELINE), [5, 13, 21]);
        assert_eq!(members(Group::Tied), [5, 21]);
        for group in [Group::TENSOR, Group::DATA, Group::PIPELINE, Group::Nodes] {
            assert_eq!(members(group)[mesh.group_index(group, at, Topology::ONE_NODE)], mesh.rank(at));
        }
        let nodes_of_six = Topology { per_package: 1, per_node: Some(6), nodes_per_pod: None };
        assert_eq!(mesh.group(Group::Nodes, at, nodes_of_six), [1, 7, 13, 19]);
        assert_eq!(mesh.group_index(Group::Nodes, at, nodes_of_six), 2);
    }

    #[test]
    fn the_ranks_of_dp_and_cp_are_the_replicas_of_the_parameters() {
        let mut topology = Topology::ONE_NODE;
        (topology.per_package, topology.per_node) = (2, Some(8));
        let mesh = mesh(2, 2, 2).with(Axis::Context, 4);
        for rank in 0..mesh.ranks() {
            assert_eq!(mesh.rank(mesh.coordinate(rank)), rank);
        }
        let at = mesh.coordinate(16 + 8 + 2 * 2 + 1);
        assert_eq!((at.pp(), at.dp(), at.cp(), at.tp(), mesh.replica(at)), (1, 1, 2, 1, 6));
        let members = |group| mesh.group(group, at, topology);
        assert_eq!(members(Group::CONTEXT), [25, 27, 29, 31]);
        assert_eq!(members(Group::DATA), [17, 19, 21, 23, 25, 27, 29, 31]);
        assert_eq!(members(Group::PIPELINE), [13, 29]);
        let inside = Group::Along(Axis::Data, Span::Inside(Level::Node));
        assert_eq!(members(inside), [25, 27, 29, 31]);
        assert_eq!(members(Group::Along(Axis::Data, Span::Across(Level::Node))), [21, 29]);
        assert_eq!(mesh.group_index(Group::DATA, at, topology), 6);
        assert_eq!(mesh.group_index(inside, at, topology), 2);
    }

    #[test]
    fn a_span_divides_an_axis_into_parts_that_meet_once() {
        // Packages of 2 ranks and nodes of 8, as on Frontier.
        let topology = Topology { per_package: 2, per_node: Some(8), nodes_per_pod: None };
        let mesh = mesh(1, 16, 1);
        let members = |span, dp| {
            mesh.group(Group::Along(Axis::Data, span), Coordinate::of_stage(0).with(Axis::Data, dp), topology)
        };
        assert_eq!(members(Span::Inside(Level::Package), 5), [4, 5]);
        assert_eq!(members(Span::Across(Level::Package), 5), [1, 3, 5, 7, 9, 11, 13, 15]);
        assert_eq!(members(Span::Inside(Level::Node), 5), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(members(Span::Across(Level::Node), 5), [5, 13]);
        assert_eq!(members(Span::Between(Level::Package, Level::Node), 5), [1, 3, 5, 7]);
        assert_eq!(members(Span::Between(Level::Package, Level::Node), 12), [8, 10, 12, 14]);
        for (level, rank) in Level::ALL.into_iter().zip(0..) {
            let (inside, across) = (members(Span::Inside(level), rank), members(Span::Across(level), rank));
            assert_eq!(inside.len() * across.len(), mesh.dp());
            assert_eq!(inside.iter().filter(|rank| across.contains(rank)).collect::<Vec<_>>(), [&rank]);
        }
    }

    #[test]
    fn replicas_are_counted_where_every_unit_has_as_many() {
        for (pp, dp, tp) in
            (1..=3).flat_map(|pp| (1..=12).flat_map(move |dp| (1..=4).map(move |tp| (pp, dp, tp))))
        {
            for (per_package, per_node, nodes_per_pod) in [
                (1, None, None),
                (2, Some(4), None),
                (2, Some(8), Some(2)),
                (3, Some(6), Some(3)),
                (4, Some(4), None),
                (1, Some(2), Some(3)),
            ] {
                let (mesh, topology) = (mesh(pp, dp, tp), Topology { per_package, per_node, nodes_per_pod });
                for level in Level::ALL {
                    // By definition: each group of replicas, cut where the unit changes, has parts of one size.
                    let starts =
                        (0..mesh.ranks()).map(|rank| mesh.coordinate(rank)).filter(|at| at.dp() == 0);
                    let mut sizes: Vec<usize> = Vec::new();
                    for at in starts {
                        let group: Vec<usize> =
                            (0..dp).map(|dp| mesh.rank(at.with(Axis::Data, dp))).collect();
                        let parts =
                            group.chunk_by(|&a, &b| topology.unit(level, a) == topology.unit(level, b));
                        sizes.extend(parts.map(<[usize]>::len));
                    }
                    sizes.dedup();
                    let even = (sizes.len() == 1).then(|| sizes[0]);
                    assert_eq!(
                        mesh.replicas_inside(level, topology),
                        even,
                        "{mesh:?} {topology:?} {level:?}"
                    );
                }
            }
        }
    }
}

//! The grid of ranks. Its axes are pp (outermost), dp and tp (innermost, so that it gets the fastest links).

use kintsugi_spec::{Axis, Group, Span, Topology};
use serde::Serialize;

/// The sizes of the axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Mesh {
    /// Pipeline stages.
    pub pp: usize,
    /// Data-parallel replicas.
    pub dp: usize,
    /// Tensor-parallel parts.
    pub tp: usize,
}

/// A rank's position on the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinate {
    /// Pipeline stage.
    pub pp: usize,
    /// Replica.
    pub dp: usize,
    /// Tensor-parallel part.
    pub tp: usize,
}

impl Mesh {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.pp * self.dp * self.tp
    }

    /// Size of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipeline => self.pp,
            Axis::Data => self.dp,
            Axis::Tensor => self.tp,
        }
    }

    /// The rank at a coordinate.
    pub fn rank(&self, at: Coordinate) -> usize {
        (at.pp * self.dp + at.dp) * self.tp + at.tp
    }

    /// The coordinate of a rank.
    pub fn coordinate(&self, rank: usize) -> Coordinate {
        Coordinate { pp: rank / (self.dp * self.tp), dp: rank / self.tp % self.dp, tp: rank % self.tp }
    }

    /// Number of ranks in a group that spans its whole axis.
    pub fn group_size(&self, group: Group) -> usize {
        match group {
            Group::Along(axis, Span::All) => self.size(axis),
            Group::Along(_, Span::Inside(_) | Span::Across(_)) => panic!("{group} depends on the topology"),
            Group::Tied => 2,
        }
    }

    /// The index in a group of the rank at `at`. The group spans its whole axis.
    pub fn group_index(&self, group: Group, at: Coordinate) -> usize {
        match group {
            Group::Along(Axis::Pipeline, Span::All) => at.pp,
            Group::Along(Axis::Data, Span::All) => at.dp,
            Group::Along(Axis::Tensor, Span::All) => at.tp,
            Group::Along(_, Span::Inside(_) | Span::Across(_)) => panic!("{group} depends on the topology"),
            Group::Tied => usize::from(at.pp > 0),
        }
    }

    /// Member `index` of the group of the rank at `at`. The group spans its whole axis.
    pub fn group_member(&self, group: Group, at: Coordinate, index: usize) -> usize {
        self.rank(match group {
            Group::Along(Axis::Pipeline, Span::All) => Coordinate { pp: index, ..at },
            Group::Along(Axis::Data, Span::All) => Coordinate { dp: index, ..at },
            Group::Along(Axis::Tensor, Span::All) => Coordinate { tp: index, ..at },
            Group::Along(_, Span::Inside(_) | Span::Across(_)) => panic!("{group} depends on the topology"),
            Group::Tied => Coordinate { pp: index * (self.pp - 1), ..at },
        })
    }

    /// The members of the group of the rank at `at`, in order.
    pub fn group(&self, group: Group, at: Coordinate, topology: Topology) -> Vec<usize> {
        let along = |axis| {
            let whole = Group::Along(axis, Span::All);
            (0..self.size(axis)).map(move |i| self.group_member(whole, at, i))
        };
        let me = self.rank(at);
        match group {
            Group::Along(axis, Span::Inside(level)) => {
                along(axis).filter(|&rank| topology.unit(level, rank) == topology.unit(level, me)).collect()
            }
            Group::Along(axis, Span::Across(level)) => {
                let place = |rank: usize| {
                    along(axis)
                        .filter(|&r| r < rank && topology.unit(level, r) == topology.unit(level, rank))
                        .count()
                };
                along(axis).filter(|&rank| place(rank) == place(me)).collect()
            }
            Group::Along(_, Span::All) | Group::Tied => {
                (0..self.group_size(group)).map(|i| self.group_member(group, at, i)).collect()
            }
        }
    }
}

/// The divisors of a number, smallest first: the possible sizes of an axis.
pub fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |&divisor| n.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use kintsugi_spec::Level;

    use super::*;

    #[test]
    fn ranks_and_coordinates_are_inverse_and_tp_is_innermost() {
        let mesh = Mesh { pp: 3, dp: 4, tp: 2 };
        for rank in 0..mesh.ranks() {
            assert_eq!(mesh.rank(mesh.coordinate(rank)), rank);
        }
        let at = Coordinate { pp: 1, dp: 2, tp: 1 };
        let members = |group| mesh.group(group, at, Topology::ONE_NODE);
        assert_eq!(members(Group::TENSOR), [12, 13]);
        assert_eq!(members(Group::DATA), [9, 11, 13, 15]);
        assert_eq!(members(Group::PIPELINE), [5, 13, 21]);
        assert_eq!(members(Group::Tied), [5, 21]);
        for group in [Group::TENSOR, Group::DATA, Group::PIPELINE] {
            assert_eq!(members(group)[mesh.group_index(group, at)], mesh.rank(at));
        }
    }

    #[test]
    fn a_span_divides_an_axis_into_parts_that_meet_once() {
        // Packages of 2 ranks and nodes of 8, as on Frontier.
        let (mesh, topology) =
            (Mesh { pp: 1, dp: 16, tp: 1 }, Topology { per_package: 2, per_node: Some(8) });
        let members =
            |span, dp| mesh.group(Group::Along(Axis::Data, span), Coordinate { pp: 0, dp, tp: 0 }, topology);
        assert_eq!(members(Span::Inside(Level::Package), 5), [4, 5]);
        assert_eq!(members(Span::Across(Level::Package), 5), [1, 3, 5, 7, 9, 11, 13, 15]);
        assert_eq!(members(Span::Inside(Level::Node), 5), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(members(Span::Across(Level::Node), 5), [5, 13]);
        for (level, rank) in [Level::Package, Level::Node, Level::Cluster].into_iter().zip(0..) {
            let (inside, across) = (members(Span::Inside(level), rank), members(Span::Across(level), rank));
            assert_eq!(inside.len() * across.len(), mesh.dp);
            assert_eq!(inside.iter().filter(|rank| across.contains(rank)).collect::<Vec<_>>(), [&rank]);
        }
    }
}

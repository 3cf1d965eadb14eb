//! The grid of ranks. Its axes are pp (outermost), dp and tp (innermost, so that it gets the fastest links).

use serde::Serialize;

/// An axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Stages of the pipeline.
    Pipeline,
    /// Data-parallel replicas.
    Data,
    /// Tensor-parallel parts of every matrix.
    Tensor,
}

impl Axis {
    /// The name used in configurations and outputs.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Pipeline => "pp",
            Axis::Data => "dp",
            Axis::Tensor => "tp",
        }
    }
}

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

    /// The ranks that differ from `at` along `axis` only, in order.
    pub fn group(&self, axis: Axis, at: Coordinate) -> Vec<usize> {
        let member = |i| match axis {
            Axis::Pipeline => Coordinate { pp: i, ..at },
            Axis::Data => Coordinate { dp: i, ..at },
            Axis::Tensor => Coordinate { tp: i, ..at },
        };
        (0..self.size(axis)).map(|i| self.rank(member(i))).collect()
    }

    /// The ranks of the first and the last stage that hold the same part of the token table.
    pub fn tied_group(&self, at: Coordinate) -> Vec<usize> {
        [0, self.pp - 1].map(|pp| self.rank(Coordinate { pp, ..at })).to_vec()
    }
}

/// The divisors of a number, smallest first: the possible sizes of an axis.
pub fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |&divisor| n.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_coordinates_are_inverse_and_tp_is_innermost() {
        let mesh = Mesh { pp: 3, dp: 4, tp: 2 };
        for rank in 0..mesh.ranks() {
            assert_eq!(mesh.rank(mesh.coordinate(rank)), rank);
        }
        let at = Coordinate { pp: 1, dp: 2, tp: 1 };
        assert_eq!(mesh.group(Axis::Tensor, at), [12, 13]);
        assert_eq!(mesh.group(Axis::Data, at), [9, 11, 13, 15]);
        assert_eq!(mesh.group(Axis::Pipeline, at), [5, 13, 21]);
    }
}

//! The collectives.

use crate::Operation;

/// A collective over a group of ranks, in place over a part of a buffer.
///
/// That part is divided into one chunk per rank (see [`crate::ring::chunk`]). Chunk `i` belongs to rank `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Afterwards every rank has the sum over all ranks.
    AllReduce,
    /// Each rank's own chunk is the input. Afterwards every rank has every chunk.
    AllGather,
    /// Afterwards each rank's own chunk is the sum over all ranks. Its other chunks are undefined.
    ReduceScatter,
}

impl Collective {
    /// The operation that its bytes are counted for.
    pub fn operation(self) -> Operation {
        match self {
            Collective::AllReduce => Operation::AllReduce,
            Collective::AllGather => Operation::AllGather,
            Collective::ReduceScatter => Operation::ReduceScatter,
        }
    }
}

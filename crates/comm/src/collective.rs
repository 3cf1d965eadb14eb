//! The collectives.

use crate::Operation;

/// A collective over a group of ranks, in place over a part of a buffer.
///
/// That part is divided into one chunk per rank (see [`crate::ring::chunk`]). Chunk `i` belongs to rank `i`. Only an all-to-all
/// divides it otherwise: into two halves of one chunk per rank, all of the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Afterwards every rank has the sum over all ranks.
    AllReduce,
    /// Each rank's own chunk is the input. Afterwards every rank has every chunk.
    AllGather,
    /// Afterwards each rank's own chunk is the sum over all ranks. Its other chunks are undefined.
    ReduceScatter,
    /// Chunk `j` of the first half of rank `i` goes to chunk `i` of the second half of rank `j`. The first half stays. A rank's own
    /// chunk is copied, too.
    AllToAll,
}

impl Collective {
    /// The operation that its bytes are counted for.
    pub fn operation(self) -> Operation {
        match self {
            Collective::AllReduce => Operation::AllReduce,
            Collective::AllGather => Operation::AllGather,
            Collective::ReduceScatter => Operation::ReduceScatter,
            Collective::AllToAll => Operation::AllToAll,
        }
    }

    /// Whether it adds elements, which must be floats then.
    pub fn sums(self) -> bool {
        match self {
            Collective::AllReduce | Collective::ReduceScatter => true,
            Collective::AllGather | Collective::AllToAll => false,
        }
    }
}

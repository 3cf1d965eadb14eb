//! The ring algorithm as arithmetic: which chunk each rank receives in each step, and how many elements cross each link.
//!
//! The transports and the planner both use these functions. Rank `r` receives only from rank `r − 1`. The ring sends the
//! fewest bytes possible (Patarasuk and Yuan, 2009). An all-to-all does not use the ring: see `all_to_all.rs`.

use std::ops::Range;

use crate::Collective;

/// The range of chunk `index` if `len` elements are divided into `ranks` chunks.
///
/// Sizes differ by at most one. The larger chunks come first.
pub fn chunk(len: usize, ranks: usize, index: usize) -> Range<usize> {
    let start = |i: usize| i * (len / ranks) + i.min(len % ranks);
    start(index)..start(index + 1)
}

/// What a rank does with a chunk from its predecessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Adds it to its own chunk.
    Add,
    /// Overwrites its own chunk with it.
    Copy,
}

/// What a rank does in one step around the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStep {
    /// The chunk that the rank receives from its predecessor.
    pub chunk: usize,
    /// What the rank does with the chunk.
    pub action: Action,
}

/// The number of steps of a collective on every rank.
pub fn step_count(collective: Collective, ranks: usize) -> usize {
    match collective {
        Collective::AllReduce => 2 * (ranks - 1),
        Collective::AllGather | Collective::ReduceScatter => ranks - 1,
        Collective::AllToAll => no_ring(),
    }
}

/// What `rank` does in step `index` of a collective.
///
/// In every phase, the successor of a rank receives in the next step the chunk that the rank receives in this step. The
/// reduction of chunk `c` starts at rank `c + 1` and ends at its owner, rank `c`. The gather starts at the owner.
pub fn step(collective: Collective, ranks: usize, rank: usize, index: usize) -> RingStep {
    assert!(index < step_count(collective, ranks), "step {index} of {collective:?} over {ranks} ranks");
    let reduce = |i: usize| RingStep { chunk: (rank + 2 * ranks - 2 - i) % ranks, action: Action::Add };
    let gather = |i: usize| RingStep { chunk: (rank + ranks - 1 - i) % ranks, action: Action::Copy };
    match collective {
        Collective::ReduceScatter => reduce(index),
        Collective::AllGather => gather(index),
        Collective::AllReduce if index < ranks - 1 => reduce(index),
        Collective::AllReduce => gather(index - (ranks - 1)),
        Collective::AllToAll => no_ring(),
    }
}

/// Elements that rank `from` sends to its successor in all steps of a collective over `len` elements.
pub fn link_elements(collective: Collective, len: usize, ranks: usize, from: usize) -> usize {
    let all_but = |index: usize| len - chunk(len, ranks, index % ranks).len();
    // A rank sends every chunk except one: in a reduction its own chunk, which ends here, and in a gather its successor's.
    match collective {
        Collective::ReduceScatter => all_but(from),
        Collective::AllGather => all_but(from + 1),
        Collective::AllReduce => all_but(from) + all_but(from + 1),
        Collective::AllToAll => no_ring(),
    }
}

fn no_ring() -> ! {
    panic!("an all-to-all does not go around a ring")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COLLECTIVES: [Collective; 3] =
        [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter];

    proptest! {
        #[test]
        fn chunks_are_balanced_and_cover_everything(len in 0_usize..1000, ranks in 1_usize..20) {
            let chunks: Vec<_> = (0..ranks).map(|i| chunk(len, ranks, i)).collect();
            prop_assert_eq!((chunks[0].start, chunks[ranks - 1].end), (0, len));
            prop_assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert!(chunks.iter().all(|c| c.len() == len / ranks || c.len() == len.div_ceil(ranks)));
        }

        #[test]
        fn links_carry_what_the_steps_pass(len in 0_usize..1000, ranks in 1_usize..20) {
            for collective in COLLECTIVES {
                for from in 0..ranks {
                    let passed: usize = (0..step_count(collective, ranks))
                        .map(|i| step(collective, ranks, (from + 1) % ranks, i).chunk)
                        .map(|index| chunk(len, ranks, index).len())
                        .sum();
                    prop_assert_eq!(link_elements(collective, len, ranks, from), passed);
                }
            }
        }

        #[test]
        fn all_links_together_carry_every_chunk_past_every_other_rank(len in 0_usize..1000, ranks in 1_usize..20) {
            for collective in COLLECTIVES {
                let sum: usize = (0..ranks).map(|from| link_elements(collective, len, ranks, from)).sum();
                prop_assert_eq!(sum, step_count(collective, ranks) * len);
            }
        }
    }

    #[test]
    fn a_chunk_is_received_the_step_after_the_predecessor_received_it() {
        for collective in COLLECTIVES {
            for (ranks, rank) in [(2, 0), (2, 1), (3, 0), (5, 2), (8, 7)] {
                for i in 1..step_count(collective, ranks) {
                    let predecessor = step(collective, ranks, (rank + ranks - 1) % ranks, i - 1);
                    assert_eq!(step(collective, ranks, rank, i).chunk, predecessor.chunk);
                }
            }
        }
    }

    #[test]
    fn a_reduction_ends_with_the_rank_s_own_chunk() {
        for ranks in 2..9 {
            for rank in 0..ranks {
                let last = step(Collective::ReduceScatter, ranks, rank, ranks - 2);
                assert_eq!(last, RingStep { chunk: rank, action: Action::Add });
            }
        }
    }
}

//! The all-to-all as arithmetic: which chunk each rank copies from which rank.
//!
//! The elements are two halves of one chunk per rank: what a rank sends, and what it receives. Rank `r` reads in step `i` from
//! rank `r − i`, so at any time the ranks read from different ranks. Step 0 is within the rank.

use std::ops::Range;

/// Elements of a chunk if the two halves have `len` elements together. Panics unless that is whole chunks.
pub fn chunk_len(len: usize, ranks: usize) -> usize {
    assert!(
        len.is_multiple_of(2 * ranks),
        "an all-to-all over {len} elements, which are not two halves of {ranks} equal chunks"
    );
    len / (2 * ranks)
}

/// The chunk that goes to rank `to`.
pub fn sent(len: usize, ranks: usize, to: usize) -> Range<usize> {
    let chunk = chunk_len(len, ranks);
    to * chunk..(to + 1) * chunk
}

/// The chunk that comes from rank `from`.
pub fn received(len: usize, ranks: usize, from: usize) -> Range<usize> {
    let chunk = chunk_len(len, ranks);
    (ranks + from) * chunk..(ranks + from + 1) * chunk
}

/// The rank that `rank` reads from in step `index`.
pub fn source(ranks: usize, rank: usize, index: usize) -> usize {
    (rank + ranks - index) % ranks
}

/// The step in which `rank` reads from `source`.
pub fn step_from(ranks: usize, rank: usize, source: usize) -> usize {
    (rank + ranks - source) % ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_reads_from_every_rank_once() {
        for ranks in 1..6 {
            for rank in 0..ranks {
                for index in 0..ranks {
                    assert_eq!(step_from(ranks, rank, source(ranks, rank, index)), index);
                }
            }
        }
    }

    #[test]
    fn chunks_are_two_halves() {
        let ranges: Vec<_> =
            (0..2).map(|i| sent(12, 2, i)).chain((0..2).map(|i| received(12, 2, i))).collect();
        assert_eq!(ranges, [0..3, 3..6, 6..9, 9..12]);
    }

    #[test]
    #[should_panic(expected = "two halves of 3 equal chunks")]
    fn chunks_are_equal() {
        sent(9, 3, 0);
    }
}

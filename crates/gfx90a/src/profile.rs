//! What the waves of launches have executed: how often each kind of instruction, and cycles of the LDS unit.
//!
//! LDS has 32 banks of 4 bytes. The unit serves as many adjacent lanes at once as 128 bytes hold, and takes a cycle more for
//! each further word of a bank that they access. AMD documents the banks; that the lanes of a group are adjacent is assumed.

use std::collections::BTreeMap;

/// Banks of LDS, each a word wide.
const BANKS: usize = 32;

/// Bytes of a word.
const WORD: u64 = 4;

/// Counts of what was executed.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Instructions that waves executed, by mnemonic.
    pub executed: BTreeMap<String, u64>,
    /// Cycles of the LDS unit for loads and stores.
    pub lds: LdsCycles,
}

/// Cycles of the LDS unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LdsCycles {
    /// As they are.
    pub taken: u64,
    /// If no two words were in one bank.
    pub without_conflicts: u64,
}

impl LdsCycles {
    /// Adds an access of `bytes` at the offset of every lane.
    pub(crate) fn add(&mut self, offsets: &[u64], bytes: usize) {
        let words = (bytes as u64).div_ceil(WORD);
        for lanes in offsets.chunks(BANKS / words as usize) {
            let mut touched: Vec<u64> =
                lanes.iter().flat_map(|offset| (0..words).map(move |word| offset / WORD + word)).collect();
            touched.sort_unstable();
            touched.dedup();
            let mut in_bank = [0_u64; BANKS];
            for word in touched {
                in_bank[word as usize % BANKS] += 1;
            }
            self.taken += in_bank.into_iter().max().unwrap_or(0);
            self.without_conflicts += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles(offsets: impl Iterator<Item = u64>, bytes: usize) -> (u64, u64) {
        let mut cycles = LdsCycles::default();
        cycles.add(&offsets.collect::<Vec<_>>(), bytes);
        (cycles.taken, cycles.without_conflicts)
    }

    #[test]
    fn words_of_one_bank_follow_each_other() {
        assert_eq!(cycles((0..64).map(|lane| 4 * lane), 4), (2, 2), "adjacent words");
        assert_eq!(cycles((0..64).map(|_| 8), 4), (2, 2), "a word for all");
        assert_eq!(cycles((0..64).map(|lane| 128 * lane), 4), (64, 2), "one bank");
        assert_eq!(cycles((0..64).map(|lane| 16 * lane), 16), (8, 8), "adjacent pieces of 16 bytes");
        assert_eq!(cycles((0..64).map(|lane| 32 * lane), 16), (16, 8), "every second piece");
    }
}

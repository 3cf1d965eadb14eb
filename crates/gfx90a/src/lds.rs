//! LDS, the memory of a workgroup, with the accesses of its waves since the last barrier.

use crate::error::Fault;
use crate::memory_instructions::access::word;
use crate::profile::LdsCycles;

/// Uninitialised LDS holds NaNs, so that a sum over it shows.
const UNINITIALISED: u8 = 0xff;

/// The memory that the waves of one workgroup share.
#[derive(Debug)]
pub(crate) struct Lds {
    bytes: Vec<u8>,
    accesses: Vec<Accesses>,
    granule_bits: u32,
    /// Number of barriers so far. Accesses of earlier intervals do not count.
    interval: u32,
    /// `None` if nobody wants to know.
    cycles: Option<LdsCycles>,
}

/// The accesses to one piece of LDS in an interval between two barriers.
#[derive(Clone, Copy, Debug, Default)]
struct Accesses {
    interval: u32,
    /// Bits of the waves that have read.
    readers: u16,
    /// Bits of the waves that have written, and of those that have changed it by an atomic.
    writers: u16,
    atomics: u16,
}

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Atomic,
}

impl Lds {
    /// LDS of a workgroup. Races are noticed between accesses to the same piece of `granule` bytes, a power of two.
    pub(crate) fn new(size: usize, granule: usize) -> Self {
        let granule_bits = granule.ilog2();
        let accesses = vec![Accesses::default(); size.div_ceil(granule)];
        Lds { bytes: vec![UNINITIALISED; size], accesses, granule_bits, interval: 1, cycles: None }
    }

    /// Counts the cycles of accesses from now on.
    pub(crate) fn count_cycles(&mut self) {
        self.cycles = Some(LdsCycles::default());
    }

    /// The cycles of accesses so far; zero if they are not counted.
    pub(crate) fn cycles(&self) -> LdsCycles {
        self.cycles.unwrap_or_default()
    }

    /// Counts an access of `bytes` by each of the lanes at these offsets.
    pub(crate) fn count_access(&mut self, offsets: impl Iterator<Item = u64>, bytes: usize) {
        if let Some(cycles) = &mut self.cycles {
            cycles.add(&offsets.collect::<Vec<_>>(), bytes);
        }
    }

    /// All waves have reached a barrier.
    pub(crate) fn barrier(&mut self) {
        self.interval += 1;
    }

    /// Reads 1 to 4 bytes.
    pub(crate) fn load(&mut self, wave: usize, lane: usize, offset: u64, bytes: usize) -> Result<u32, Fault> {
        Ok(word(self.read(wave, lane, offset, bytes)?))
    }

    /// Reads some bytes.
    pub(crate) fn read(
        &mut self,
        wave: usize,
        lane: usize,
        offset: u64,
        bytes: usize,
    ) -> Result<&[u8], Fault> {
        let at = self.access(Access::Read, wave, lane, offset, bytes)?;
        Ok(&self.bytes[at..at + bytes])
    }

    /// Writes the lowest 1 to 4 bytes of a word.
    pub(crate) fn store(
        &mut self,
        wave: usize,
        lane: usize,
        offset: u64,
        bytes: usize,
        value: u32,
    ) -> Result<(), Fault> {
        let at = self.access(Access::Write, wave, lane, offset, bytes)?;
        self.bytes[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        Ok(())
    }

    /// Whether the lowest 1 to 4 bytes of a word are at an offset that was accessed.
    pub(crate) fn holds(&self, offset: u64, bytes: usize, value: u32) -> bool {
        self.bytes[offset as usize..][..bytes] == value.to_le_bytes()[..bytes]
    }

    /// Replaces a word and returns what it was. Atomics of several waves are no race.
    pub(crate) fn atomic(
        &mut self,
        wave: usize,
        lane: usize,
        offset: u64,
        change: impl Fn(u32) -> u32,
    ) -> Result<u32, Fault> {
        let at = self.access(Access::Atomic, wave, lane, offset, 4)?;
        let word: &mut [u8; 4] = (&mut self.bytes[at..at + 4]).try_into().expect("four bytes");
        let old = u32::from_le_bytes(*word);
        *word = change(old).to_le_bytes();
        Ok(old)
    }

    /// Records an access and returns its offset.
    fn access(
        &mut self,
        access: Access,
        wave: usize,
        lane: usize,
        offset: u64,
        bytes: usize,
    ) -> Result<usize, Fault> {
        let size = self.bytes.len();
        let begin = offset as usize;
        if offset >= size as u64 || bytes > size - begin {
            return Err(Fault::OutsideLds { lane, offset, bytes, size });
        }
        let others = !(1_u16 << wave);
        for piece in begin >> self.granule_bits..=(begin + bytes - 1) >> self.granule_bits {
            let so_far = &mut self.accesses[piece];
            if so_far.interval != self.interval {
                *so_far = Accesses { interval: self.interval, ..Accesses::default() };
            }
            let (writers, readers) = match access {
                Access::Read => (so_far.writers | so_far.atomics, 0),
                Access::Write => (so_far.writers | so_far.atomics, so_far.readers),
                Access::Atomic => (so_far.writers, so_far.readers),
            };
            if (writers | readers) & others != 0 {
                let other_wrote = writers & others != 0;
                let of = if other_wrote { writers } else { readers } & others;
                let offset = piece << self.granule_bits;
                return Err(Fault::Race { offset, other: of.trailing_zeros() as usize, other_wrote });
            }
            match access {
                Access::Read => so_far.readers |= !others,
                Access::Write => so_far.writers |= !others,
                Access::Atomic => so_far.atomics |= !others,
            }
        }
        Ok(begin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_race_is_two_waves_one_of_which_writes_without_a_barrier() {
        let mut lds = Lds::new(64, 4);
        assert_eq!(lds.store(0, 0, 8, 4, 7), Ok(()));
        assert_eq!(lds.load(0, 5, 8, 4), Ok(7), "a wave sees its own writes");
        assert_eq!(
            lds.load(1, 0, 8, 4),
            Err(Fault::Race { offset: 8, other: 0, other_wrote: true }),
            "another wave must not read them yet"
        );
        lds.barrier();
        assert_eq!((lds.load(1, 0, 8, 4), lds.load(2, 0, 8, 4)), (Ok(7), Ok(7)));
        let write = lds.store(0, 0, 8, 4, 9);
        assert_eq!(write, Err(Fault::Race { offset: 8, other: 1, other_wrote: false }));
    }

    #[test]
    fn atomics_of_several_waves_are_no_race_but_a_read_beside_them_is() {
        let mut lds = Lds::new(8, 4);
        for wave in 0..2 {
            lds.store(wave, 0, 4 * wave as u64, 4, 1).expect("words of their own");
        }
        lds.barrier();
        assert_eq!(lds.atomic(0, 0, 0, |old| old + 1), Ok(1));
        assert_eq!(lds.atomic(1, 0, 0, |old| old + 1), Ok(2));
        assert!(lds.load(1, 0, 0, 4).is_err());
    }

    #[test]
    fn neighbours_in_one_word_are_no_race_if_the_kernel_accesses_halves() {
        let mut lds = Lds::new(8, 2);
        assert_eq!((lds.store(0, 0, 0, 2, 1), lds.store(1, 0, 2, 2, 2)), (Ok(()), Ok(())));
        assert!(lds.store(1, 0, 0, 2, 2).is_err());
        assert!(matches!(lds.load(0, 3, 6, 4), Err(Fault::OutsideLds { lane: 3, offset: 6, .. })));
    }
}

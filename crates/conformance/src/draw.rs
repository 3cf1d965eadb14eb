//! Random sizes.

use std::ops::RangeInclusive;

/// A generator of sizes, of which the largest is bounded.
pub(crate) struct Draw {
    state: u64,
    /// Most rows, or tokens of a sequence.
    pub(crate) most: usize,
}

impl Draw {
    pub(crate) fn new(seed: u64, most: usize) -> Self {
        Draw { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491, most }
    }

    /// A number in a range.
    pub(crate) fn size(&mut self, range: RangeInclusive<usize>) -> usize {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        range.start() + (self.state >> 33) as usize % (range.end() - range.start() + 1)
    }

    pub(crate) fn yes(&mut self) -> bool {
        self.size(0..=1) == 1
    }

    /// One of some.
    pub(crate) fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.size(0..=of.len() - 1)]
    }

    /// Rows.
    pub(crate) fn rows(&mut self) -> usize {
        self.size(1..=self.most)
    }

    /// Numbers of a row: half of them suit kernels that move 16 bytes at once.
    pub(crate) fn width(&mut self) -> usize {
        let width = self.size(1..=4 * self.most);
        if self.yes() { width.next_multiple_of(8) } else { width }
    }
}

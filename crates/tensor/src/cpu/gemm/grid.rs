//! Splits a result into rectangles, one per thread.

use rayon::prelude::*;

use super::block::{Rectangle, SCRATCH_BYTES};

/// With fewer multiply-adds, another thread costs more time than it saves (about ten microseconds).
const MIN_WORK: usize = 1 << 19;
/// Multiply-adds that take as long as packing one element.
const PACKING: usize = 8;

/// A grid over a result, split between tiles.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    rows: Cut,
    columns: Cut,
}

impl Grid {
    /// The grid for up to `threads` threads whose largest rectangle takes the least time.
    pub fn new<const R: usize, const C: usize>(m: usize, n: usize, k: usize, threads: usize) -> Self {
        let parts = (m * n * k / MIN_WORK).clamp(1, threads.max(1));
        let candidates = (1..=parts).map(|rows| Grid {
            rows: Cut { len: m, unit: R, parts: rows },
            columns: Cut { len: n, unit: C, parts: parts / rows },
        });
        candidates.min_by_key(Grid::cost).expect("at least one part")
    }

    /// Runs every rectangle with its own scratch.
    ///
    /// `run` is not a type parameter, so that rayon's code is compiled once and not for every product.
    pub fn for_each(&self, scratch: &mut [u8], run: &(dyn Fn(Rectangle, &mut [u8]) + Sync)) {
        let parts = self.rows.parts * self.columns.parts;
        if parts == 1 {
            return run(self.rectangle(0), scratch);
        }
        let scratch = scratch.par_chunks_exact_mut(SCRATCH_BYTES).take(parts).with_max_len(1);
        scratch.enumerate().for_each(|(index, scratch)| run(self.rectangle(index), scratch));
    }

    fn rectangle(&self, index: usize) -> Rectangle {
        let (row, column) = (index / self.columns.parts, index % self.columns.parts);
        Rectangle {
            rows: self.rows.boundary(row)..self.rows.boundary(row + 1),
            columns: self.columns.boundary(column)..self.columns.boundary(column + 1),
        }
    }

    /// Estimated time of the largest rectangle per unit of depth, in multiply-adds.
    fn cost(&self) -> usize {
        let (rows, columns) = (self.rows.largest(), self.columns.largest());
        rows * columns + PACKING * (rows + columns)
    }
}

/// A length split into nearly equal parts at multiples of `unit`.
#[derive(Clone, Copy, Debug)]
struct Cut {
    len: usize,
    unit: usize,
    parts: usize,
}

impl Cut {
    fn boundary(self, index: usize) -> usize {
        let units = self.len.div_ceil(self.unit);
        self.len.min(units * index / self.parts * self.unit)
    }

    fn largest(self) -> usize {
        self.len.div_ceil(self.unit).div_ceil(self.parts) * self.unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rectangles_cover_every_element_once() {
        for (m, n, threads) in [(1, 1, 4), (7, 100, 3), (64, 33, 5), (100, 7, 8), (0, 5, 2), (61, 61, 12)] {
            let grid = Grid::new::<8, 32>(m, n, 1 << 20, threads);
            let mut seen = vec![0; m * n];
            let parts = grid.rows.parts * grid.columns.parts;
            assert!((1..=threads).contains(&parts));
            for rectangle in (0..parts).map(|index| grid.rectangle(index)) {
                for row in rectangle.rows {
                    rectangle.columns.clone().for_each(|column| seen[row * n + column] += 1);
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{m} × {n} on {threads} threads");
        }
    }

    #[test]
    fn threads_cut_the_longer_side_and_leave_small_products_alone() {
        let parts = |m, n, k, threads| {
            let grid = Grid::new::<8, 32>(m, n, k, threads);
            (grid.rows.parts, grid.columns.parts)
        };
        assert_eq!(parts(64, 64, 64, 8), (1, 1));
        assert_eq!(parts(4096, 256, 256, 2), (2, 1));
        assert_eq!(parts(256, 4096, 256, 2), (1, 2));
        assert_eq!(parts(1024, 1024, 256, 4), (2, 2));
        assert_eq!(parts(8, 4096, 1024, 3), (1, 3));
    }
}

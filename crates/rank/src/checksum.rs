//! Checksums of what a rank holds between two steps: its weights and its states, bit for bit.

use kintsugi_plan::Unit;
use kintsugi_tensor::View;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::rank::Rank;
use crate::unit::UnitState;

/// Bytes that are copied to the host at a time.
const PIECE: usize = 1 << 18;

/// The checksum of weights that other ranks may hold, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightChecksum {
    /// Their unit.
    pub unit: Unit,
    /// The tp rank whose part they are. `None` for parameters that every tp rank holds whole.
    pub part: Option<usize>,
    /// The first element and the end of their range in the flat buffer of the unit.
    pub range: (usize, usize),
    /// The checksum.
    pub sum: u64,
}

impl WeightChecksum {
    /// What has this checksum. It is the same on all ranks that hold the same weights.
    pub fn key(&self) -> (Unit, Option<usize>, (usize, usize)) {
        (self.unit, self.part, self.range)
    }
}

/// The checksum of what a rank updates in a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitChecksum {
    /// The unit.
    pub unit: Unit,
    /// The checksum.
    pub sum: u64,
}

impl Rank {
    /// The checksums of the weights that this rank always holds. They wait for the device. `buffer` is memory of the host that the
    /// caller keeps for the next time.
    pub fn weight_checksums(&self, buffer: &mut Vec<u8>) -> Vec<WeightChecksum> {
        let of_unit = |unit: &UnitState| {
            let (weights, range) = unit.resident_weights();
            // The elements at the start that every tp rank holds.
            let whole = unit.layout.replicated.clamp(range.start, range.end);
            [(None, range.start, whole), (Some(self.at.tp()), whole, range.end)].map(|(part, start, end)| {
                let sum = self.sum(&[weights.slice(start - range.start..end - range.start)], buffer);
                WeightChecksum { unit: unit.layout.unit, part, range: (start, end), sum }
            })
        };
        self.units.iter().flat_map(of_unit).collect()
    }

    /// The checksums of the weights that this rank updates itself, as other ranks get them.
    pub fn updated_checksums(&self, buffer: &mut Vec<u8>) -> Vec<UnitChecksum> {
        self.unit_checksums(buffer, |unit| unit.updated_weights().into_iter().collect())
    }

    /// The checksums of the states: master weights, averages and moments.
    pub fn state_checksums(&self, buffer: &mut Vec<u8>) -> Vec<UnitChecksum> {
        self.unit_checksums(buffer, UnitState::states)
    }

    fn unit_checksums<'a>(
        &'a self,
        buffer: &mut Vec<u8>,
        views: impl Fn(&'a UnitState) -> Vec<View<'a>>,
    ) -> Vec<UnitChecksum> {
        let sum = |unit: &'a UnitState| UnitChecksum {
            unit: unit.layout.unit,
            sum: self.sum(&views(unit), buffer),
        };
        self.units.iter().map(sum).collect()
    }

    fn sum(&self, views: &[View], buffer: &mut Vec<u8>) -> u64 {
        buffer.resize(PIECE, 0);
        let mut hash = Xxh3::new();
        for view in views {
            let elements = PIECE / view.dtype().bytes();
            for start in (0..view.len()).step_by(elements) {
                let piece = view.slice(start..(start + elements).min(view.len()));
                let bytes = &mut buffer[..piece.bytes()];
                self.backend.download(piece, bytes);
                hash.update(bytes);
            }
        }
        hash.digest()
    }
}

//! Checksums of what a rank holds between two steps: its weights and its states, bit for bit.

use kintsugi_plan::Unit;
use kintsugi_tensor::View;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::rank::Rank;

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
    /// Whether two ranks hold the same weights, which must then have the same checksum.
    pub fn is_of_same(&self, other: &Self) -> bool {
        (self.unit, self.part, self.range) == (other.unit, other.part, other.range)
    }
}

/// The checksums of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checksums {
    /// Of the weights that it always holds.
    pub weights: Vec<WeightChecksum>,
    /// Of the states of each unit, in the same order: master weights and moments.
    pub states: Vec<(Unit, u64)>,
}

impl Checksums {
    /// What differs from checksums of the same rank at another time, in words.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let weights = self.weights.iter().zip(&other.weights).find(|(one, other)| one.sum != other.sum);
        let states = self.states.iter().zip(&other.states).find(|(one, other)| one != other);
        weights
            .map(|(one, _)| format!("the weights of {}", one.unit))
            .or_else(|| states.map(|((unit, _), _)| format!("the states of {unit}")))
    }
}

impl Rank {
    /// The checksums of the weights that this rank always holds and of its states. Waits for the device. `buffer` is memory of the host
    /// that the caller keeps for the next time.
    pub fn checksums(&self, buffer: &mut Vec<u8>) -> Checksums {
        buffer.resize(PIECE, 0);
        let mut checksums = Checksums::default();
        for unit in &self.units {
            let (weights, range) = unit.resident_weights();
            // The elements at the start that every tp rank holds.
            let whole = unit.layout.replicated.clamp(range.start, range.end);
            for (part, start, end) in [(None, range.start, whole), (Some(self.at.tp()), whole, range.end)] {
                let sum = self.sum(&[weights.slice(start - range.start..end - range.start)], buffer);
                let unit = unit.layout.unit;
                checksums.weights.push(WeightChecksum { unit, part, range: (start, end), sum });
            }
            checksums.states.push((unit.layout.unit, self.sum(&unit.states(), buffer)));
        }
        checksums
    }

    fn sum(&self, views: &[View], buffer: &mut [u8]) -> u64 {
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

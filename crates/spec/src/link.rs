//! Links between ranks: a level's as one rank sees them, or wire by wire.

use serde::{Deserialize, Serialize};

use crate::Level;

/// The links of one level, as one rank sees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Which level.
    pub level: Level,
    /// Bytes per second in one direction, per rank; what ranks share is divided among them.
    pub bandwidth: Option<f64>,
    /// Seconds for each step of an algorithm: from one rank to the next.
    pub latency: Option<f64>,
    /// The share of the bandwidth that a long transfer reaches.
    pub efficiency: Option<f64>,
    /// Seconds to begin a transfer of any kind.
    pub start: Option<f64>,
}

/// A wire between two ranks of a node, numbered from 0 within it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wire {
    /// One end.
    pub a: usize,
    /// The other.
    pub b: usize,
    /// Bytes per second in one direction.
    pub bandwidth: f64,
}

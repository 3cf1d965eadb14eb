//! Which transfers carry quantised numbers, as in ZeRO++ (arXiv 2306.10209).

use std::fmt;

use serde::{Deserialize, Serialize};

/// The integers of a transfer that stand for its numbers: blocks of them share a scale (docs/quantisation.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Codes {
    /// The type of the integers.
    pub integer: Integer,
    /// Numbers that share a scale.
    pub block: usize,
}

/// The integers of quantised numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Integer {
    /// 8 bits.
    Int8,
    /// 4 bits.
    Int4,
}

/// The transfers of a plan that carry codes. A transfer that the plan does not have carries none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Quantized {
    /// Gathers of weights from their shards. Gathers from a secondary shard carry numbers.
    pub weights: Option<Codes>,
    /// The refresh of weights after the optimizer's step.
    pub refresh: Option<Codes>,
    /// Reduce-scatters of gradients, as all-to-alls. Sums carry numbers.
    pub gradients: Option<Codes>,
}

impl Integer {
    /// All of them.
    pub const ALL: [Integer; 2] = [Integer::Int8, Integer::Int4];
}

impl Quantized {
    /// All transfers carry numbers.
    pub const NONE: Quantized = Quantized { weights: None, refresh: None, gradients: None };

    /// The longest block, or 1 if all transfers carry numbers. Parameters begin at a block: a bias has no scale in common with the
    /// weights of a norm, which are much larger.
    pub fn block(&self) -> usize {
        self.iter().map(|codes| codes.block).fold(1, usize::max)
    }

    /// The codes of every kind of transfer that has some.
    pub fn iter(&self) -> impl Iterator<Item = Codes> + '_ {
        [self.weights, self.refresh, self.gradients].into_iter().flatten()
    }
}

impl Codes {
    /// Scales add 1.6 % to codes of 8 bits and 3.1 % to codes of 4 bits.
    pub const DEFAULT_BLOCK: usize = 256;
}

impl Integer {
    /// The name in configurations and in the output.
    pub fn name(self) -> &'static str {
        match self {
            Integer::Int8 => "int8",
            Integer::Int4 => "int4",
        }
    }
}

impl fmt::Display for Integer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

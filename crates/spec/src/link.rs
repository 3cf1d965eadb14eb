//! Links between ranks: the average link of a level, or single wires.

use serde::{Deserialize, Serialize};

use crate::key::spec_table;
use crate::{ByLevel, Level};

/// The links of one level, from the view of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// The level.
    pub level: Level,
    /// Bytes per second in one direction, per rank. Bandwidth that ranks share is divided among them.
    pub bandwidth: Option<f64>,
    /// Seconds for each step of an algorithm, from one rank to the next.
    pub latency: Option<f64>,
    /// Seconds for each step inside a node, if the ring also crosses this level; `None` for those of the node's level. The host
    /// posts a network operation for every step of such a ring.
    pub inner_latency: Option<f64>,
    /// The share of the bandwidth that a long transfer reaches.
    pub efficiency: Option<f64>,
    /// Seconds to start a transfer of any kind.
    pub start: Option<f64>,
    /// The library's protocol for short collectives; `None` if it has only one protocol.
    pub short: Option<ShortSpec>,
    /// The number of rings that the library lays over the wires of a node, at most; `None` for one.
    pub rings: Option<usize>,
}

spec_table! {
    /// A protocol for short collectives, such as NCCL's LL128: hops are faster and the bandwidth is lower. A collective takes the
    /// longer of its hops and its bytes, because the library divides short collectives into fewer channels.
    #[derive(Copy)]
    pub struct ShortSpec {
        /// the library's protocol for short collectives: seconds to begin. Give all four keys of `short` or none
        start: f64, default 0.0, else "none";
        /// seconds from one rank to the next in it
        latency: f64, default 0.0, else "none";
        /// its share of the bandwidth
        share: f64, default 1.0, else "none";
        /// it is used up to this many seconds on the wires for each hop around the ring
        until: f64, default 0.0, else "none";
    }
}

/// The links that a run emulates; `None` for a level that is as fast as the machine is.
pub type EmulatedLinks = ByLevel<Option<EmulatedLink>>;

/// The links of one level that a run emulates: its transfers are slowed down as if they went over these.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmulatedLink {
    /// Bytes per second in one direction, per rank.
    pub bandwidth: f64,
    /// Seconds between the last byte sent and the first one used.
    pub latency: f64,
}

/// A wire between two ranks of a node. Ranks are numbered from 0 within the node.
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

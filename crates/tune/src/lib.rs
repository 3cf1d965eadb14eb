//! Searches over plans: every strategy on paper, the scaling of one strategy, the sensitivity to one setting, and a few
//! strategies by trials.
//!
//! `plan` decides which strategies are allowed. `simulate` computes their memory and their time. A search has no rules and
//! no formulas of its own.
#![forbid(unsafe_code)]

mod explore;
mod links;
mod mechanisms;
mod only;
mod order;
mod pick;
mod reason;
mod search;
mod space;
mod support;
mod table;
pub mod trials;

pub use mechanisms::{Mechanism, complexity};
pub use only::{Only, OnlyError, values};
pub use order::{By, order};
pub use pick::{FREE_SHARE, Gain, Pick};
pub use reason::reason;
pub use search::{
    Candidate, Counts, Limit, SearchError, SearchPhase, SearchProgress, SearchResult, Settings, search,
    strategies_that_fit, timings,
};
pub use space::strategies;
pub use support::SupportedValues;
pub use table::{Outcome, efficiency, outcome};

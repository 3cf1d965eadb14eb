//! Searches over plans: every strategy on paper, the scaling of one strategy, the sensitivity to one setting, and a few
//! strategies by trials.
//!
//! `plan` decides which strategies are allowed. `simulate` computes their memory and their time. A search has no rules and
//! no formulas of its own.
#![forbid(unsafe_code)]

mod explore;
mod only;
mod pick;
mod reason;
mod search;
mod space;
mod support;
mod table;
pub mod trials;

pub use only::{Only, OnlyError, values};
pub use pick::{FREE_SHARE, Gain, Mechanism, Pick, complexity};
pub use reason::reason;
pub use search::{
    By, Candidate, Counts, Limit, SearchError, SearchPhase, SearchProgress, SearchResult, Settings, search,
    strategies_that_fit,
};
pub use space::strategies;
pub use support::SupportedValues;
pub use table::{Outcome, efficiency, outcome};

//! Searches over plans: every strategy on paper, the scaling of one strategy, and the sensitivity to one setting.
//!
//! A search asks the plan what is allowed, the screen what fits and the clocks how long it takes; it has no rules and
//! no formulas of its own.
#![forbid(unsafe_code)]

mod only;
mod order;
mod reason;
mod search;
mod space;
mod table;

pub use only::Only;
pub use order::{By, order};
pub use reason::reason;
pub use search::{Candidate, Counts, Found, Limit, Phase, SearchError, Settings, screened, search, timings};
pub use space::strategies;
pub use table::{Outcome, efficiency, outcome};

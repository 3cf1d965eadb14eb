//! One rank: it runs the ops of its program, one by one, on whatever backend and groups it is given.
//!
//! This is the only interpreter of programs. On a real backend it trains; on paper the same code, with the same
//! allocations and the same collectives, is the prediction. That is why the two cannot drift apart.
#![forbid(unsafe_code)]

mod blocks;
mod figures;
mod flow;
mod generation;
mod groups;
mod initial;
mod optimizer;
mod pieces;
mod rank;
mod snapshot;
mod store;
mod transfers;
mod unit;

pub use figures::{Figures, RankMemory};
pub use generation::NewTokens;
pub use groups::{Groups, paper_groups};
pub use initial::Initial;
pub use pieces::{Assembled, Piece, Whole, assemble};
pub use rank::{Bad, Purpose, Rank, SUMS, Source, Tokens};
pub use snapshot::{Decided, Snapshot};
pub use store::{Elements, Finite, Kept, Store, StoreError};

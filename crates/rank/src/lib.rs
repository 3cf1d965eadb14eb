//! One rank: runs the ops of its program one by one, on any backend and groups.
//!
//! This is the only interpreter of programs. On a real backend it trains. On paper the same code predicts, with the same
//! allocations and the same collectives, so the prediction cannot drift away from the training.
#![forbid(unsafe_code)]

mod blocks;
mod checksum;
mod generation;
mod groups;
mod in_flight;
mod initial_weights;
mod matrices;
mod optimizer;
mod pieces;
mod rank;
mod replication;
mod step_metrics;
mod step_result;
mod store;
mod unit;

pub use checksum::{UnitChecksum, WeightChecksum};
pub use generation::NewTokens;
pub use groups::{Groups, paper_groups};
pub use initial_weights::InitialWeights;
pub use kintsugi_plan::StoredTensor;
pub use pieces::{AssembledParameters, UnitValues, WholeParameters, assemble};
pub use rank::{NoTokens, NonFinite, NonFiniteTensor, Purpose, Rank, SQUARES, SUMS, TokenSource, Tokens};
pub use replication::{CopyKeeper, PassedCopy};
pub use step_metrics::{RankMemory, ReplicationMetrics, StepMetrics};
pub use step_result::{PendingStepResult, StepResult};
pub use store::{AverageStore, Elements, FiniteStore, Store, StoreError};

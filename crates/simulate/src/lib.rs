//! Predictions: the programs of a plan on paper, and as a graph of timed operations.
//!
//! There is no second set of formulas here. A [`kintsugi_rank::Rank`] runs its program on the paper backend. The
//! allocations of its arena are the predicted memory, and the messages of its groups are the predicted traffic: both to
//! the byte. The kernels and transfers of that run are priced (`cost`). The programs of all stages are compiled into
//! one graph (`graph`), which gives the time of each operation.
#![forbid(unsafe_code)]

pub mod cost;
mod device;
mod energy;
mod fit;
mod footprint;
mod framework_tensors;
mod graph;
mod inference;
mod keys;
mod memo;
mod op_work;
mod peak;
mod predict;
mod range;
mod timeline;
mod timing;
mod traffic;
mod transport;

pub use cost::{collective_seconds, links_of, message_seconds};
pub use device::planned_device;
pub use energy::{Consumption, Training};
pub use fit::{Misfit, check_memory, check_planned};
pub use footprint::{has_own_memory, memory_by_stage, memory_of};
pub use inference::{evaluation_memory, generation_memory};
pub use op_work::{OpWork, StepWork, TransferWork};
pub use peak::PeakMemory;
pub use predict::{Coverage, Prediction, predict};
pub use range::{
    LINK_EFFICIENCY, LinkTimes, TimeRange, Unknowns, link_scenarios, link_times, pessimistic,
    uses_links_between_nodes,
};
pub use timeline::{OpSpan, Timeline, TransferSpan, bubble};
pub use timing::{CompiledStep, StepKey, StepTimer, Timing, TracedStep, time};

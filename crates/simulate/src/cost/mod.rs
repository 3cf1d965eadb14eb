//! The costs of ops: the kernels and transfers of a paper trace, priced by a device and its links.

mod bound;
mod costs;
mod device;
mod links;
mod op_cost;
mod pricing;
mod sharing;
mod trace;
mod unfused;

pub use bound::StepBound;
pub use costs::Costs;
pub(crate) use costs::{BlockCosts, Messages, UnitCosts};
pub use device::DeviceModel;
pub(crate) use links::{Algorithm, Links, replication_seconds};
pub use links::{collective_seconds, links_of, message_seconds};
pub use op_cost::{OpCost, OpOrder, Segment, Time, TransferCost};
pub(crate) use pricing::scatters_messages;
pub use sharing::Sharing;
pub use trace::PlanTraces;
pub(crate) use trace::{OpTrace, trace};

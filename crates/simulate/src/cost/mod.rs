//! The costs of ops: the kernels and transfers of a paper trace, priced by a device and its links.

mod cache;
mod costs;
mod device;
mod links;
mod sharing;
mod trace;
mod unfused;

pub use cache::CostCache;
pub(crate) use costs::scatters_messages;
pub use costs::{Costs, OpCost, OpOrder, Segment, Time, Transfer};
pub use device::DeviceModel;
pub(crate) use links::{Algorithm, Links};
pub use sharing::Sharing;
pub use trace::PlanTraces;
pub(crate) use trace::{OpTrace, kind, trace};

//! Placement: which free nodes a plan runs on, and which of them has which ranks.
//!
//! Links between pods are slower than those inside (arXiv 2509.15940), so the groups that send most should be in few pods. A
//! placement gives the nodes in the order of ranks. Only the pods of the nodes matter: two nodes of a pod may change places.
//! Every order is timed by the simulator, with the links of that order; nothing else is optimised.
#![forbid(unsafe_code)]

mod bound;
mod describe;
mod hosts;
mod layout;
mod orders;
mod search;
mod table;
mod timer;

pub use describe::{describe, host_file};
pub use hosts::{compressed, expand};
pub use search::{Found, How, PlaceError, place};
pub use table::{FreeNode, TableError, read_table};

//! Every shortcut equals the full computation.

mod bound;
mod caches;
mod event_simulation;
mod graph;
mod layouts;
mod peak;

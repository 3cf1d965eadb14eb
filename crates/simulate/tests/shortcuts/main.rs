//! Every shortcut equals the full computation.

mod caches;
mod event_simulation;
mod graph;
mod layouts;
mod peak;

//! Every shortcut equals the full computation.

mod graph;
mod layouts;
mod peak;
mod player;

//! Whole runs of the engine. One binary, since every binary links all crates. `prediction` is another, because it counts memory
//! by a global allocator.

mod copies;
mod documents;
mod emulated_links;
mod generation;
mod gpu;
mod hip;
mod optimizers;
mod overlapped_steps;
mod placement;
mod resume;
mod spikes;
mod training;
mod transformers;
mod verify;

//! From a configuration to the program of every rank.
//!
//! `config` lays files and presets over each other and checks the result into a [`Plan`]. The plan says where every
//! parameter lives ([`parameters`]) and which [`Op`]s every stage runs ([`Program`]). The engine, the simulator and
//! the printer all read the same program. Nothing here does I/O or knows about tensors.
#![forbid(unsafe_code)]

pub mod config;
mod flops;
mod generation;
mod mesh;
mod op;
pub mod parameters;
mod plan;
mod program;
pub mod schedule;

pub use flops::Flops;
pub use generation::Round;
pub use mesh::{Axis, Coordinate, Mesh, divisors};
pub use op::{BackwardPart, Block, Message, MessageKind, Op, Over, Program, Unit};
pub use plan::{
    AttentionKind, Batch, Compute, Data, DataSource, DeviceKind, GradientType, LogFormat, LossScale,
    MemoryOptions, Optimizer, Pipeline, Plan, Precision, RateDecay, RateSchedule, Recompute, Resume, Run,
    ScheduleKind, Sharding, TokenData, Transport, When,
};
pub use schedule::Pass;

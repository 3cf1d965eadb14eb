//! From a configuration to the program of every rank.
//!
//! `config` merges files and presets and checks the result into a [`Plan`]. The plan says where every parameter lives
//! ([`parameters`]) and which [`Op`]s every stage runs ([`Program`]). The engine, the simulator and the printer all
//! read the same program. This crate does no I/O and has no tensors.
#![forbid(unsafe_code)]

mod codes;
pub mod config;
mod flops;
mod generation;
mod mesh;
mod op;
mod op_kind;
pub mod parameters;
mod plan;
mod program;
mod run;
pub mod schedule;
mod sharding;
mod transfer;

pub use codes::{Codes, Integer, Quantized};
pub use flops::Flops;
pub use generation::Round;
pub use kintsugi_spec::{Axis, Group, Span};
pub use mesh::{Coordinate, Mesh, divisors};
pub use op::{BackwardPart, Block, Computation, Op, Program, StepOp, Unit};
pub use op_kind::OpKind;
pub use plan::{
    AttentionKind, Batch, Compute, Data, DataSource, GradientReductions, GradientType, LossScale,
    MemoryOptions, Optimizer, Pipeline, Plan, Precision, RateDecay, RateSchedule, Recompute, ScheduleKind,
    TokenData,
};
pub use run::{DeviceKind, LogFormat, Resume, Run, Transport};
pub use schedule::Pass;
pub use sharding::{MAX_PARTS, Part, Sharding, When};
pub use transfer::{Message, MessageKind, Phase, PhaseKind, Transfer};

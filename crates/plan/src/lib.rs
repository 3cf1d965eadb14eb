//! From a configuration to the program of every rank.
//!
//! `config` merges files and presets and checks the result into a [`Plan`]. The plan says where every parameter lives
//! ([`parameters`]) and which [`Op`]s every stage runs ([`Program`]). The engine, the simulator and the printer all
//! read the same program. This crate does no I/O and has no tensors.
#![forbid(unsafe_code)]

mod batch;
mod codes;
pub mod config;
mod context;
mod data;
mod flops;
mod frozen;
mod generation;
mod memory;
mod mesh;
mod op;
mod op_kind;
mod optimizer;
pub mod parameters;
mod pipeline;
mod plan;
mod precision;
mod program;
mod replication;
mod run;
pub mod schedule;
mod sharding;
mod stored_tensor;
mod transfer;

pub use batch::Batch;
pub use codes::{Codes, Integer, Quantized};
pub use config::keys::MAX_STEPS;
pub use context::ContextAttention;
pub use data::{DEMO_VOCAB, Data, DataSource, TokenData};
pub use flops::Flops;
pub use frozen::FrozenUnits;
pub use generation::Round;
pub use kintsugi_spec::{Axis, Group, Span};
pub use memory::{AttentionKind, HeadRows, MemoryOptions, Recompute};
pub use mesh::{Coordinate, Mesh, divisors};
pub use op::{BackwardPart, Block, Computation, MatrixOp, Op, Program, StepOp, Unit};
pub use op_kind::OpKind;
pub use optimizer::{
    Optimizer, OptimizerKind, ParameterGroup, ParameterUpdate, RateAdjustment, RateDecay, RateSchedule,
};
pub use pipeline::{Pipeline, ScheduleKind};
pub use plan::{GradientReductions, Plan};
pub use precision::{Compute, GradientType, LossScale, Precision, Products, Recipe};
pub use replication::{COPY_ALIGNMENT, COPY_PIECE, COPY_SETS};
pub use run::{DeviceKind, LogFormat, OnSpike, Resume, Run, Transport};
pub use schedule::Pass;
pub use sharding::{MAX_PARTS, Part, SecondaryUse, Sharding, When};
pub use stored_tensor::StoredTensor;
pub use transfer::{Direction, Message, MessageKind, Phase, PhaseKind, Transfer};

//! An interpreter of machine code for AMD's gfx90a (MI200), for tests on machines without such a card.
//!
//! [`Compiler`] compiles kernels with AMD's own compiler, [`Clang`] with LLVM's for other architectures too, [`CodeObject`] loads what it made, and [`Machine`] executes it on
//! buffers of the host: 64 lanes a wave, LDS, barriers, accumulation registers, scratch memory and matrix instructions.
//! Every access is held to the buffers that were passed. Waves run in an order that changes with a seed, and two waves
//! that access the same LDS without a barrier in between are an error, as is every instruction that is not known here.
//!
//! Semantics are those of AMD's "Instinct MI200 Instruction Set Architecture" and LLVM's "User Guide for AMDGPU Backend".
//! Each file holds one class of instructions, by the name that it has there. Instructions are decoded from the text of
//! `llvm-objdump`. Time is not modelled; a [`Profile`] counts what was executed.
#![deny(unsafe_code)]
#![expect(clippy::float_cmp, reason = "instructions compare numbers exactly, and so do their tests")]
#![expect(clippy::precedence, reason = "shifts before masks, as in the manual")]

mod assembly;
mod clang;
mod code_object;
mod compile;
mod decode;
mod error;
mod launch;
mod lds;
mod machine;
mod memory;
mod memory_instructions;
mod mfma;
mod operand;
mod profile;
mod random;
mod smem;
mod sop;
mod sopp;
mod vop;
mod vop3p;
mod wave;

pub use clang::{Architecture, Clang};
pub use code_object::{CodeObject, Resources};
pub use compile::Compiler;
pub use error::{Error, Fault, FaultReport};
pub use launch::{Argument, Grid};
pub use machine::Machine;
pub use profile::{LdsCycles, Profile};

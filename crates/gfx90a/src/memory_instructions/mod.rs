//! Vector memory: LDS, global memory and scratch memory.

pub(crate) mod access;
pub(crate) mod ds;
pub(crate) mod flat;
pub(crate) mod mubuf;
mod scratch;

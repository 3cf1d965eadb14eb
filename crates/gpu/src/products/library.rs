//! The seam between our products and a library of matrix products. Matrices are column-major.

use std::fmt;

use super::product::{Epilogue, EpilogueAddresses, Key};
use crate::driver::{DeviceRange, Queue};
use crate::error::GpuError;

/// A library's own description of an algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Algorithm {
    /// Words that only the library understands.
    pub data: [u64; 8],
}

/// Addresses of the matrices.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// The left factor.
    pub a: u64,
    /// The right factor.
    pub b: u64,
    /// The matrix that is added, if any; it may be the result.
    pub c: u64,
    /// The result.
    pub d: u64,
}

impl Addresses {
    /// The largest powers of two, up to `most`, that divide the addresses of A, of B, and of C and D.
    pub fn alignments(self, most: u32) -> [u32; 3] {
        [self.a, self.b, self.c | self.d].map(|address| 1 << address.trailing_zeros().min(most.ilog2()))
    }
}

/// A library of matrix products on one device.
pub trait ProductLibrary: fmt::Debug {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Its version, which a tuning result depends on.
    fn version(&self) -> usize;

    /// Whether it can apply an epilogue. If not, kernels of ours do after a plain product.
    fn has_epilogues(&self) -> bool;

    /// Prepares a kind of product.
    fn describe(&self, key: &Key, at: EpilogueAddresses) -> Result<Box<dyn ProductDescription>, GpuError>;
}

/// `D = A·B + βC`, without an algorithm.
pub trait ProductDescription: fmt::Debug {
    /// Up to `count` algorithms, the most promising first. Empty if the library does not support the combination.
    fn candidates(
        &self,
        workspace_bytes: u64,
        alignments: [u32; 3],
        count: usize,
    ) -> Result<Vec<Algorithm>, GpuError>;

    /// Whether an algorithm of an earlier run can compute this product in this workspace.
    fn accepts(&self, algorithm: &Algorithm, workspace_bytes: u64) -> bool;

    /// Sets the addresses that an epilogue needs, for a result with this many rows.
    fn set_epilogue_addresses(
        &self,
        epilogue: Epilogue,
        at: EpilogueAddresses,
        rows: usize,
    ) -> Result<(), GpuError>;

    /// Enqueues the product; `add` adds C.
    ///
    /// # Safety
    /// The addresses, and those of the epilogue, must be device memory with the described layouts that lives until the
    /// product has run. The result must overlap nothing else, except C if it is the same matrix.
    unsafe fn run(
        &self,
        on: &dyn Queue,
        algorithm: &Algorithm,
        at: Addresses,
        add: bool,
        workspace: DeviceRange,
    ) -> Result<(), GpuError>;
}

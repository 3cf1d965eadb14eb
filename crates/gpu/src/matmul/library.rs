//! Owning wrappers of cuBLASLt's handles. Each handle is destroyed when its wrapper is dropped.

use std::ffi::c_void;

use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulHeuristicResult_t as Candidate, cublasLtMatmulPreferenceAttributes_t as Limit,
    cudaDataType,
};

use crate::error::CudaError;
use crate::libraries;
use crate::stream::{DeviceRange, Stream};
use kintsugi_tensor::DType;

pub use sys::cublasLtMatmulAlgo_t as Algorithm;

/// A cuBLASLt handle.
#[derive(Debug)]
pub struct Handle(sys::cublasLtHandle_t);

impl Handle {
    /// A handle for the current device.
    pub fn new() -> Result<Self, CudaError> {
        libraries::CUBLASLT.require()?;
        result::create_handle().map(Handle).map_err(refused("cublasLtCreate"))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed nowhere else.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}

/// The layout of a contiguous column-major matrix.
#[derive(Debug)]
pub struct Matrix(sys::cublasLtMatrixLayout_t);

impl Matrix {
    /// A matrix with this many rows and columns.
    pub fn new(dtype: DType, rows: usize, columns: usize) -> Result<Self, CudaError> {
        result::create_matrix_layout(data_type(dtype)?, rows as u64, columns as u64, rows as i64)
            .map(Matrix)
            .map_err(refused("cublasLtMatrixLayoutCreate"))
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed nowhere else.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// The matmul descriptor: transposes and epilogue.
#[derive(Debug)]
pub struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    /// Accumulates in fp32, and does not round fp32 inputs to TF32.
    pub fn new(transposed: [bool; 2], epilogue: cublasLtEpilogue_t) -> Result<Self, CudaError> {
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        let operation = result::create_matmul_desc(compute, scale)
            .map(Operation)
            .map_err(refused("cublasLtMatmulDescCreate"))?;
        let transpose = |yes| {
            if yes { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N }
        };
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose(transposed[0]))?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transpose(transposed[1]))?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        Ok(operation)
    }

    /// Sets the address of the bias, in the result's type.
    pub fn set_bias(&self, address: u64) -> Result<(), CudaError> {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address)
    }

    /// Sets the address of the pre-activation, in the result's type, and its column stride in elements.
    pub fn set_pre_activation(&self, address: u64, column: usize) -> Result<(), CudaError> {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, address)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, column as i64)
    }

    fn set<A: Copy>(&self, attribute: Attribute, value: A) -> Result<(), CudaError> {
        // SAFETY: every caller passes the type that cublasLt.h gives for the attribute, and it is copied.
        unsafe {
            let value = (&raw const value).cast();
            result::set_matmul_desc_attribute(self.0, attribute, value, size_of::<A>())
        }
        .map_err(refused("cublasLtMatmulDescSetAttribute"))
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed nowhere else.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// `D = A·B + βC`: its descriptor and layouts, without an algorithm.
#[derive(Debug)]
pub struct ProductDescription {
    /// What is computed.
    pub operation: Operation,
    /// The left factor.
    pub a: Matrix,
    /// The right factor.
    pub b: Matrix,
    /// The result, and the matrix that is added.
    pub d: Matrix,
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

impl ProductDescription {
    /// Up to `count` algorithms, the most promising first. Empty if cuBLASLt does not support the combination.
    pub fn candidates(
        &self,
        handle: &Handle,
        workspace_bytes: u64,
        alignments: [u32; 3],
        count: usize,
    ) -> Result<Vec<Algorithm>, CudaError> {
        let limits = Limits::new(workspace_bytes, alignments)?;
        // SAFETY: plain data for which zeros are a value; cuBLASLt overwrites it.
        let mut found: Vec<Candidate> = vec![unsafe { std::mem::zeroed() }; count];
        let mut returned = 0;
        // SAFETY: all descriptors are alive, and `found` has room for `count`.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                self.operation.0,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                limits.0,
                count as i32,
                found.as_mut_ptr(),
                &raw mut returned,
            )
        };
        match status {
            sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
            | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE => return Ok(Vec::new()),
            _ => status.result().map_err(refused("cublasLtMatmulAlgoGetHeuristic"))?,
        }
        found.truncate(returned as usize);
        found.retain(|candidate| candidate.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(found.into_iter().map(|candidate| candidate.algo).collect())
    }

    /// Whether an algorithm of an earlier run can compute this product in this workspace.
    pub fn accepts(&self, handle: &Handle, algorithm: &Algorithm, workspace_bytes: u64) -> bool {
        // SAFETY: as in `candidates`.
        unsafe {
            let mut needs: Candidate = std::mem::zeroed();
            let (operation, d) = (self.operation.0, self.d.0);
            let to = &raw mut needs;
            sys::cublasLtMatmulAlgoCheck(handle.0, operation, self.a.0, self.b.0, d, d, algorithm, to)
                .result()
                .is_ok_and(|()| needs.workspaceSize as u64 <= workspace_bytes)
        }
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The addresses, and those set in the operation, must be device memory with the description layouts that lives until
    /// the product has run. The result must overlap nothing else, except C if it is the same matrix.
    pub unsafe fn run(
        &self,
        handle: &Handle,
        stream: &Stream,
        algorithm: &Algorithm,
        at: Addresses,
        add: bool,
        workspace: DeviceRange,
    ) -> Result<(), CudaError> {
        let (alpha, beta) = (1.0_f32, if add { 1.0_f32 } else { 0.0 });
        // SAFETY: the caller's promise; the scalars are read before the call returns.
        unsafe {
            result::matmul(
                handle.0,
                self.operation.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                at.a as *const c_void,
                self.a.0,
                at.b as *const c_void,
                self.b.0,
                at.c as *const c_void,
                self.d.0,
                at.d as *mut c_void,
                self.d.0,
                algorithm,
                workspace.address as *mut c_void,
                workspace.bytes as usize,
                stream.handle().cast(),
            )
        }
        .map_err(refused("cublasLtMatmul"))
    }
}

/// The workspace and alignments that an algorithm may rely on.
struct Limits(sys::cublasLtMatmulPreference_t);

impl Limits {
    fn new(workspace_bytes: u64, [a, b, d]: [u32; 3]) -> Result<Self, CudaError> {
        let limits =
            result::create_matmul_pref().map(Limits).map_err(refused("cublasLtMatmulPreferenceCreate"))?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d)?;
        Ok(limits)
    }

    fn set<A: Copy>(&self, limit: Limit, value: A) -> Result<(), CudaError> {
        // SAFETY: every caller passes the type that cublasLt.h gives for the attribute, and it is copied.
        unsafe { result::set_matmul_pref_attribute(self.0, limit, (&raw const value).cast(), size_of::<A>()) }
            .map_err(refused("cublasLtMatmulPreferenceSetAttribute"))
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed nowhere else.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

fn data_type(dtype: DType) -> Result<cudaDataType, CudaError> {
    match dtype {
        DType::F32 => Ok(cudaDataType::CUDA_R_32F),
        DType::BF16 => Ok(cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(cudaDataType::CUDA_R_16F),
        DType::F64 | DType::U32 | DType::U8 => {
            Err(CudaError::Unsupported(format!("the CUDA backend has no matrix products of {dtype:?}")))
        }
    }
}

fn refused(call: &'static str) -> impl Fn(CublasError) -> CudaError {
    move |error| CudaError::Library { library: "cuBLASLt", call, status: format!("{:?}", error.0) }
}

/// The version of cuBLASLt, which must have been loaded.
pub fn version() -> usize {
    // SAFETY: no arguments.
    unsafe { sys::cublasLtGetVersion() }
}

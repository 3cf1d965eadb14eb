//! Matrix products by cuBLASLt: owning wrappers of its handles. Each handle is destroyed when its wrapper is dropped.

use std::ffi::c_void;
use std::rc::Rc;

use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulHeuristicResult_t as Candidate, cublasLtMatmulPreferenceAttributes_t as Limit,
    cudaDataType,
};

use super::libraries;
use crate::driver::{DeviceRange, Queue};
use crate::error::GpuError;
use crate::products::{
    Addresses, Algorithm, Epilogue, EpilogueAddresses, Factors, Key, ProductDescription, ProductLibrary,
};
use kintsugi_tensor::{DType, Float8};

/// A cuBLASLt handle.
#[derive(Debug)]
struct Handle(sys::cublasLtHandle_t);

impl Handle {
    /// A handle for the current device.
    fn new() -> Result<Self, GpuError> {
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
struct Matrix(sys::cublasLtMatrixLayout_t);

impl Matrix {
    /// A matrix with this many rows and columns.
    fn new(dtype: cudaDataType, rows: usize, columns: usize) -> Result<Self, GpuError> {
        result::create_matrix_layout(dtype, rows as u64, columns as u64, rows as i64)
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
struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    /// Accumulates in fp32, and does not round fp32 inputs to TF32.
    fn new(transposed: [bool; 2], epilogue: cublasLtEpilogue_t) -> Result<Self, GpuError> {
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
    fn set_bias(&self, address: u64) -> Result<(), GpuError> {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address)
    }

    /// Sets the address of the pre-activation, in the result's type, and its column stride in elements.
    fn set_pre_activation(&self, address: u64, column: usize) -> Result<(), GpuError> {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, address)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, column as i64)
    }

    fn set<A: Copy>(&self, attribute: Attribute, value: A) -> Result<(), GpuError> {
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

/// cuBLASLt on one device.
#[derive(Debug)]
pub(super) struct CublasLt(Rc<Handle>);

impl CublasLt {
    /// The library for the current device.
    pub(super) fn new() -> Result<Self, GpuError> {
        Ok(CublasLt(Rc::new(Handle::new()?)))
    }
}

impl ProductLibrary for CublasLt {
    fn name(&self) -> &'static str {
        "cuBLASLt"
    }

    fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { sys::cublasLtGetVersion() }
    }

    fn has_epilogues(&self) -> bool {
        true
    }

    fn describe(
        &self,
        key: &Key,
        epilogue_addresses: EpilogueAddresses,
    ) -> Result<Box<dyn ProductDescription>, GpuError> {
        let matrix = |rows, columns, transposed, dtype| {
            let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
            Matrix::new(dtype, rows, columns)
        };
        let [a, b] = match key.factors {
            Factors::Numbers(dtype) => [data_type(dtype)?; 2],
            Factors::Float8 { formats, .. } => formats.map(float8_type),
        };
        let description = Described {
            handle: Rc::clone(&self.0),
            operation: Operation::new(key.transposed, epilogue_code(key.epilogue))?,
            a: matrix(key.m, key.k, key.transposed[0], a)?,
            b: matrix(key.k, key.n, key.transposed[1], b)?,
            d: matrix(key.m, key.n, false, data_type(key.output)?)?,
        };
        if let Factors::Float8 { fast, .. } = key.factors {
            description.operation.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, i8::from(fast))?;
        }
        description.operation.set_epilogue_addresses(key.epilogue, epilogue_addresses, key.m)?;
        Ok(Box::new(description))
    }
}

/// A product's descriptor and layouts, without an algorithm.
#[derive(Debug)]
struct Described {
    handle: Rc<Handle>,
    /// What is computed.
    operation: Operation,
    /// The left factor.
    a: Matrix,
    /// The right factor.
    b: Matrix,
    /// The result, and the matrix that is added.
    d: Matrix,
}

fn native(algorithm: &Algorithm) -> sys::cublasLtMatmulAlgo_t {
    sys::cublasLtMatmulAlgo_t { data: algorithm.data }
}

impl Operation {
    /// Sets the addresses that an epilogue needs, for a result with this many rows.
    fn set_epilogue_addresses(
        &self,
        epilogue: Epilogue,
        epilogue_addresses: EpilogueAddresses,
        rows: usize,
    ) -> Result<(), GpuError> {
        if matches!(epilogue, Epilogue::Bias | Epilogue::BiasGelu) {
            self.set_bias(epilogue_addresses.bias)?;
        }
        if matches!(epilogue, Epilogue::Gelu | Epilogue::BiasGelu | Epilogue::GeluDerivative) {
            self.set_pre_activation(epilogue_addresses.pre_activation, rows)?;
        }
        let [a, b] = epilogue_addresses.scales;
        if a != 0 {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b)?;
        }
        Ok(())
    }
}

fn epilogue_code(epilogue: Epilogue) -> cublasLtEpilogue_t {
    match epilogue {
        Epilogue::Nothing => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        Epilogue::Bias => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
        Epilogue::Gelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
        Epilogue::BiasGelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        Epilogue::GeluDerivative => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
    }
}

impl ProductDescription for Described {
    fn candidates(
        &self,
        workspace_bytes: u64,
        alignments: [u32; 3],
        count: usize,
    ) -> Result<Vec<Algorithm>, GpuError> {
        let limits = Limits::new(workspace_bytes, alignments)?;
        // SAFETY: plain data for which zeros are a value; cuBLASLt overwrites it.
        let mut found: Vec<Candidate> = vec![unsafe { std::mem::zeroed() }; count];
        let mut returned = 0;
        // SAFETY: all descriptors are alive, and `found` has room for `count`.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle.0,
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
        Ok(found.into_iter().map(|candidate| Algorithm { data: candidate.algo.data }).collect())
    }

    fn accepts(&self, algorithm: &Algorithm, workspace_bytes: u64) -> bool {
        // SAFETY: as in `candidates`.
        unsafe {
            let mut needs: Candidate = std::mem::zeroed();
            let (operation, d) = (self.operation.0, self.d.0);
            let (to, algorithm) = (&raw mut needs, native(algorithm));
            sys::cublasLtMatmulAlgoCheck(
                self.handle.0,
                operation,
                self.a.0,
                self.b.0,
                d,
                d,
                &raw const algorithm,
                to,
            )
            .result()
            .is_ok_and(|()| needs.workspaceSize as u64 <= workspace_bytes)
        }
    }

    unsafe fn run(
        &self,
        on: &dyn Queue,
        algorithm: &Algorithm,
        at: Addresses,
        add: bool,
        workspace: DeviceRange,
    ) -> Result<(), GpuError> {
        let native = native(algorithm);
        let (alpha, beta) = (1.0_f32, if add { 1.0_f32 } else { 0.0 });
        // SAFETY: the caller's promise; the scalars are read before the call returns.
        unsafe {
            result::matmul(
                self.handle.0,
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
                &raw const native,
                workspace.address as *mut c_void,
                workspace.bytes as usize,
                on.handle().cast(),
            )
        }
        .map_err(refused("cublasLtMatmul"))
    }

    fn set_epilogue_addresses(
        &self,
        epilogue: Epilogue,
        at: EpilogueAddresses,
        rows: usize,
    ) -> Result<(), GpuError> {
        self.operation.set_epilogue_addresses(epilogue, at, rows)
    }
}

/// The workspace and alignments that an algorithm may rely on.
struct Limits(sys::cublasLtMatmulPreference_t);

impl Limits {
    fn new(workspace_bytes: u64, [a, b, d]: [u32; 3]) -> Result<Self, GpuError> {
        let limits =
            result::create_matmul_pref().map(Limits).map_err(refused("cublasLtMatmulPreferenceCreate"))?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d)?;
        limits.set(Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d)?;
        Ok(limits)
    }

    fn set<A: Copy>(&self, limit: Limit, value: A) -> Result<(), GpuError> {
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

fn float8_type(format: Float8) -> cudaDataType {
    match format {
        Float8::E4M3 => cudaDataType::CUDA_R_8F_E4M3,
        Float8::E5M2 => cudaDataType::CUDA_R_8F_E5M2,
    }
}

fn data_type(dtype: DType) -> Result<cudaDataType, GpuError> {
    match dtype {
        DType::F32 => Ok(cudaDataType::CUDA_R_32F),
        DType::BF16 => Ok(cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(cudaDataType::CUDA_R_16F),
        DType::F64 | DType::U32 | DType::U8 => {
            Err(GpuError::Unsupported(format!("GPUs have no matrix products of {dtype:?}")))
        }
    }
}

fn refused(call: &'static str) -> impl Fn(CublasError) -> GpuError {
    move |error| GpuError::Library { library: "cuBLASLt", call, status: format!("{:?}", error.0) }
}

//! Matrix products by hipBLASLt, whose epilogues are cuBLASLt's, from ROCm 6.0 on: its numbers changed before. A plain product that
//! it does not have is rocBLAS's.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::rc::Rc;

use kintsugi_tensor::DType;

use super::api::Handle;
use super::libraries::HIPBLASLT;
use super::rocblas::RocBlas;
use crate::driver::{DeviceRange, Queue};
use crate::error::GpuError;
use crate::products::{
    Addresses, Algorithm, Epilogue, EpilogueAddresses, Factors, Key, ProductDescription, ProductLibrary,
};

/// `HIPBLAS_STATUS_SUCCESS`, `HIPBLAS_STATUS_INVALID_VALUE` and `HIPBLAS_STATUS_NOT_SUPPORTED`.
const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 3;
const NOT_SUPPORTED: c_int = 7;

/// `HIPBLAS_OP_N` and `HIPBLAS_OP_T`.
const PLAIN: i32 = 111;
const TRANSPOSED: i32 = 112;

/// `HIPBLAS_COMPUTE_32F`: fp32 is not rounded to fewer bits.
const COMPUTE_32F: c_int = 2;

/// `hipDataType`.
const R_32F: c_int = 0;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;

/// `hipblasLtMatmulDescAttributes_t`.
const TRANSA: c_int = 0;
const TRANSB: c_int = 1;
const EPILOGUE: c_int = 2;
const BIAS_POINTER: c_int = 3;
const BIAS_DATA_TYPE: c_int = 4;
const AUX_POINTER: c_int = 10;
const AUX_LD: c_int = 11;

/// `HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
const MAX_WORKSPACE_BYTES: c_int = 1;

/// `hipblasLtMatmulAlgo_t`: 16 bytes of the library's, and the most workspace.
type NativeAlgorithm = [u64; 3];

/// `hipblasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Candidate {
    algorithm: NativeAlgorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type CreateLayout = unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int;
type CreateOperation = unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int;
type SetAttribute = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;
type GetVersion = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type GetHeuristic = unsafe extern "C" fn(
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    c_int,
    *mut Candidate,
    *mut c_int,
) -> c_int;
type Matmul = unsafe extern "C" fn(
    Handle,
    Handle,
    *const c_void,
    *const c_void,
    Handle,
    *const c_void,
    Handle,
    *const c_void,
    *const c_void,
    Handle,
    *mut c_void,
    Handle,
    *const NativeAlgorithm,
    *mut c_void,
    usize,
    Handle,
) -> c_int;

/// An object of the library, destroyed when dropped.
#[derive(Debug)]
struct Owned {
    handle: Handle,
    destroy: &'static str,
}

impl Owned {
    /// What `create` makes.
    fn new(
        call: &'static str,
        destroy: &'static str,
        create: impl FnOnce(*mut Handle) -> c_int,
    ) -> Result<Self, GpuError> {
        let mut handle = ptr::null_mut();
        check(call, create(&raw mut handle))?;
        Ok(Owned { handle, destroy })
    }

    /// The layout of a contiguous column-major matrix.
    fn matrix(dtype: c_int, rows: usize, columns: usize) -> Result<Self, GpuError> {
        let call = "hipblasLtMatrixLayoutCreate";
        // SAFETY: the type is that of hipblaslt.h, and there is room for a handle.
        Self::new(call, "hipblasLtMatrixLayoutDestroy", |to| unsafe {
            match HIPBLASLT.function::<CreateLayout>(call) {
                Ok(create) => create(to, dtype, rows as u64, columns as u64, rows as i64),
                Err(_) => NOT_SUPPORTED,
            }
        })
    }

    /// Sets an attribute of a product's description.
    fn set<A: Copy>(&self, attribute: c_int, value: A) -> Result<(), GpuError> {
        self.set_by("hipblasLtMatmulDescSetAttribute", attribute, value)
    }

    fn set_by<A: Copy>(&self, call: &'static str, attribute: c_int, value: A) -> Result<(), GpuError> {
        // SAFETY: every caller passes the type that hipblaslt.h gives for the attribute, and it is copied.
        check(call, unsafe {
            let set: SetAttribute = HIPBLASLT.function(call)?;
            set(self.handle, attribute, (&raw const value).cast(), size_of::<A>())
        })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: all of these functions take the handle alone; made in `new`, destroyed nowhere else.
        unsafe {
            if let Ok(destroy) = HIPBLASLT.function::<Destroy>(self.destroy) {
                let _ = destroy(self.handle);
            }
        }
    }
}

/// The library on one device. Its handle is destroyed when the last product is.
#[derive(Debug)]
pub(super) struct HipBlasLt {
    library: Rc<Owned>,
    plain: Option<RocBlas>,
    version: usize,
}

impl HipBlasLt {
    /// The library for the current device.
    pub(super) fn new() -> Result<Self, GpuError> {
        let mut version = 0;
        // SAFETY: the types are those of hipblaslt.h, and there is room for what is written.
        unsafe {
            let create: Create = HIPBLASLT.function("hipblasLtCreate")?;
            let get: GetVersion = HIPBLASLT.function("hipblasLtGetVersion")?;
            let library = Owned::new("hipblasLtCreate", "hipblasLtDestroy", |to| create(to))?;
            check("hipblasLtGetVersion", get(library.handle, &raw mut version))?;
            Ok(HipBlasLt { library: Rc::new(library), plain: RocBlas::new().ok(), version: version as usize })
        }
    }
}

impl ProductLibrary for HipBlasLt {
    fn name(&self) -> &'static str {
        "hipBLASLt"
    }

    fn version(&self) -> usize {
        self.version
    }

    fn has_epilogues(&self) -> bool {
        true
    }

    fn describe(&self, key: &Key, at: EpilogueAddresses) -> Result<Box<dyn ProductDescription>, GpuError> {
        let Factors::Numbers(input) = key.factors else {
            return Err(GpuError::Unsupported("products of 8-bit formats are for NVIDIA GPUs".into()));
        };
        let (input, output) = (data_type(input)?, data_type(key.output)?);
        let matrix = |rows, columns, transposed| {
            if transposed { Owned::matrix(input, columns, rows) } else { Owned::matrix(input, rows, columns) }
        };
        let call = "hipblasLtMatmulDescCreate";
        // SAFETY: the type is that of hipblaslt.h, and there is room for a handle.
        let operation = unsafe {
            let create: CreateOperation = HIPBLASLT.function(call)?;
            Owned::new(call, "hipblasLtMatmulDescDestroy", |to| create(to, COMPUTE_32F, R_32F))?
        };
        let transpose = |yes| if yes { TRANSPOSED } else { PLAIN };
        operation.set(TRANSA, transpose(key.transposed[0]))?;
        operation.set(TRANSB, transpose(key.transposed[1]))?;
        operation.set(EPILOGUE, epilogue_code(key.epilogue))?;
        if matches!(key.epilogue, Epilogue::Bias | Epilogue::BiasGelu) {
            operation.set(BIAS_DATA_TYPE, output)?;
        }
        let plain = self.plain.as_ref().filter(|_| key.epilogue == Epilogue::Nothing);
        let product = Product {
            a: matrix(key.m, key.k, key.transposed[0])?,
            b: matrix(key.k, key.n, key.transposed[1])?,
            d: Owned::matrix(output, key.m, key.n)?,
            plain: plain.map(|library| library.describe(key, at)).transpose()?,
            library: Rc::clone(&self.library),
            operation,
        };
        product.set_epilogue_addresses(key.epilogue, at, key.m)?;
        Ok(Box::new(product))
    }
}

/// A product's description and layouts, without an algorithm.
#[derive(Debug)]
struct Product {
    library: Rc<Owned>,
    operation: Owned,
    a: Owned,
    b: Owned,
    /// The result, and the matrix that is added.
    d: Owned,
    /// The same by rocBLAS, whose algorithm is all zeros.
    plain: Option<Box<dyn ProductDescription>>,
}

impl ProductDescription for Product {
    fn candidates(
        &self,
        workspace_bytes: u64,
        alignments: [u32; 3],
        count: usize,
    ) -> Result<Vec<Algorithm>, GpuError> {
        let call = "hipblasLtMatmulAlgoGetHeuristic";
        let (mut found, mut returned) = (vec![Candidate::default(); count], 0);
        // SAFETY: the types are those of hipblaslt.h, all objects are alive, and `found` has room for `count`.
        let status = unsafe {
            let create: Create = HIPBLASLT.function("hipblasLtMatmulPreferenceCreate")?;
            let limits =
                Owned::new("hipblasLtMatmulPreferenceCreate", "hipblasLtMatmulPreferenceDestroy", |to| {
                    create(to)
                })?;
            limits.set_by("hipblasLtMatmulPreferenceSetAttribute", MAX_WORKSPACE_BYTES, workspace_bytes)?;
            let get: GetHeuristic = HIPBLASLT.function(call)?;
            get(
                self.library.handle,
                self.operation.handle,
                self.a.handle,
                self.b.handle,
                self.d.handle,
                self.d.handle,
                limits.handle,
                count as c_int,
                found.as_mut_ptr(),
                &raw mut returned,
            )
        };
        if !matches!(status, NOT_SUPPORTED | INVALID_VALUE) {
            check(call, status)?;
        }
        found.truncate(returned as usize);
        found.retain(|candidate| candidate.state == SUCCESS && candidate.workspace as u64 <= workspace_bytes);
        match &self.plain {
            Some(plain) if found.is_empty() => plain.candidates(workspace_bytes, alignments, count),
            _ => Ok(found.iter().map(algorithm).collect()),
        }
    }

    /// The choice was made with the same version of the library, which has no check of its own.
    fn accepts(&self, algorithm: &Algorithm, workspace_bytes: u64) -> bool {
        let is_plain = *algorithm == Algorithm::default();
        if is_plain { self.plain.is_some() } else { algorithm.data[3] <= workspace_bytes }
    }

    fn set_epilogue_addresses(
        &self,
        epilogue: Epilogue,
        at: EpilogueAddresses,
        rows: usize,
    ) -> Result<(), GpuError> {
        if matches!(epilogue, Epilogue::Bias | Epilogue::BiasGelu) {
            self.operation.set(BIAS_POINTER, at.bias)?;
        }
        if matches!(epilogue, Epilogue::Gelu | Epilogue::BiasGelu | Epilogue::GeluDerivative) {
            self.operation.set(AUX_POINTER, at.pre_activation)?;
            self.operation.set(AUX_LD, rows as i64)?;
        }
        Ok(())
    }

    unsafe fn run(
        &self,
        on: &dyn Queue,
        algorithm: &Algorithm,
        at: Addresses,
        add: bool,
        workspace: DeviceRange,
    ) -> Result<(), GpuError> {
        if let Some(plain) = self.plain.as_ref().filter(|_| *algorithm == Algorithm::default()) {
            // SAFETY: the caller's promise.
            return unsafe { plain.run(on, algorithm, at, add, workspace) };
        }
        let [one, two, limit, ..] = algorithm.data;
        let native: NativeAlgorithm = [one, two, limit];
        let (alpha, beta) = (1.0_f32, if add { 1.0_f32 } else { 0.0 });
        // SAFETY: the type is that of hipblaslt.h, scalars are read on the host before the call returns, and the matrices are
        // the caller's promise.
        check("hipblasLtMatmul", unsafe {
            let multiply: Matmul = HIPBLASLT.function("hipblasLtMatmul")?;
            multiply(
                self.library.handle,
                self.operation.handle,
                (&raw const alpha).cast(),
                at.a as *const c_void,
                self.a.handle,
                at.b as *const c_void,
                self.b.handle,
                (&raw const beta).cast(),
                at.c as *const c_void,
                self.d.handle,
                at.d as *mut c_void,
                self.d.handle,
                &raw const native,
                workspace.address as *mut c_void,
                workspace.bytes as usize,
                on.handle(),
            )
        })
    }
}

/// A candidate's algorithm, and after it the workspace that it needs.
fn algorithm(candidate: &Candidate) -> Algorithm {
    let [one, two, limit] = candidate.algorithm;
    Algorithm { data: [one, two, limit, candidate.workspace as u64, 0, 0, 0, 0] }
}

/// `hipblasLtEpilogue_t`.
fn epilogue_code(epilogue: Epilogue) -> c_int {
    match epilogue {
        Epilogue::Nothing => 1,
        Epilogue::Bias => 4,
        Epilogue::Gelu => 160,
        Epilogue::BiasGelu => 164,
        Epilogue::GeluDerivative => 192,
    }
}

fn data_type(dtype: DType) -> Result<c_int, GpuError> {
    match dtype {
        DType::F32 => Ok(R_32F),
        DType::F16 => Ok(R_16F),
        DType::BF16 => Ok(R_16BF),
        DType::F64 | DType::U32 | DType::U8 => {
            Err(GpuError::Unsupported(format!("GPUs have no matrix products of {dtype:?}")))
        }
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), GpuError> {
    if status == SUCCESS {
        return Ok(());
    }
    Err(GpuError::Library { library: "hipBLASLt", call, status: format!("status {status}") })
}

/// The version as the library's number, such as 600 for 0.6.0 and 100202 for 1.2.2.
pub(super) fn version() -> Option<String> {
    HipBlasLt::new().ok().map(|library| library.version.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As hipblaslt.h of ROCm 6.0 to 7.0 declares them.
    #[test]
    fn structures_have_the_sizes_of_the_header() {
        assert_eq!(size_of::<NativeAlgorithm>(), 24);
        assert_eq!((size_of::<Candidate>(), align_of::<Candidate>()), (56, 8));
    }

    #[test]
    fn the_workspace_of_a_candidate_is_kept_beside_its_algorithm() {
        let candidate = Candidate { algorithm: [1, 2, 3], workspace: 4, ..Candidate::default() };
        assert_eq!(algorithm(&candidate).data, [1, 2, 3, 4, 0, 0, 0, 0]);
    }
}

//! Matrix products by rocBLAS. It has no epilogues: kernels of ours apply them after a plain product.

use std::ffi::{c_char, c_int, c_void};
use std::rc::Rc;

use kintsugi_tensor::DType;

use super::api::Handle;
use super::libraries::ROCBLAS;
use crate::driver::{DeviceRange, Queue};
use crate::error::GpuError;
use crate::products::{
    Addresses, Algorithm, Epilogue, EpilogueAddresses, Factors, Key, ProductDescription, ProductLibrary,
};

/// `rocblas_operation_none` and `rocblas_operation_transpose`.
const PLAIN: c_int = 111;
const TRANSPOSED: c_int = 112;

/// `rocblas_datatype_f32_r`, in which sums are taken.
const F32: c_int = 151;

type GemmEx = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    i32,
    u32,
) -> c_int;

/// The library on one device. Its handle is destroyed when the last product is.
#[derive(Debug)]
pub(super) struct RocBlas(Rc<Connection>);

#[derive(Debug)]
struct Connection {
    handle: Handle,
    multiply: GemmEx,
}

impl RocBlas {
    /// A handle for the current device.
    pub(super) fn new() -> Result<Self, GpuError> {
        type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `rocblas_create_handle(rocblas_handle *)`, and the type of `rocblas_gemm_ex` as rocblas.h declares it.
        unsafe {
            let multiply = ROCBLAS.function("rocblas_gemm_ex")?;
            let create: Create = ROCBLAS.function("rocblas_create_handle")?;
            check("rocblas_create_handle", create(&raw mut handle))?;
            Ok(RocBlas(Rc::new(Connection { handle, multiply })))
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        type Destroy = unsafe extern "C" fn(Handle) -> c_int;
        // SAFETY: `rocblas_destroy_handle(rocblas_handle)`; created in `new`, destroyed nowhere else.
        unsafe {
            if let Ok(destroy) = ROCBLAS.function::<Destroy>("rocblas_destroy_handle") {
                let _ = destroy(self.handle);
            }
        }
    }
}

impl ProductLibrary for RocBlas {
    fn name(&self) -> &'static str {
        "rocBLAS"
    }

    /// There is nothing to tune.
    fn version(&self) -> usize {
        0
    }

    fn has_epilogues(&self) -> bool {
        false
    }

    fn describe(&self, key: &Key, _at: EpilogueAddresses) -> Result<Box<dyn ProductDescription>, GpuError> {
        let Factors::Numbers(input) = key.factors else {
            return Err(GpuError::Unsupported("rocBLAS has no products of these 8-bit formats".into()));
        };
        for dtype in [input, key.output] {
            data_type(dtype)?;
        }
        Ok(Box::new(Product { key: *key, input, connection: Rc::clone(&self.0) }))
    }
}

#[derive(Debug)]
struct Product {
    key: Key,
    input: DType,
    connection: Rc<Connection>,
}

impl ProductDescription for Product {
    /// The library's own choice.
    fn candidates(
        &self,
        _workspace: u64,
        _alignments: [u32; 3],
        _count: usize,
    ) -> Result<Vec<Algorithm>, GpuError> {
        Ok(if self.key.epilogue == Epilogue::Nothing { vec![Algorithm::default()] } else { Vec::new() })
    }

    fn accepts(&self, _algorithm: &Algorithm, _workspace: u64) -> bool {
        self.key.epilogue == Epilogue::Nothing
    }

    fn set_epilogue_addresses(
        &self,
        _epilogue: Epilogue,
        _at: EpilogueAddresses,
        _rows: usize,
    ) -> Result<(), GpuError> {
        Ok(())
    }

    unsafe fn run(
        &self,
        on: &dyn Queue,
        _algorithm: &Algorithm,
        at: Addresses,
        add: bool,
        workspace: DeviceRange,
    ) -> Result<(), GpuError> {
        type SetStream = unsafe extern "C" fn(Handle, Handle) -> c_int;
        type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int;
        let Key { m, n, k, transposed, output, .. } = self.key;
        let input = self.input;
        let Connection { handle, multiply } = *self.connection;
        let [m, n, k] = [m, n, k].map(|length| length as c_int);
        let operation = transposed.map(|yes| if yes { TRANSPOSED } else { PLAIN });
        let columns = [if transposed[0] { k } else { m }, if transposed[1] { n } else { k }];
        let (input, output) = (data_type(input)?, data_type(output)?);
        let (alpha, beta) = (1.0_f32, if add { 1.0_f32 } else { 0.0 });
        // SAFETY: the types are those of rocblas.h, scalars are read on the host before the call returns, and the matrices
        // are the caller's promise.
        unsafe {
            let set_stream: SetStream = ROCBLAS.function("rocblas_set_stream")?;
            check("rocblas_set_stream", set_stream(handle, on.handle()))?;
            let set_workspace: SetWorkspace = ROCBLAS.function("rocblas_set_workspace")?;
            let (to, bytes) = (workspace.address as *mut c_void, workspace.bytes as usize);
            check("rocblas_set_workspace", set_workspace(handle, to, bytes))?;
            let status = multiply(
                handle,
                operation[0],
                operation[1],
                m,
                n,
                k,
                (&raw const alpha).cast(),
                at.a as *const c_void,
                input,
                columns[0],
                at.b as *const c_void,
                input,
                columns[1],
                (&raw const beta).cast(),
                at.c as *const c_void,
                output,
                m,
                at.d as *mut c_void,
                output,
                m,
                F32,
                0,
                0,
                0,
            );
            check("rocblas_gemm_ex", status)
        }
    }
}

/// `rocblas_datatype`.
fn data_type(dtype: DType) -> Result<c_int, GpuError> {
    match dtype {
        DType::F16 => Ok(150),
        DType::F32 => Ok(F32),
        DType::BF16 => Ok(168),
        DType::F64 | DType::U32 | DType::U8 => {
            Err(GpuError::Unsupported(format!("GPUs have no matrix products of {dtype:?}")))
        }
    }
}

fn check(call: &'static str, status: c_int) -> Result<(), GpuError> {
    if status == 0 {
        return Ok(());
    }
    Err(GpuError::Library { library: "rocBLAS", call, status: format!("status {status}") })
}

/// The version as the library writes it.
pub(super) fn version() -> Option<String> {
    type Version = unsafe extern "C" fn(*mut c_char, usize) -> c_int;
    let mut text = [0_u8; 64];
    // SAFETY: `rocblas_get_version_string(char *, size_t)`, with a buffer and its length.
    let status = unsafe {
        let version: Version = ROCBLAS.function("rocblas_get_version_string").ok()?;
        version(text.as_mut_ptr().cast(), text.len())
    };
    let end = text.iter().position(|&byte| byte == 0)?;
    (status == 0).then(|| String::from_utf8_lossy(&text[..end]).into_owned())
}

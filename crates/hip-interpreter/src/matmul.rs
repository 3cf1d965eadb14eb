//! hipBLASLt's products with their epilogues, on the CPU.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::products::{Matrix, Multiplication, TRANSPOSED, multiply};
use crate::state::{INVALID, SUCCESS, with};

type Handle = *mut c_void;

/// `HIPBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 7;

/// `hipDataType`, as rocBLAS numbers these types.
const TYPES: [(c_int, c_int); 3] = [(0, 151), (2, 150), (14, 168)];

/// Bits of `hipblasLtEpilogue_t`: a bias is added, GELU is taken, its input is kept, GELU's derivative is a factor.
const BIAS: c_int = 4;
const GELU: c_int = 32;
const DERIVATIVE: c_int = 64;
const KEPT: c_int = 128;

#[derive(Clone, Copy)]
struct Layout {
    dtype: c_int,
    rows: usize,
    columns: usize,
    column: usize,
}

#[derive(Clone, Copy, Default)]
struct Operation {
    transposed: [bool; 2],
    epilogue: c_int,
    bias: u64,
    bias_type: Option<c_int>,
    kept: u64,
    kept_column: usize,
}

/// Puts a value behind a handle.
unsafe fn make<T>(to: *mut Handle, value: T) -> c_int {
    // SAFETY: room for a handle.
    unsafe { *to = Box::into_raw(Box::new(value)).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtCreate(to: *mut Handle) -> c_int {
    // SAFETY: room for a handle, which nobody follows.
    unsafe { *to = ptr::without_provenance_mut(1) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipblasLtDestroy(_handle: Handle) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtGetVersion(_handle: Handle, version: *mut c_int) -> c_int {
    // SAFETY: an integer to write to.
    unsafe { *version = 100_202 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatrixLayoutCreate(
    to: *mut Handle,
    dtype: c_int,
    rows: u64,
    columns: u64,
    column: i64,
) -> c_int {
    let Some((_, dtype)) = TYPES.into_iter().find(|(name, _)| *name == dtype) else { return INVALID };
    let layout = Layout { dtype, rows: rows as usize, columns: columns as usize, column: column as usize };
    // SAFETY: room for a handle.
    unsafe { make(to, layout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatrixLayoutDestroy(layout: Handle) -> c_int {
    // SAFETY: made above, destroyed once.
    drop(unsafe { Box::from_raw(layout.cast::<Layout>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulDescCreate(to: *mut Handle, compute: c_int, scale: c_int) -> c_int {
    // `HIPBLAS_COMPUTE_32F` and `HIP_R_32F`.
    if (compute, scale) != (2, 0) {
        return NOT_SUPPORTED;
    }
    // SAFETY: room for a handle.
    unsafe { make(to, Operation { epilogue: 1, ..Operation::default() }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulDescDestroy(operation: Handle) -> c_int {
    // SAFETY: made above, destroyed once.
    drop(unsafe { Box::from_raw(operation.cast::<Operation>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulDescSetAttribute(
    operation: Handle,
    attribute: c_int,
    value: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: a live description, and as many bytes as their number says.
    unsafe {
        let operation = &mut *operation.cast::<Operation>();
        let narrow = || value.cast::<c_int>().read_unaligned();
        let wide = || value.cast::<u64>().read_unaligned();
        match (attribute, bytes) {
            (0, 4) => operation.transposed[0] = narrow() == TRANSPOSED,
            (1, 4) => operation.transposed[1] = narrow() == TRANSPOSED,
            (2, 4) => operation.epilogue = narrow(),
            (3, 8) => operation.bias = wide(),
            (4, 4) => operation.bias_type = Some(narrow()),
            (10, 8) => operation.kept = wide(),
            (11, 8) => operation.kept_column = wide() as usize,
            _ => return INVALID,
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulPreferenceCreate(to: *mut Handle) -> c_int {
    // SAFETY: room for a handle.
    unsafe { make(to, 0_u64) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulPreferenceDestroy(preference: Handle) -> c_int {
    // SAFETY: made above, destroyed once.
    drop(unsafe { Box::from_raw(preference.cast::<u64>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulPreferenceSetAttribute(
    preference: Handle,
    attribute: c_int,
    value: *const c_void,
    bytes: usize,
) -> c_int {
    if (attribute, bytes) != (1, 8) {
        return INVALID;
    }
    // SAFETY: a live preference, and eight bytes.
    unsafe { *preference.cast::<u64>() = value.cast::<u64>().read_unaligned() };
    SUCCESS
}

/// `hipblasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct Candidate {
    algorithm: [u64; 3],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// One algorithm for all products whose result has a multiple of 8 rows; none for others, which are left to rocBLAS.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmulAlgoGetHeuristic(
    _handle: Handle,
    _operation: Handle,
    _a: Handle,
    _b: Handle,
    _c: Handle,
    d: Handle,
    preference: Handle,
    wanted: c_int,
    found: *mut Candidate,
    count: *mut c_int,
) -> c_int {
    // SAFETY: live objects, room for as many candidates as are wanted, and an integer to write to.
    unsafe {
        *count = 0;
        if (*d.cast::<Layout>()).rows % 8 != 0 {
            return NOT_SUPPORTED;
        }
        if wanted > 0 {
            let algorithm = [7, 11, *preference.cast::<u64>()];
            *found = Candidate { algorithm, workspace: 0, state: SUCCESS, waves: 1.0, reserved: [0; 4] };
            *count = 1;
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipblasLtMatmul(
    _handle: Handle,
    operation: Handle,
    alpha: *const c_void,
    a: *const c_void,
    a_layout: Handle,
    b: *const c_void,
    b_layout: Handle,
    beta: *const c_void,
    c: *const c_void,
    c_layout: Handle,
    d: *mut c_void,
    d_layout: Handle,
    algorithm: *const [u64; 3],
    _workspace: *mut c_void,
    _workspace_bytes: usize,
    _stream: Handle,
) -> c_int {
    // SAFETY: live objects; the scalars have the compute type and are on the host.
    let (operation, layouts, scalars, algorithm) = unsafe {
        let layout = |handle: Handle| *handle.cast::<Layout>();
        let scalar = |at: *const c_void| f64::from(*at.cast::<f32>());
        let layouts = [a_layout, b_layout, c_layout, d_layout].map(layout);
        (*operation.cast::<Operation>(), layouts, [scalar(alpha), scalar(beta)], *algorithm)
    };
    let [a_layout, b_layout, c_layout, d_layout] = layouts;
    let is_consistent = a_layout.dtype == b_layout.dtype && c_layout.dtype == d_layout.dtype;
    if algorithm[..2] != [7, 11] || !is_consistent || d_layout.column != d_layout.rows {
        return INVALID;
    }
    let matrix = |address: u64, of: Layout| Matrix { address, dtype: of.dtype, column: of.column };
    let [m, n] = [d_layout.rows, d_layout.columns];
    let k = if operation.transposed[0] { a_layout.rows } else { a_layout.columns };
    with(|state| {
        let mut results = multiply(
            state,
            Multiplication {
                a: matrix(a as u64, a_layout),
                b: matrix(b as u64, b_layout),
                c: matrix(c as u64, c_layout),
                size: [m, n, k],
                transposed: operation.transposed,
                scalars,
            },
        );
        let vector = |address, column| Matrix { address, dtype: d_layout.dtype, column };
        if operation.epilogue & BIAS != 0 {
            let bias = vector(operation.bias, m).read(state, 1);
            results.iter_mut().enumerate().for_each(|(i, x)| *x += bias[i % m]);
        }
        let kept = vector(operation.kept, operation.kept_column);
        if operation.epilogue & DERIVATIVE != 0 {
            let kept = kept.read(state, n);
            results.iter_mut().zip(kept).for_each(|(x, kept)| *x *= slope(kept.into()) as f32);
        } else if operation.epilogue & GELU != 0 {
            if operation.epilogue & KEPT != 0 {
                kept.write(state, &results);
            }
            for x in &mut results {
                *x = gelu((*x).into()) as f32;
            }
        }
        matrix(d as u64, d_layout).write(state, &results);
    });
    SUCCESS
}

/// `√(2/π)·(x + 0.044715·x³)`.
fn inner(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + inner(x).tanh())
}

fn slope(x: f64) -> f64 {
    let tanh = inner(x).tanh();
    let derivative = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * derivative
}

//! Matrix products of rocBLAS, on the CPU: sums in f64, rounded once.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use half::{bf16, f16};

use crate::state::{INVALID, SUCCESS, State, with};

/// `rocblas_operation_transpose`, and `HIPBLAS_OP_T`.
pub const TRANSPOSED: c_int = 112;

/// `rocblas_datatype` of f16, f32 and bf16.
const F16: c_int = 150;
const F32: c_int = 151;
const BF16: c_int = 168;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rocblas_create_handle(to: *mut *mut c_void) -> c_int {
    // SAFETY: room for a handle, which nobody follows.
    unsafe { *to = ptr::without_provenance_mut(1) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn rocblas_destroy_handle(_handle: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn rocblas_set_stream(_handle: *mut c_void, _stream: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn rocblas_set_workspace(_handle: *mut c_void, _to: *mut c_void, _bytes: usize) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rocblas_get_version_string(to: *mut c_char, bytes: usize) -> c_int {
    const VERSION: &[u8] = b"5.0.0 of the interpreter\0";
    if bytes < VERSION.len() {
        return INVALID;
    }
    // SAFETY: there is room.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(VERSION.as_ptr(), VERSION.len()) };
    SUCCESS
}

/// A matrix in columns, as it is stored.
#[derive(Clone, Copy)]
pub struct Matrix {
    pub address: u64,
    pub dtype: c_int,
    /// Elements from a column to the next.
    pub column: usize,
}

impl Matrix {
    fn bytes(self) -> usize {
        if self.dtype == F32 { 4 } else { 2 }
    }

    /// The elements of this many stored columns.
    pub fn read(self, state: &State, columns: usize) -> Vec<f32> {
        let bytes = state.machine.read(self.address, self.column * columns * self.bytes());
        match self.dtype {
            F32 => bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect(),
            BF16 => bytes.as_chunks().0.iter().map(|&x| bf16::from_le_bytes(x).to_f32()).collect(),
            F16 => bytes.as_chunks().0.iter().map(|&x| f16::from_le_bytes(x).to_f32()).collect(),
            other => panic!("rocblas_datatype {other}"),
        }
    }

    pub fn write(self, state: &mut State, values: &[f32]) {
        let bytes: Vec<u8> = match self.dtype {
            F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            other => panic!("rocblas_datatype {other}"),
        };
        state.machine.write(self.address, &bytes);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rocblas_gemm_ex(
    _handle: *mut c_void,
    operation_a: c_int,
    operation_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    a_column: c_int,
    b: *const c_void,
    b_type: c_int,
    b_column: c_int,
    beta: *const c_void,
    c: *const c_void,
    c_type: c_int,
    c_column: c_int,
    d: *mut c_void,
    d_type: c_int,
    d_column: c_int,
    compute_type: c_int,
    _algorithm: c_int,
    _solution: i32,
    _flags: u32,
) -> c_int {
    if compute_type != F32 || c_type != d_type || [m, n, k].iter().any(|&length| length <= 0) {
        return INVALID;
    }
    let [m, n, k] = [m, n, k].map(|length| length as usize);
    let matrix = |address: u64, dtype, column: c_int| Matrix { address, dtype, column: column as usize };
    let (a, b) = (matrix(a as u64, a_type, a_column), matrix(b as u64, b_type, b_column));
    let (c, d) = (matrix(c as u64, c_type, c_column), matrix(d as u64, d_type, d_column));
    // SAFETY: the scalars have the compute type and are on the host.
    let (alpha, beta) = unsafe { (f64::from(*alpha.cast::<f32>()), f64::from(*beta.cast::<f32>())) };
    let transposed = [operation_a, operation_b].map(|operation| operation == TRANSPOSED);
    assert!(c.column == m && d.column == m, "the result has no gaps between its columns");
    with(|state| {
        let results =
            multiply(state, Multiplication { a, b, c, size: [m, n, k], transposed, scalars: [alpha, beta] });
        d.write(state, &results);
    });
    SUCCESS
}

/// `α·A·B + β·C`.
#[derive(Clone, Copy)]
pub struct Multiplication {
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    /// Rows, columns and the inner length.
    pub size: [usize; 3],
    pub transposed: [bool; 2],
    pub scalars: [f64; 2],
}

/// The result by columns, without gaps.
pub fn multiply(state: &State, of: Multiplication) -> Vec<f32> {
    let Multiplication { a, b, c, size: [m, n, k], transposed, scalars: [alpha, beta] } = of;
    let left = a.read(state, if transposed[0] { m } else { k });
    let right = b.read(state, if transposed[1] { k } else { n });
    let added = if beta == 0.0 { vec![0.0; m * n] } else { c.read(state, n) };
    let mut sums = vec![0.0_f64; m * n];
    for (column, sums) in sums.chunks_mut(m).enumerate() {
        for inner in 0..k {
            let at = if transposed[1] { inner * b.column + column } else { column * b.column + inner };
            let factor = f64::from(right[at]);
            for (row, sum) in sums.iter_mut().enumerate() {
                let at = if transposed[0] { row * a.column + inner } else { inner * a.column + row };
                *sum += f64::from(left[at]) * factor;
            }
        }
    }
    sums.iter().zip(&added).map(|(sum, c)| (alpha * sum + beta * f64::from(*c)) as f32).collect()
}

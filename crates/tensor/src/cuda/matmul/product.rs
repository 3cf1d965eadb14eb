//! One kind of product: its description, and the algorithm that runs it.

use std::fmt;

use cudarc::cublaslt::sys::cublasLtEpilogue_t;

use super::library::{Addresses, Algorithm, Described, Handle, Matrix, Operation};
use super::tune::Trial;
use crate::DType;
use crate::cuda::error::CudaError;

/// Alignment beyond which algorithms do not differ.
pub const ALIGNMENT: u32 = 16;

/// Candidates that are tried when tuning.
const CANDIDATES: usize = 8;

/// What happens to finished sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// They are rounded and stored.
    Nothing,
    /// A bias is added.
    Bias,
    /// They are kept, and the result is their GELU.
    Gelu,
    /// A bias is added, then as [`Epilogue::Gelu`].
    BiasGelu,
    /// They are multiplied by the derivative of GELU at what was kept.
    GeluDerivative,
}

impl Epilogue {
    fn code(self) -> cublasLtEpilogue_t {
        match self {
            Epilogue::Nothing => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            Epilogue::BiasGelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluDerivative => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }
}

/// All that decides which algorithm is best. Matrices are column-major: `D[m, n] = A[m, k] · B[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Whether A and B lie transposed in memory.
    pub transposed: [bool; 2],
    /// Type of A and B.
    pub input: DType,
    /// Type of D.
    pub output: DType,
    /// What happens to finished sums.
    pub epilogue: Epilogue,
    /// Add to D.
    pub accumulate: bool,
    /// What the addresses of A, B and D are multiples of, up to [`ALIGNMENT`].
    pub alignments: [u32; 3],
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Key { m, n, k, transposed, input, output, epilogue, accumulate, alignments } = self;
        let [a, b] = transposed.map(|yes| if yes { 'T' } else { 'N' });
        let add = if *accumulate { "+=" } else { "=" };
        write!(f, "{a}{b} {m}x{n}x{k} {input:?} {add} {output:?} {epilogue:?} {alignments:?}")
    }
}

/// Addresses of what an epilogue reads or writes; zero where it has no such thing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// The bias, `[m]`.
    pub bias: u64,
    /// The values before GELU, `[m, n]`.
    pub kept: u64,
}

/// A product that cuBLASLt can do.
#[derive(Debug)]
pub struct Product {
    pub(super) described: Described,
    pub(super) choice: Choice,
}

/// How a product's algorithm is chosen.
#[derive(Debug)]
pub enum Choice {
    /// It is.
    Made(Algorithm),
    /// Candidates are being timed.
    Trial(Trial),
}

impl Product {
    /// Prepares a product, or answers `None` if cuBLASLt has no algorithm for it. `stored` is the choice of an
    /// earlier run; with `tune` several candidates are tried when there is none.
    pub fn new(
        handle: &Handle,
        key: &Key,
        extras: Extras,
        workspace_bytes: u64,
        stored: Option<Algorithm>,
        tune: bool,
    ) -> Result<Option<Self>, CudaError> {
        let described = describe(key, extras)?;
        if let Some(algorithm) = stored
            && described.accepts(handle, &algorithm, workspace_bytes)
        {
            return Ok(Some(Product { described, choice: Choice::Made(algorithm) }));
        }
        let count = if tune { CANDIDATES } else { 1 };
        let candidates = described.candidates(handle, workspace_bytes, key.alignments, count)?;
        let choice = match *candidates {
            [] => return Ok(None),
            [only] => Choice::Made(only),
            _ => Choice::Trial(Trial::new(candidates)),
        };
        Ok(Some(Product { described, choice }))
    }

    /// Sets the addresses that belong to the operation.
    pub fn set_extras(&self, key: &Key, extras: Extras) -> Result<(), CudaError> {
        set_extras(&self.described.operation, key, extras)
    }
}

fn describe(key: &Key, extras: Extras) -> Result<Described, CudaError> {
    let matrix = |rows, columns, transposed, dtype| {
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        Matrix::new(dtype, rows, columns)
    };
    let described = Described {
        operation: Operation::new(key.transposed, key.epilogue.code())?,
        a: matrix(key.m, key.k, key.transposed[0], key.input)?,
        b: matrix(key.k, key.n, key.transposed[1], key.input)?,
        d: matrix(key.m, key.n, false, key.output)?,
    };
    set_extras(&described.operation, key, extras)?;
    Ok(described)
}

fn set_extras(operation: &Operation, key: &Key, extras: Extras) -> Result<(), CudaError> {
    if matches!(key.epilogue, Epilogue::Bias | Epilogue::BiasGelu) {
        operation.set_bias(extras.bias)?;
    }
    if matches!(key.epilogue, Epilogue::Gelu | Epilogue::BiasGelu | Epilogue::GeluDerivative) {
        operation.set_kept(extras.kept, key.m)?;
    }
    Ok(())
}

/// The alignments of a key.
pub fn alignments(at: Addresses) -> [u32; 3] {
    at.alignments(ALIGNMENT)
}

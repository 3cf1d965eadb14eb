//! One kind of product: the ways to do it, their descriptions, and the algorithm that runs it.

use std::fmt;

use cudarc::cublaslt::sys::cublasLtEpilogue_t;

use super::library::{Addresses, Algorithm, Described, Handle, Matrix, Operation};
use crate::DType;
use crate::cuda::error::CudaError;

/// Alignment beyond which algorithms do not differ.
pub const ALIGNMENT: u32 = 16;

/// Candidates that are tried when tuning.
const CANDIDATES: usize = 8;

/// Whose kernel it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Maker {
    /// cuBLASLt's.
    Library,
    /// Ours.
    Ours,
}

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

/// What is added to the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addend {
    /// Nothing, or what the result holds. A product that adds to its result cannot be repeated to find its algorithm, so
    /// it shares that of the one that does not.
    Nothing,
    /// Another matrix of the result's shape and type.
    Other,
}

/// All that decides which algorithm is best. Matrices are column-major: `D[m, n] = A[m, k] · B[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Whose kernel it is.
    pub maker: Maker,
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
    /// What is added.
    pub addend: Addend,
    /// What the addresses of A, B, and D with what is added are multiples of, up to [`ALIGNMENT`].
    pub alignments: [u32; 3],
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Key { m, n, k, transposed, input, output, epilogue, addend, alignments, .. } = self;
        let [a, b] = transposed.map(|yes| if yes { 'T' } else { 'N' });
        let add = match addend {
            Addend::Nothing => "=",
            Addend::Other => "+ other =",
        };
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

/// A product that can be done in at least one way.
#[derive(Debug)]
pub struct Product {
    /// One for each way, if it is cuBLASLt's.
    pub(super) described: Vec<Option<Described>>,
    /// At least one, the most promising first; one alone is the choice.
    pub(super) candidates: Vec<Chosen>,
}

/// A way to do a product, and the algorithm for it.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    /// Index of the way.
    pub way: usize,
    /// The algorithm.
    pub algorithm: Algorithm,
}

impl Product {
    /// Prepares a product that can be done in several ways, or answers `None` if there is an algorithm for none.
    /// `stored` is the choice of an earlier run; where there is none, `tune` asks for candidates of all ways, and
    /// otherwise the first way that there is an algorithm for is taken.
    pub fn new(
        handle: &Handle,
        ways: &[(Key, Extras)],
        workspace_bytes: u64,
        stored: Option<Chosen>,
        tune: bool,
    ) -> Result<Option<Self>, CudaError> {
        let describe = |(key, extras): &(Key, Extras)| match key.maker {
            Maker::Library => describe(key, *extras).map(Some),
            Maker::Ours => Ok(None),
        };
        let described = ways.iter().map(describe).collect::<Result<Vec<_>, _>>()?;
        let accepts = |way: &Option<Described>, algorithm| match way {
            Some(described) => described.accepts(handle, algorithm, workspace_bytes),
            None => true,
        };
        if let Some(chosen) = stored
            && described.get(chosen.way).is_some_and(|way| accepts(way, &chosen.algorithm))
        {
            return Ok(Some(Product { described, candidates: vec![chosen] }));
        }
        let mut candidates = Vec::new();
        for (way, (described, (key, _))) in described.iter().zip(ways).enumerate() {
            let count = match (tune, way) {
                (true, 0) => CANDIDATES,
                (true, _) => CANDIDATES / 2,
                (false, _) if candidates.is_empty() => 1,
                (false, _) => break,
            };
            let found = match described {
                Some(described) => described.candidates(handle, workspace_bytes, key.alignments, count)?,
                None => vec![Algorithm { data: [0; 8] }],
            };
            candidates.extend(found.into_iter().map(|algorithm| Chosen { way, algorithm }));
        }
        Ok((!candidates.is_empty()).then_some(Product { described, candidates }))
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
    described.operation.set_extras(key.epilogue, extras, key.m)?;
    Ok(described)
}

impl Operation {
    /// Sets the addresses that an epilogue needs, for a result of `rows`.
    pub(super) fn set_extras(
        &self,
        epilogue: Epilogue,
        extras: Extras,
        rows: usize,
    ) -> Result<(), CudaError> {
        if matches!(epilogue, Epilogue::Bias | Epilogue::BiasGelu) {
            self.set_bias(extras.bias)?;
        }
        if matches!(epilogue, Epilogue::Gelu | Epilogue::BiasGelu | Epilogue::GeluDerivative) {
            self.set_kept(extras.kept, rows)?;
        }
        Ok(())
    }
}

/// The alignments of a key.
pub fn alignments(at: Addresses) -> [u32; 3] {
    at.alignments(ALIGNMENT)
}

//! One kind of product: its variants, their descriptors, and the algorithm that runs it.

use std::fmt;

use cudarc::cublaslt::sys::cublasLtEpilogue_t;

use super::library::{Addresses, Algorithm, Handle, Matrix, Operation, ProductDescription};
use crate::error::CudaError;
use kintsugi_tensor::DType;

/// Larger alignments make no difference to the algorithms.
pub const ALIGNMENT: u32 = 16;

/// Algorithms per variant that are measured when tuning.
const CANDIDATES: usize = 8;

/// Where the kernel comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Provider {
    /// cuBLASLt's.
    Library,
    /// Ours.
    Ours,
}

/// What is done to finished sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// They are rounded and cached.
    Nothing,
    /// A bias is added.
    Bias,
    /// They are cached as the pre-activation, and the result is their GELU.
    Gelu,
    /// A bias is added, then [`Epilogue::Gelu`].
    BiasGelu,
    /// They are multiplied by GELU's derivative at the cached pre-activation.
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

/// The matrix that is added to the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addend {
    /// None, or the previous contents of the result. A product that accumulates cannot be repeated for tuning, so it
    /// shares the algorithm of the product that does not.
    Nothing,
    /// Another matrix of the result's shape and type.
    Other,
}

/// Everything that decides which algorithm is fastest. Matrices are column-major: `D[m, n] = A[m, k] · B[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Whose kernel it is.
    pub provider: Provider,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the inner dimension.
    pub k: usize,
    /// Whether A and B are transposed in memory.
    pub transposed: [bool; 2],
    /// Type of A and B.
    pub input: DType,
    /// Type of D.
    pub output: DType,
    /// What happens to finished sums.
    pub epilogue: Epilogue,
    /// What is added.
    pub addend: Addend,
    /// The largest powers of two, up to [`ALIGNMENT`], that divide the addresses of A, of B, and of D and the added
    /// matrix.
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

/// Addresses that an epilogue reads or writes; zero if it has none.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpilogueAddresses {
    /// The bias, `[m]`.
    pub bias: u64,
    /// The pre-activation, `[m, n]`.
    pub pre_activation: u64,
}

/// A product that at least one variant supports.
#[derive(Debug)]
pub struct Product {
    /// One per variant; `None` for kernels of ours.
    pub(super) description: Vec<Option<ProductDescription>>,
    /// At least one, the most promising first. A single candidate is the final choice.
    pub(super) candidates: Vec<Choice>,
}

/// A variant of a product, and the algorithm for it.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Index of the variant.
    pub variant: usize,
    /// The algorithm.
    pub algorithm: Algorithm,
}

impl Product {
    /// Prepares a product. Returns `None` if no variant has an algorithm. `cached` is the choice of an earlier run.
    /// Without it, `tune` requests candidates of all variants; otherwise the first variant that has an algorithm is
    /// used.
    pub fn new(
        handle: &Handle,
        variants: &[(Key, EpilogueAddresses)],
        workspace_bytes: u64,
        cached: Option<Choice>,
        tune: bool,
    ) -> Result<Option<Self>, CudaError> {
        let describe = |(key, epilogue_addresses): &(Key, EpilogueAddresses)| match key.provider {
            Provider::Library => describe(key, *epilogue_addresses).map(Some),
            Provider::Ours => Ok(None),
        };
        let description = variants.iter().map(describe).collect::<Result<Vec<_>, _>>()?;
        let accepts = |variant: &Option<ProductDescription>, algorithm| match variant {
            Some(description) => description.accepts(handle, algorithm, workspace_bytes),
            None => true,
        };
        if let Some(choice) = cached
            && description.get(choice.variant).is_some_and(|variant| accepts(variant, &choice.algorithm))
        {
            return Ok(Some(Product { description, candidates: vec![choice] }));
        }
        let mut candidates = Vec::new();
        for (variant, (description, (key, _))) in description.iter().zip(variants).enumerate() {
            let count = match (tune, variant) {
                (true, 0) => CANDIDATES,
                (true, _) => CANDIDATES / 2,
                (false, _) if candidates.is_empty() => 1,
                (false, _) => break,
            };
            let found = match description {
                Some(description) => {
                    description.candidates(handle, workspace_bytes, key.alignments, count)?
                }
                None => vec![Algorithm { data: [0; 8] }],
            };
            candidates.extend(found.into_iter().map(|algorithm| Choice { variant, algorithm }));
        }
        Ok((!candidates.is_empty()).then_some(Product { description, candidates }))
    }
}

fn describe(key: &Key, epilogue_addresses: EpilogueAddresses) -> Result<ProductDescription, CudaError> {
    let matrix = |rows, columns, transposed, dtype| {
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        Matrix::new(dtype, rows, columns)
    };
    let description = ProductDescription {
        operation: Operation::new(key.transposed, key.epilogue.code())?,
        a: matrix(key.m, key.k, key.transposed[0], key.input)?,
        b: matrix(key.k, key.n, key.transposed[1], key.input)?,
        d: matrix(key.m, key.n, false, key.output)?,
    };
    description.operation.set_epilogue_addresses(key.epilogue, epilogue_addresses, key.m)?;
    Ok(description)
}

impl Operation {
    /// Sets the addresses that an epilogue needs, for a result with this many rows.
    pub(super) fn set_epilogue_addresses(
        &self,
        epilogue: Epilogue,
        epilogue_addresses: EpilogueAddresses,
        rows: usize,
    ) -> Result<(), CudaError> {
        if matches!(epilogue, Epilogue::Bias | Epilogue::BiasGelu) {
            self.set_bias(epilogue_addresses.bias)?;
        }
        if matches!(epilogue, Epilogue::Gelu | Epilogue::BiasGelu | Epilogue::GeluDerivative) {
            self.set_pre_activation(epilogue_addresses.pre_activation, rows)?;
        }
        Ok(())
    }
}

/// The alignments of a key.
pub fn alignments(at: Addresses) -> [u32; 3] {
    at.alignments(ALIGNMENT)
}

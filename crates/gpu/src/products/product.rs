//! One kind of product: its variants, their descriptors, and the algorithm that runs it.

use std::fmt;

use super::library::{Addresses, Algorithm, ProductDescription, ProductLibrary};
use crate::error::GpuError;
use kintsugi_tensor::{DType, Float8};

/// Larger alignments make no difference to the algorithms.
pub const ALIGNMENT: u32 = 16;

/// Algorithms per variant that are measured when tuning.
const CANDIDATES: usize = 8;

/// Where the kernel comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Provider {
    /// The library's.
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

/// The matrix that is added to the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addend {
    /// None, or the previous contents of the result. A product that accumulates cannot be repeated for tuning, so it
    /// shares the algorithm of the product that does not.
    Nothing,
    /// Another matrix of the result's shape and type.
    Other,
}

/// The types of A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Factors {
    /// Numbers of one type.
    Numbers(DType),
    /// Codes of 8 bits.
    Float8 {
        /// The formats of A and B.
        formats: [Float8; 2],
        /// Whether some low bits of the sums may be lost, which is faster.
        fast: bool,
    },
}

impl fmt::Display for Factors {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Factors::Numbers(dtype) => write!(f, "{dtype:?}"),
            Factors::Float8 { formats: [a, b], fast } => {
                write!(f, "{a:?}*{b:?} {}", if *fast { "fast" } else { "exact" })
            }
        }
    }
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
    /// Types of A and B.
    pub factors: Factors,
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
        let Key { m, n, k, transposed, factors, output, epilogue, addend, alignments, .. } = self;
        let [a, b] = transposed.map(|yes| if yes { 'T' } else { 'N' });
        let add = match addend {
            Addend::Nothing => "=",
            Addend::Other => "+ other =",
        };
        write!(f, "{a}{b} {m}x{n}x{k} {factors} {add} {output:?} {epilogue:?} {alignments:?}")
    }
}

/// Addresses that an epilogue reads or writes; zero if it has none.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpilogueAddresses {
    /// The bias, `[m]`.
    pub bias: u64,
    /// The pre-activation, `[m, n]`.
    pub pre_activation: u64,
    /// The inverses of the scales of A and B, if they are codes of 8 bits.
    pub scales: [u64; 2],
}

/// A product that at least one variant supports.
#[derive(Debug)]
pub struct Product {
    /// One per variant; `None` for kernels of ours.
    pub(super) description: Vec<Option<Box<dyn ProductDescription>>>,
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
        library: &dyn ProductLibrary,
        variants: &[(Key, EpilogueAddresses)],
        workspace_bytes: u64,
        cached: Option<Choice>,
        tune: bool,
    ) -> Result<Option<Self>, GpuError> {
        let describe = |(key, epilogue_addresses): &(Key, EpilogueAddresses)| match key.provider {
            Provider::Library => library.describe(key, *epilogue_addresses).map(Some),
            Provider::Ours => Ok(None),
        };
        let description = variants.iter().map(describe).collect::<Result<Vec<_>, _>>()?;
        let accepts = |variant: &Option<Box<dyn ProductDescription>>, algorithm| match variant {
            Some(description) => description.accepts(algorithm, workspace_bytes),
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
                Some(description) => description.candidates(workspace_bytes, key.alignments, count)?,
                None => vec![Algorithm::default()],
            };
            candidates.extend(found.into_iter().map(|algorithm| Choice { variant, algorithm }));
        }
        Ok((!candidates.is_empty()).then_some(Product { description, candidates }))
    }
}

/// The alignments of a key.
pub fn alignments(at: Addresses) -> [u32; 3] {
    at.alignments(ALIGNMENT)
}

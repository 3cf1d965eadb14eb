//! Matrix product with an epilogue: `out (+)= a · b`, then a function of the caller on the finished sums.
//!
//! This is our own implementation in the manner of BLIS. The `gemm` crate packs into heap memory that the arena does
//! not see, has neither bf16 nor epilogues, and does not promise the same bits for every number of threads. Here the
//! scratch is [`SCRATCH_BYTES`] (1.1 MiB) per thread, 16-bit operands are widened while they are packed, and results
//! are rounded once.

#![allow(clippy::inline_always, reason = "what the innermost loops call must not be called")]

mod block;
mod grid;
mod kernel;
mod operand;
mod pack;
#[cfg(test)]
mod tests;

pub use block::SCRATCH_BYTES;
pub use operand::{Operand, Output};

use self::grid::Grid;
use self::kernel::{InstructionSet, Kernel};
use crate::cpu::element::Element;

/// `out[m, n] (+)= a[m, k] · b[k, n]`.
#[derive(Debug)]
pub struct Product<'a, In, Out, Right = In> {
    /// Rows of `a` and `out`.
    pub m: usize,
    /// Columns of `b` and `out`.
    pub n: usize,
    /// Columns of `a`, rows of `b`.
    pub k: usize,
    /// Left factor.
    pub a: Operand<'a, In>,
    /// Right factor.
    pub b: Operand<'a, Right>,
    /// The result.
    pub out: Output<'a, Out>,
    /// Add to what is in `out` instead of overwriting it.
    pub accumulate: bool,
}

/// A function `|row, first_column, sums|` on the finished sums of `out[row, first_column ..]`, before they are rounded and
/// written. It is called once for each element, on any thread.
///
/// It is called through a pointer for a row of a tile at a time. Compiling every product for every epilogue instead takes
/// minutes and gains nothing.
pub type Epilogue<'a, A> = &'a (dyn Fn(usize, usize, &mut [A]) + Sync);

/// Runs a product on up to `threads` threads of the current rayon pool. `scratch` has [`SCRATCH_BYTES`] for each.
///
/// The result has the same bits for every number of threads. With one thread the product runs on the caller's thread.
pub fn gemm<In, Out, Right>(
    product: Product<In, Out, Right>,
    epilogue: Option<Epilogue<In::Accumulator>>,
    scratch: &mut [u8],
    threads: usize,
) where
    In: Element,
    Right: Element<Accumulator = In::Accumulator>,
    Out: Element<Accumulator = In::Accumulator>,
{
    run(InstructionSet::best::<In::Accumulator>(), product, epilogue, scratch, threads);
}

#[expect(clippy::needless_pass_by_value, reason = "the product carries an exclusive borrow")]
fn run<In, Out, Right>(
    set: InstructionSet,
    product: Product<In, Out, Right>,
    epilogue: Option<Epilogue<In::Accumulator>>,
    scratch: &mut [u8],
    threads: usize,
) where
    In: Element,
    Right: Element<Accumulator = In::Accumulator>,
    Out: Element<Accumulator = In::Accumulator>,
{
    let Product { m, n, k, a, b, ref out, .. } = product;
    assert!(a.holds(m, k) && b.holds(k, n) && out.holds(m, n), "an operand is smaller than {m} × {n} × {k}");
    assert!(scratch.len() >= threads * SCRATCH_BYTES, "scratch for fewer than {threads} threads");
    match set {
        InstructionSet::Portable => {
            run_grid::<_, _, _, kernel::Portable, _, _>(&product, epilogue, scratch, threads);
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => {
            run_grid::<_, _, _, kernel::Avx2, _, _>(&product, epilogue, scratch, threads);
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => {
            run_grid::<_, _, _, kernel::Avx512, _, _>(&product, epilogue, scratch, threads);
        }
    }
}

fn run_grid<In, Out, Right, K, const R: usize, const C: usize>(
    product: &Product<In, Out, Right>,
    epilogue: Option<Epilogue<In::Accumulator>>,
    scratch: &mut [u8],
    threads: usize,
) where
    In: Element,
    Right: Element<Accumulator = In::Accumulator>,
    Out: Element<Accumulator = In::Accumulator>,
    K: Kernel<R, C>,
{
    let grid = Grid::new::<R, C>(product.m, product.n, product.k, threads);
    grid.for_each(scratch, &|rectangle, scratch| {
        block::run::<_, _, _, K, R, C>(product, epilogue, rectangle, scratch);
    });
}

//! Microkernels: each sums one small tile of the result over one block of depth, in registers.
//!
//! In every kernel each element is one chain of fused multiply-adds from zero, in the order of depth. So the tile shape
//! and the instruction set do not affect the bits of a result.

use std::array::from_fn;

use crate::cpu::element::Real;

/// The output of a kernel: row-major, with rows `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Tile<A> {
    /// The first element.
    pub pointer: *mut A,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Add to what is there instead of overwriting it.
    pub add: bool,
}

/// A kernel for tiles of `R × C`.
pub trait Kernel<const R: usize, const C: usize> {
    /// `tile (+)= aᵀ · b`, with `a` packed as `[depth, R]` and `b` as `[depth, C]`.
    ///
    /// # Safety
    /// The pointers must be valid for these sizes, and the kernel must support `A` and the processor.
    unsafe fn run<A: Real>(depth: usize, a: *const A, b: *const A, tile: Tile<A>);
}

/// The instruction sets that have a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// Plain loops, vectorised by the compiler; for any accumulator.
    Portable,
    /// AVX2 and FMA, for f32.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512, for f32.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// Every instruction set that this processor has for accumulator `A`, the fastest last.
    pub fn available<A: Real>() -> impl DoubleEndedIterator<Item = Self> {
        let all = [
            InstructionSet::Portable,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512,
        ];
        all.into_iter().filter(|set| set.runs::<A>())
    }

    fn runs<A: Real>(self) -> bool {
        match self {
            InstructionSet::Portable => true,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => {
                A::DTYPE == crate::DType::F32
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => A::DTYPE == crate::DType::F32 && is_x86_feature_detected!("avx512f"),
        }
    }

    /// The fastest instruction set.
    pub fn best<A: Real>() -> Self {
        Self::available::<A>().next_back().unwrap_or(InstructionSet::Portable)
    }
}

/// Loops over arrays, in a form that compilers vectorise.
pub struct Portable;

impl Kernel<4, 8> for Portable {
    unsafe fn run<A: Real>(depth: usize, a: *const A, b: *const A, tile: Tile<A>) {
        let (a, b) = (a.cast::<[A; 4]>(), b.cast::<[A; 8]>());
        let mut sums = [[A::ZERO; 8]; 4];
        for p in 0..depth {
            // SAFETY: both have `depth` lines.
            let (a, b) = unsafe { (*a.add(p), *b.add(p)) };
            for i in 0..4 {
                for j in 0..8 {
                    sums[i][j] = a[i].mul_add(b[j], sums[i][j]);
                }
            }
        }
        for (i, mut row) in sums.into_iter().enumerate() {
            // SAFETY: the tile has this row of eight.
            unsafe {
                let target = tile.pointer.add(i * tile.stride).cast::<[A; 8]>();
                if tile.add {
                    row = from_fn(|j| (*target)[j] + row[j]);
                }
                *target = row;
            }
        }
    }
}

/// Generates a kernel for f32: `$rows` rows of `$vectors` vectors of `$lanes`, with the given intrinsics.
#[cfg(target_arch = "x86_64")]
macro_rules! vector_kernel {
    (
        $(#[$doc:meta])* $name:ident, $function:ident, $features:literal, $rows:literal x $vectors:literal x $lanes:literal,
        $zero:ident, $load:ident, $broadcast:ident, $multiply_add:ident, $add:ident, $store:ident
    ) => {
        $(#[$doc])*
        pub struct $name;

        impl Kernel<$rows, { $vectors * $lanes }> for $name {
            #[inline(always)]
            unsafe fn run<A: Real>(depth: usize, a: *const A, b: *const A, tile: Tile<A>) {
                let Tile { pointer, stride, add } = tile;
                // SAFETY: as the caller promises; `A` is f32.
                unsafe { $function(depth, a.cast(), b.cast(), Tile { pointer: pointer.cast(), stride, add }) }
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn $function(depth: usize, a: *const f32, b: *const f32, tile: Tile<f32>) {
            use std::arch::x86_64::{$zero, $load, $broadcast, $multiply_add, $add, $store};
            let mut sums = [[$zero(); $vectors]; $rows];
            for p in 0..depth {
                // SAFETY: `a` and `b` have `depth` lines of `$rows` and of `$vectors · $lanes` elements.
                unsafe {
                    let (a, b) = (a.add(p * $rows), b.add(p * $vectors * $lanes));
                    let right: [_; $vectors] = from_fn(|j| $load(b.add(j * $lanes)));
                    for (i, row) in sums.iter_mut().enumerate() {
                        let left = $broadcast(*a.add(i));
                        for (sum, &right) in row.iter_mut().zip(&right) {
                            *sum = $multiply_add(left, right, *sum);
                        }
                    }
                }
            }
            for (i, row) in sums.iter().enumerate() {
                for (j, &sum) in row.iter().enumerate() {
                    // SAFETY: the tile has this row of `$vectors · $lanes` elements.
                    unsafe {
                        let target = tile.pointer.add(i * tile.stride + j * $lanes);
                        $store(target, if tile.add { $add($load(target), sum) } else { sum });
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector_kernel!(
    /// Twelve vectors of sums, three of `b` and one of `a` fill the sixteen registers.
    Avx2, avx2, "avx2,fma", 4 x 3 x 8,
    _mm256_setzero_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps, _mm256_storeu_ps
);

#[cfg(target_arch = "x86_64")]
vector_kernel!(
    /// Sixteen vectors of sums hide the latency, and most model widths are multiples of this tile.
    Avx512, avx512, "avx512f", 8 x 2 x 16,
    _mm512_setzero_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps, _mm512_storeu_ps
);

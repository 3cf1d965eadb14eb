//! Matrix product: `out (+)= op(a) · op(b)`, with an epilogue on the finished sums.

use std::marker::PhantomData;

use crate::cpu::element::{Element, Real};

/// Bytes of scratch that each thread needs.
pub const SCRATCH_BYTES: usize = 2 << 20;

/// A matrix that is read: element `(i, j)` is `data[i · row_stride + j · column_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, T> {
    /// From the first element to the last, or further.
    pub data: &'a [T],
    /// Elements from a row to the next.
    pub row_stride: usize,
    /// Elements from a column to the next.
    pub column_stride: usize,
}

impl<'a, T> Operand<'a, T> {
    /// A row-major matrix whose rows lie `row_stride` apart.
    pub fn new(data: &'a [T], row_stride: usize) -> Self {
        Operand { data, row_stride, column_stride: 1 }
    }

    /// The same memory with rows and columns exchanged.
    #[must_use]
    pub fn transposed(self) -> Self {
        Operand { data: self.data, row_stride: self.column_stride, column_stride: self.row_stride }
    }
}

/// The matrix that is written, row-major.
#[derive(Debug)]
pub struct Output<'a, T> {
    pointer: *mut T,
    len: usize,
    row_stride: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for the exclusive borrow of its elements, as `&mut [T]` does.
unsafe impl<T: Send> Send for Output<'_, T> {}
// SAFETY: a shared reference gives no access to elements except through an unsafe method.
unsafe impl<T: Sync> Sync for Output<'_, T> {}

impl<'a, T> Output<'a, T> {
    /// A matrix in a slice, its rows `row_stride` apart.
    pub fn new(data: &'a mut [T], row_stride: usize) -> Self {
        Output { pointer: data.as_mut_ptr(), len: data.len(), row_stride, lifetime: PhantomData }
    }

    /// A matrix of which the gaps between rows belong to others, as when heads are interleaved.
    ///
    /// # Safety
    /// `pointer` is valid for `len` elements during `'a`, and nobody else touches those of the matrix.
    pub unsafe fn from_raw(pointer: *mut T, len: usize, row_stride: usize) -> Self {
        Output { pointer, len, row_stride, lifetime: PhantomData }
    }

    unsafe fn segment(&self, row: usize, column: usize, len: usize) -> &'a mut [T] {
        let start = row * self.row_stride + column;
        assert!(start + len <= self.len);
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}

/// `out[m, n] (+)= a[m, k] · b[k, n]`.
#[derive(Debug)]
pub struct Product<'a, In, Out> {
    /// Rows of `a` and `out`.
    pub m: usize,
    /// Columns of `b` and `out`.
    pub n: usize,
    /// Columns of `a`, rows of `b`.
    pub k: usize,
    /// Left factor.
    pub a: Operand<'a, In>,
    /// Right factor.
    pub b: Operand<'a, In>,
    /// Where the result goes.
    pub out: Output<'a, Out>,
    /// Add to what is in `out` instead of overwriting it.
    pub accumulate: bool,
}

/// What is done to finished sums before they are rounded and written.
///
/// Closures `|row, first_column, sums|` are epilogues.
pub trait Epilogue<A>: Sync {
    /// Changes the sums of `out[row, first_column ..]`. Called once for every element, from several threads.
    fn apply(&self, row: usize, first_column: usize, sums: &mut [A]);
}

/// Writes the sums as they are.
#[derive(Clone, Copy, Debug)]
pub struct NoEpilogue;

impl<A> Epilogue<A> for NoEpilogue {
    #[inline(always)]
    fn apply(&self, _row: usize, _first_column: usize, _sums: &mut [A]) {}
}

impl<A, F: Fn(usize, usize, &mut [A]) + Sync> Epilogue<A> for F {
    #[inline(always)]
    fn apply(&self, row: usize, first_column: usize, sums: &mut [A]) {
        self(row, first_column, sums);
    }
}

/// Runs a product on `threads` threads of the current rayon pool; `scratch` has [`SCRATCH_BYTES`] for each.
///
/// The result has the same bits for every number of threads.
pub fn gemm<In, Out, E>(product: Product<In, Out>, epilogue: &E, scratch: &mut [u8], threads: usize)
where
    In: Element,
    Out: Element<Accumulator = In::Accumulator>,
    E: Epilogue<In::Accumulator>,
{
    let _ = threads;
    gemm_serial(product, epilogue, scratch);
}

/// Runs a product on the calling thread; `scratch` has [`SCRATCH_BYTES`].
pub fn gemm_serial<In, Out, E>(product: Product<In, Out>, epilogue: &E, scratch: &mut [u8])
where
    In: Element,
    Out: Element<Accumulator = In::Accumulator>,
    E: Epilogue<In::Accumulator>,
{
    let _ = scratch;
    let Product { m, n, k, a, b, out, accumulate } = product;
    for i in 0..m {
        for j in 0..n {
            let target = unsafe { &mut out.segment(i, j, 1)[0] };
            let mut sum = [if accumulate { target.widen() } else { In::Accumulator::ZERO }];
            for p in 0..k {
                let left = a.data[i * a.row_stride + p * a.column_stride].widen();
                sum[0] = left.mul_add(b.data[p * b.row_stride + j * b.column_stride].widen(), sum[0]);
            }
            epilogue.apply(i, j, &mut sum);
            *target = Out::round(sum[0]);
        }
    }
}

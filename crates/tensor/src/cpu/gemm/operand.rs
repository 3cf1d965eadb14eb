//! The matrices of a product, as slices with strides.

use std::marker::PhantomData;

use crate::cpu::element::Element;

/// A matrix that is read: element `(i, j)` is `data[i · row_stride + j · column_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, T> {
    /// All elements of the matrix, and possibly more.
    pub data: &'a [T],
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one column to the next.
    pub column_stride: usize,
}

impl<'a, T> Operand<'a, T> {
    /// A row-major matrix with rows `row_stride` elements apart.
    pub fn new(data: &'a [T], row_stride: usize) -> Self {
        Operand { data, row_stride, column_stride: 1 }
    }

    /// The transpose, over the same memory.
    #[must_use]
    pub fn transposed(self) -> Self {
        Operand { data: self.data, row_stride: self.column_stride, column_stride: self.row_stride }
    }

    /// Whether `rows × columns` fit into the data.
    pub(super) fn holds(&self, rows: usize, columns: usize) -> bool {
        rows == 0
            || columns == 0
            || (rows - 1) * self.row_stride + (columns - 1) * self.column_stride < self.data.len()
    }
}

/// The matrix that is written, row-major.
#[derive(Debug)]
pub struct Output<'a, T> {
    pointer: *mut T,
    len: usize,
    row_stride: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it represents an exclusive borrow of its elements, which shared references access only through unsafe
// methods.
unsafe impl<T: Send> Send for Output<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Output<'_, T> {}

impl<'a, T: Element> Output<'a, T> {
    /// A matrix in a slice, with rows `row_stride` elements apart.
    pub fn new(data: &'a mut [T], row_stride: usize) -> Self {
        Output { pointer: data.as_mut_ptr(), len: data.len(), row_stride, borrow: PhantomData }
    }

    /// Whether `rows × columns` fit into the memory without overlap.
    pub(super) fn holds(&self, rows: usize, columns: usize) -> bool {
        let fits = |last_row: usize| last_row * self.row_stride + columns <= self.len;
        rows == 0 || (fits(rows - 1) && (rows == 1 || columns <= self.row_stride))
    }

    /// Elements from one row to the next.
    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// The same memory, if its type is the accumulator.
    pub(super) fn as_sums(&self) -> Option<Output<'a, T::Accumulator>> {
        let Output { pointer, len, row_stride, borrow: _ } = *self;
        let same = T::DTYPE == <T::Accumulator as Element>::DTYPE;
        same.then(|| Output { pointer: pointer.cast(), len, row_stride, borrow: PhantomData })
    }

    /// Address of an element, which must be inside the matrix.
    pub(super) fn pointer_to(&self, row: usize, column: usize) -> *mut T {
        self.pointer.wrapping_add(row * self.row_stride + column)
    }

    /// `len` elements of a row.
    ///
    /// # Safety
    /// They must be inside the matrix, and no other reference to any of them may be alive.
    pub(super) unsafe fn segment(&self, row: usize, column: usize, len: usize) -> &'a mut [T] {
        let start = row * self.row_stride + column;
        debug_assert!(start + len <= self.len, "a segment beyond the matrix");
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}

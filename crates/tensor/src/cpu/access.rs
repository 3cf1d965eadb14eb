//! The only place where a [`View`] becomes a Rust slice.
//!
//! Views are shared and may overlap; slices must not. Each operation opens one [`Access`]. It records every range that
//! it hands out, and panics if a writable slice would overlap another slice.

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;

use super::element::{Element, Real};
use crate::{AddressSpace, DType, View};

/// More than the views of the largest operation.
const VIEWS: usize = 20;

/// Bytes `start..end`, and whether the slice is writable.
#[derive(Clone, Copy, Default)]
struct Span {
    start: u64,
    end: u64,
    written: bool,
}

/// The slices of one running operation. Only one may be open at a time.
pub struct Access {
    spans: [Cell<Span>; VIEWS],
    used: Cell<usize>,
}

impl Access {
    /// No slices yet.
    pub fn new() -> Self {
        Access { spans: Default::default(), used: Cell::new(0) }
    }

    /// A view that is only read.
    pub fn read<'s, T: Element>(&'s self, view: View<'s>) -> &'s [T] {
        let pointer = self.claim::<T>(view, T::DTYPE, false);
        // SAFETY: `claim` has checked the address space, type, alignment and that no writable slice overlaps. The view keeps its
        // buffer alive, and host memory is always initialised.
        unsafe { std::slice::from_raw_parts(pointer, view.len()) }
    }

    /// The bytes of a view that is only read, whatever its type.
    pub fn bytes<'s>(&'s self, view: View<'s>) -> &'s [u8] {
        let pointer = self.claim::<u8>(view, view.dtype(), false);
        // SAFETY: as in `read`, and the element types are plain numbers without padding.
        unsafe { std::slice::from_raw_parts(pointer, view.bytes()) }
    }

    /// The bytes of a view that is written, whatever its type.
    pub fn write_bytes<'s>(&'s self, view: View<'s>) -> &'s mut [u8] {
        let pointer = self.claim::<u8>(view, view.dtype(), true);
        // SAFETY: as in `write`, and every type of a view takes any bits.
        unsafe { std::slice::from_raw_parts_mut(pointer, view.bytes()) }
    }

    /// A view that is written, or read and written.
    pub fn write<'s, T: Element>(&'s self, view: View<'s>) -> &'s mut [T] {
        let pointer = self.claim::<T>(view, T::DTYPE, true);
        // SAFETY: as in `read`, and `claim` has checked that no other slice overlaps.
        unsafe { std::slice::from_raw_parts_mut(pointer, view.len()) }
    }

    /// Token ids that are read.
    pub fn tokens<'s>(&'s self, view: View<'s>) -> &'s [u32] {
        let pointer = self.claim::<u32>(view, DType::U32, false);
        // SAFETY: as in `read`.
        unsafe { std::slice::from_raw_parts(pointer, view.len()) }
    }

    /// Token ids that are written.
    pub fn write_tokens<'s>(&'s self, view: View<'s>) -> &'s mut [u32] {
        let pointer = self.claim::<u32>(view, DType::U32, true);
        // SAFETY: as in `write`.
        unsafe { std::slice::from_raw_parts_mut(pointer, view.len()) }
    }

    /// A writable view that starts as a copy of `from`. Its old contents are lost. The two may be the same view.
    ///
    /// With it, operations that may run in place are written as if they always did.
    pub fn in_place<'s, T: Element>(
        &'s self,
        from: View<'s>,
        to: View<'s>,
    ) -> (Option<&'s [T]>, &'s mut [T]) {
        let same = from.address() == to.address() && from.len() == to.len();
        (if same { None } else { Some(self.read(from)) }, self.write(to))
    }

    fn claim<T>(&self, view: View, dtype: DType, written: bool) -> *mut T {
        assert_eq!(view.address_space(), AddressSpace::Host, "the CPU cannot reach this memory");
        assert_eq!(view.dtype(), dtype, "a view has another type than the operation works in");
        let span = Span { start: view.address(), end: view.address() + view.bytes() as u64, written };
        assert!(span.start.is_multiple_of(align_of::<T>() as u64), "a view is not aligned");
        let used = self.used.get();
        for other in self.spans[..used].iter().map(Cell::get) {
            let overlaps = span.start < other.end && other.start < span.end;
            assert!(!(overlaps && (written || other.written)), "an operation writes where it also reads");
        }
        self.spans[used].set(span);
        self.used.set(used + 1);
        span.start as *mut T
    }
}

/// The bytes of a slice of numbers, for scratch that every operation divides and types anew.
pub fn bytes_of<A: Real>(numbers: &mut [A]) -> &mut [u8] {
    // SAFETY: the implementors of `Real` are plain floats: no padding, and every byte may be written.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

/// A thread's scratch as numbers with undefined contents.
pub fn scratch_of<A: Real>(bytes: &mut [u8]) -> &mut [A] {
    // SAFETY: the implementors of `Real` are plain floats: every bit pattern is one.
    let (before, numbers, _) = unsafe { bytes.align_to_mut::<A>() };
    assert!(before.is_empty(), "scratch is not aligned");
    numbers
}

/// A thread's scratch as indices with undefined contents.
pub fn indices_of(bytes: &mut [u8]) -> &mut [u32] {
    // SAFETY: every bit pattern is an integer.
    let (before, indices, _) = unsafe { bytes.align_to_mut::<u32>() };
    assert!(before.is_empty(), "scratch is not aligned");
    indices
}

/// A writable slice from which several threads take disjoint ranges, such as the vectors of different heads.
pub struct Scatter<'a, T> {
    cells: &'a [UnsafeCell<T>],
    exclusive: PhantomData<&'a mut [T]>,
}

// SAFETY: elements are accessed only through `part`, whose callers keep the ranges disjoint.
unsafe impl<T: Send> Sync for Scatter<'_, T> {}

impl<'a, T> Scatter<'a, T> {
    /// Makes a slice shareable.
    pub fn new(slice: &'a mut [T]) -> Self {
        // SAFETY: `UnsafeCell<T>` has the layout of `T`, and the exclusive borrow lasts as long as the cells.
        let cells = unsafe { &*(std::ptr::from_mut(slice) as *const [UnsafeCell<T>]) };
        Scatter { cells, exclusive: PhantomData }
    }

    /// A range of the slice.
    ///
    /// # Safety
    /// No other range that overlaps this one may be in use at the same time.
    #[expect(clippy::mut_from_ref, reason = "the caller vouches that parts are disjoint")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        let cells = &self.cells[range];
        // SAFETY: in bounds, and exclusive by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(UnsafeCell::raw_get(cells.as_ptr()), cells.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Category;
    use crate::cpu::testing::TestBackend;

    #[test]
    fn views_that_touch_are_fine() {
        let backend = TestBackend::new(1);
        let buffer = backend.buffer(&[1.0, 2.0, 3.0, 4.0], DType::F64);
        let access = Access::new();
        let (left, right) = (access.read::<f64>(buffer.slice(0..2)), access.write::<f64>(buffer.slice(2..4)));
        right.copy_from_slice(left);
        assert_eq!(backend.values(buffer.view()), [1.0, 2.0, 1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "writes where it also reads")]
    fn a_written_view_may_not_overlap_one_that_is_read() {
        let backend = TestBackend::new(1);
        let buffer = backend.buffer(&[0.0; 4], DType::F32);
        let access = Access::new();
        let _read = access.read::<f32>(buffer.slice(0..3));
        access.write::<f32>(buffer.slice(2..4));
    }

    #[test]
    #[should_panic(expected = "another type")]
    fn the_type_must_be_the_views() {
        let backend = TestBackend::new(1);
        Access::new().read::<f32>(backend.buffer(&[0.0], DType::BF16).view());
    }

    #[test]
    #[should_panic(expected = "cannot reach")]
    fn paper_is_refused() {
        let memory: std::rc::Rc<dyn crate::Memory> = std::rc::Rc::new(crate::Arena::on_paper());
        Access::new().read::<f32>(crate::Buffer::new(&memory, 1, DType::F32, Category::Weights).view());
    }
}

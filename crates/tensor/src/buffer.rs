//! Typed ranges of a rank's memory, and views of parts of them.

use std::ops::Range;
use std::rc::Rc;

use crate::DType;
use crate::memory::{Block, Category, Foreign, Memory, Place};

/// A typed range of memory. Dropping it releases the memory.
#[derive(Debug)]
pub struct Buffer {
    memory: Rc<dyn Memory>,
    block: Block,
    len: usize,
    dtype: DType,
}

impl Buffer {
    /// Allocates `len` elements from `memory`. Their contents are undefined.
    pub fn new(memory: &Rc<dyn Memory>, len: usize, dtype: DType, category: Category) -> Self {
        let block = memory.allocate((len * dtype.bytes()) as u64, category);
        Buffer { memory: Rc::clone(memory), block, len, dtype }
    }

    /// Elements that belong to another rank of this process and that this rank's backend can access.
    ///
    /// # Safety
    /// The elements must be live memory of the kind that `memory` reports, and nobody else may access them in a way
    /// that conflicts with the accesses through this buffer.
    pub unsafe fn foreign(memory: &Rc<Foreign>, address: u64, len: usize, dtype: DType) -> Self {
        let block = Block { address, bytes: (len * dtype.bytes()) as u64, category: Category::Communication };
        Buffer { memory: Rc::clone(memory) as Rc<dyn Memory>, block, len, dtype }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.block.address
    }

    /// What kind of address that is.
    pub fn place(&self) -> Place {
        self.memory.place()
    }

    /// All of it.
    pub fn view(&self) -> View<'_> {
        View { buffer: self, start: 0, len: self.len }
    }

    /// A part of it.
    pub fn slice(&self, range: Range<usize>) -> View<'_> {
        self.view().slice(range)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.memory.release(self.block);
    }
}

/// A contiguous part of a [`Buffer`].
///
/// Views are what operations take, for inputs and outputs alike: as on a GPU, an operation writes through a shared
/// view, and each operation says which of its views it writes.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    buffer: &'a Buffer,
    start: usize,
    len: usize,
}

impl<'a> View<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.buffer.dtype
    }

    /// Bytes it spans.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype().bytes()
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.buffer.address() + (self.start * self.dtype().bytes()) as u64
    }

    /// What kind of address that is.
    pub fn place(&self) -> Place {
        self.buffer.place()
    }

    /// A part of it.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> View<'a> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        View { buffer: self.buffer, start: self.start + range.start, len: range.end - range.start }
    }
}

impl<'a> From<&'a Buffer> for View<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        buffer.view()
    }
}

//! Typed ranges of a rank's memory, and views of parts of them.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::rc::Rc;

use crate::DType;
use crate::memory::{AddressSpace, Block, Category, Foreign, Memory};

/// A typed range of memory. Dropping it releases the memory.
#[derive(Debug)]
pub struct Buffer {
    memory: Rc<dyn Memory>,
    block: Block,
    len: usize,
    dtype: DType,
    /// False for a part of a divided buffer.
    owns_memory: bool,
}

impl Buffer {
    /// Allocates `len` elements from `memory`. Their contents are undefined.
    pub fn new(memory: &Rc<dyn Memory>, len: usize, dtype: DType, category: Category) -> Self {
        let block = memory.allocate((len * dtype.bytes()) as u64, category);
        Buffer { memory: Rc::clone(memory), block, len, dtype, owns_memory: true }
    }

    /// Elements that belong to another rank of this process and that this rank's backend can access.
    ///
    /// # Safety
    /// The elements must be live memory of the kind that `memory` reports, and nobody else may access them in a way
    /// that conflicts with the accesses through this buffer.
    pub unsafe fn foreign(memory: &Rc<Foreign>, address: u64, len: usize, dtype: DType) -> Self {
        let block = Block { address, bytes: (len * dtype.bytes()) as u64, category: Category::Communication };
        Buffer { memory: Rc::clone(memory) as Rc<dyn Memory>, block, len, dtype, owns_memory: true }
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
    pub fn address_space(&self) -> AddressSpace {
        self.memory.address_space()
    }

    /// All of it.
    pub fn view(&self) -> View<'_> {
        View { buffer: self, start: 0, len: self.len }
    }

    /// A part of it.
    pub fn slice(&self, range: Range<usize>) -> View<'_> {
        self.view().slice(range)
    }

    /// Divides it into `count` parts of equal length, so that several transfers can own a part each.
    pub fn split(self, count: usize) -> (DividedBuffer, impl Iterator<Item = Buffer>) {
        assert!(count > 0 && self.len.is_multiple_of(count), "{} elements in {count} parts", self.len);
        let (len, dtype, block, memory) = (self.len / count, self.dtype, self.block, Rc::clone(&self.memory));
        let bytes = (len * dtype.bytes()) as u64;
        let part = move |i: usize| {
            let block = Block { address: block.address + i as u64 * bytes, bytes, ..block };
            Buffer { memory: Rc::clone(&memory), block, len, dtype, owns_memory: false }
        };
        (DividedBuffer(ManuallyDrop::new(self)), (0..count).map(part))
    }
}

/// A buffer that [`Buffer::split`] has divided.
///
/// If it is dropped instead of joined, its memory leaks, because a part may still be in a transfer.
#[derive(Debug)]
pub struct DividedBuffer(ManuallyDrop<Buffer>);

impl DividedBuffer {
    /// The whole buffer again, from all of its parts in order.
    #[must_use]
    pub fn join(self, parts: impl IntoIterator<Item = Buffer>) -> Buffer {
        let whole = ManuallyDrop::into_inner(self.0);
        let end = parts.into_iter().fold(whole.address(), |next, part| {
            assert_eq!(part.address(), next, "the parts of a divided buffer are joined in order");
            next + part.view().bytes() as u64
        });
        let all = whole.address() + whole.view().bytes() as u64;
        assert_eq!(end, all, "every part of a divided buffer is needed to join it");
        whole
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.owns_memory {
            self.memory.release(self.block);
        }
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
    pub fn address_space(&self) -> AddressSpace {
        self.buffer.address_space()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;

    fn buffer(memory: &Rc<dyn Memory>) -> Buffer {
        Buffer::new(memory, 12, DType::F32, Category::Activations)
    }

    #[test]
    fn parts_follow_each_other_and_join_to_the_same_buffer() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        let (_first, whole) = (buffer(&memory), buffer(&memory));
        let address = whole.address();
        let (divided, parts) = whole.split(3);
        let parts: Vec<Buffer> = parts.collect();
        let found: Vec<_> = parts.iter().map(|part| (part.address(), part.len())).collect();
        assert_eq!(found, [(address, 4), (address + 16, 4), (address + 32, 4)]);
        let whole = divided.join(parts);
        assert_eq!((whole.address(), whole.len()), (address, 12));
        assert_ne!(buffer(&memory).address(), address, "its memory is still in use");
        drop(whole);
        assert_eq!(buffer(&memory).address(), address, "its memory is free");
    }

    #[test]
    fn a_part_does_not_release_memory() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        let (divided, parts) = buffer(&memory).split(2);
        drop((divided, parts.collect::<Vec<_>>()));
        assert_ne!(buffer(&memory).address(), 0, "the memory of a divided buffer leaks");
    }

    #[test]
    #[should_panic(expected = "every part")]
    fn a_missing_part_is_noticed() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        let (divided, parts) = buffer(&memory).split(2);
        let _ = divided.join(parts.take(1));
    }
}

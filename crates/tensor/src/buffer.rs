//! Typed ranges of a rank's memory, and views of parts of them.

use std::ops::Range;
use std::rc::Rc;

use crate::DType;
use crate::memory::{Block, Category, Foreign, Memory, Place, Usage};

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

    /// Divides it into `count` parts of equal length, so that several transfers can own a part each. The memory is
    /// released when neither the divided buffer nor any part is left.
    #[must_use]
    pub fn split(self, count: usize) -> (DividedBuffer, Vec<Buffer>) {
        assert!(count > 0 && self.len.is_multiple_of(count), "{} elements in {count} parts", self.len);
        let (len, dtype, block) = (self.len / count, self.dtype, self.block);
        let bytes = (len * dtype.bytes()) as u64;
        let divided = DividedBuffer(Rc::new(Divided(self)));
        let part = |i: usize| Buffer {
            memory: Rc::clone(&divided.0) as Rc<dyn Memory>,
            block: Block { address: block.address + i as u64 * bytes, bytes, category: block.category },
            len,
            dtype,
        };
        let parts = (0..count).map(part).collect();
        (divided, parts)
    }
}

/// A buffer that [`Buffer::split`] has divided.
#[derive(Debug)]
pub struct DividedBuffer(Rc<Divided>);

impl DividedBuffer {
    /// The whole buffer again, from all of its parts.
    #[must_use]
    pub fn join(self, parts: Vec<Buffer>) -> Buffer {
        drop(parts);
        Rc::try_unwrap(self.0).expect("every part of a divided buffer is needed to join it").0
    }
}

/// The memory of the parts of a divided buffer.
#[derive(Debug)]
struct Divided(Buffer);

impl Memory for Divided {
    fn place(&self) -> Place {
        self.0.place()
    }

    fn allocate(&self, _: u64, _: Category) -> Block {
        panic!("a divided buffer is not given out again")
    }

    fn release(&self, _: Block) {}

    fn peak(&self) -> Usage {
        Usage::default()
    }

    fn reserved(&self) -> u64 {
        0
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
        let found: Vec<_> = parts.iter().map(|part| (part.address(), part.len())).collect();
        assert_eq!(found, [(address, 4), (address + 16, 4), (address + 32, 4)]);
        let whole = divided.join(parts);
        assert_eq!((whole.address(), whole.len()), (address, 12));
        assert_ne!(buffer(&memory).address(), address, "its memory is still in use");
    }

    #[test]
    fn the_last_part_releases_the_memory() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        let (divided, mut parts) = buffer(&memory).split(2);
        let address = parts[0].address();
        drop((divided, parts.remove(0)));
        assert_ne!(buffer(&memory).address(), address);
        drop(parts);
        assert_eq!(buffer(&memory).address(), address);
    }

    #[test]
    #[should_panic(expected = "every part")]
    fn a_missing_part_is_noticed() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        let (divided, mut parts) = buffer(&memory).split(2);
        let _kept = parts.pop();
        let _ = divided.join(parts);
    }
}

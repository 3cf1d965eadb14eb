//! Host memory: one slab of the planned size for training, or a heap allocation per block for tests.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::ptr::NonNull;

use super::counting::{self, Tag};
use crate::{AddressSpace, Arena, Block, Category, Ledger, Memory, Usage};

/// The operating system refused memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system has no {bytes} bytes of memory to give")]
pub struct OutOfMemory {
    /// Bytes that were requested.
    pub bytes: u64,
}

/// One heap allocation of the planned capacity, divided by an [`Arena`].
#[derive(Debug)]
pub struct Slab {
    allocation: Allocation,
    arena: Arena,
}

impl Slab {
    /// Allocates `capacity` bytes on the heap.
    pub fn new(capacity: u64) -> Result<Self, OutOfMemory> {
        let allocation = counting::tagged(Tag::Reserved, || Allocation::new(Arena::rounded(capacity)))?;
        let arena = Arena::new(AddressSpace::Host, allocation.address(), allocation.bytes());
        Ok(Slab { allocation, arena })
    }
}

impl Memory for Slab {
    fn address_space(&self) -> AddressSpace {
        AddressSpace::Host
    }

    fn allocate(&self, bytes: u64, category: Category) -> Block {
        self.arena.allocate(bytes, category)
    }

    fn release(&self, block: Block) {
        self.arena.release(block);
    }

    fn peak(&self) -> Usage {
        self.arena.peak()
    }

    fn reserved(&self) -> u64 {
        self.allocation.bytes()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        counting::tagged(Tag::Reserved, || self.allocation.free());
    }
}

/// Every block is a separate heap allocation, so that a counting allocator sees each with its category. Blocks are
/// filled with NaN.
#[derive(Debug, Default)]
pub struct Heap {
    ledger: RefCell<Ledger>,
}

impl Memory for Heap {
    fn address_space(&self) -> AddressSpace {
        AddressSpace::Host
    }

    fn allocate(&self, bytes: u64, category: Category) -> Block {
        let bytes = Arena::rounded(bytes);
        let allocation = counting::tagged(Tag::Category(category), || Allocation::new(bytes));
        let allocation = allocation.unwrap_or_else(|error| panic!("{error}"));
        allocation.poison();
        self.ledger.borrow_mut().add(category, bytes);
        Block { address: allocation.address(), bytes, category }
    }

    fn release(&self, block: Block) {
        self.ledger.borrow_mut().subtract(block.category, block.bytes);
        let pointer = NonNull::new(block.address as *mut u8).expect("blocks have an address");
        let allocation = Allocation { pointer, layout: layout(block.bytes) };
        counting::tagged(Tag::Category(block.category), || allocation.free());
    }

    fn peak(&self) -> Usage {
        self.ledger.borrow().peak()
    }

    fn reserved(&self) -> u64 {
        self.peak().total()
    }
}

/// An aligned, zeroed heap allocation that its owner frees explicitly.
#[derive(Debug)]
struct Allocation {
    pointer: NonNull<u8>,
    layout: Layout,
}

impl Allocation {
    /// `bytes` is not zero.
    fn new(bytes: u64) -> Result<Self, OutOfMemory> {
        let layout = layout(bytes);
        assert!(layout.size() > 0);
        // SAFETY: the layout's size is not zero.
        let pointer = unsafe { alloc_zeroed(layout) };
        NonNull::new(pointer).map(|pointer| Allocation { pointer, layout }).ok_or(OutOfMemory { bytes })
    }

    fn address(&self) -> u64 {
        self.pointer.as_ptr().expose_provenance() as u64
    }

    fn bytes(&self) -> u64 {
        self.layout.size() as u64
    }

    /// Fills the allocation with NaN in every float type, so that reading uninitialised memory is noticed.
    fn poison(&self) {
        // SAFETY: the memory was just allocated with this layout, and nobody else has its address.
        unsafe { self.pointer.as_ptr().write_bytes(0xFF, self.layout.size()) }
    }

    /// Frees the memory. Call it once, when no buffer uses the memory any more.
    fn free(&self) {
        // SAFETY: `pointer` was returned by `alloc_zeroed` with this layout, and the owner frees it once.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) }
    }
}

fn layout(bytes: u64) -> Layout {
    Layout::from_size_align(bytes as usize, Arena::ALIGNMENT as usize)
        .expect("a size that fits the address space")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_gives_out_aligned_zeroed_memory_within_its_capacity() {
        let slab = Slab::new(700).unwrap();
        assert_eq!(slab.reserved(), 768);
        let [a, b] = [300, 1].map(|bytes| slab.allocate(bytes, Category::Weights));
        assert_eq!((a.address % Arena::ALIGNMENT, b.address), (0, a.address + 512));
        assert_eq!(slab.peak().total(), 768);
    }

    #[test]
    #[should_panic(expected = "out of memory")]
    fn a_slab_refuses_what_was_not_planned() {
        Slab::new(256).unwrap().allocate(257, Category::Weights);
    }

    #[test]
    fn the_heap_keeps_the_same_accounts_as_an_arena() {
        let (heap, arena) = (Heap::default(), Arena::on_paper());
        for memory in [&heap as &dyn Memory, &arena] {
            let first = memory.allocate(1000, Category::Weights);
            let second = memory.allocate(5, Category::Activations);
            memory.release(first);
            let third = memory.allocate(600, Category::Gradients);
            memory.release(second);
            memory.release(third);
        }
        assert_eq!(heap.peak(), arena.peak());
        assert_eq!(heap.peak().total(), 1280);
    }
}

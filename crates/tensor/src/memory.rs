//! The memory of a rank: its categories, the accounting by category, and the arena that assigns addresses.
//!
//! The arena is a first-fit allocator over one address range. It holds no memory itself, and it is deterministic: the
//! same sequence of requests gets the same addresses. So the paper backend runs it first to find the size of the range.
//! The real backend then allocates one slab of that size and runs the same sequence.

use std::cell::RefCell;
use std::fmt;

/// What a buffer is for. Memory is predicted and measured by category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// Model parameters in the compute precision, gathered copies included.
    Weights,
    /// Gradients of the parameters.
    Gradients,
    /// Optimizer states: fp32 master weights and moments.
    States,
    /// What flows between blocks, and what the blocks save for the backward pass.
    Activations,
    /// Scratch of the kernels, one fixed buffer per stream.
    Workspace,
    /// Buffers that exist only for a collective.
    Communication,
}

/// Every category, in the order in which they are printed.
pub const CATEGORIES: [Category; 6] = [
    Category::Weights,
    Category::Gradients,
    Category::States,
    Category::Activations,
    Category::Workspace,
    Category::Communication,
];

impl Category {
    /// The name used in outputs.
    pub fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Gradients => "gradients",
            Category::States => "states",
            Category::Activations => "activations",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
        }
    }
}

/// Bytes per category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage([u64; CATEGORIES.len()]);

impl Usage {
    /// Bytes of one category.
    pub fn get(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// Bytes of all categories.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds bytes to a category.
    pub fn add(&mut self, category: Category, bytes: u64) {
        self.0[category as usize] += bytes;
    }

    /// Subtracts bytes from a category.
    pub fn subtract(&mut self, category: Category, bytes: u64) {
        self.0[category as usize] -= bytes;
    }
}

/// Live bytes by category, and a snapshot of them at the highest total so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ledger {
    live: Usage,
    peak: Usage,
}

impl Ledger {
    /// Records an allocation.
    pub fn add(&mut self, category: Category, bytes: u64) {
        self.live.add(category, bytes);
        if self.live.total() > self.peak.total() {
            self.peak = self.live;
        }
    }

    /// Records a release.
    pub fn subtract(&mut self, category: Category, bytes: u64) {
        self.live.subtract(category, bytes);
    }

    /// The live bytes by category when their total was highest.
    pub fn peak(&self) -> Usage {
        self.peak
    }
}

/// An allocated range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address of the first byte: a host pointer, a device pointer, or an offset on paper.
    pub address: u64,
    /// Bytes, rounded up to [`Arena::ALIGNMENT`].
    pub bytes: u64,
    /// What it is for.
    pub category: Category,
}

/// What the addresses of a memory are. A backend refuses buffers with another kind of address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressSpace {
    /// Addresses are host pointers.
    Host,
    /// Addresses are device pointers.
    Device,
    /// Addresses are offsets; there is no memory behind them.
    Paper,
}

/// The allocator of one rank.
pub trait Memory: fmt::Debug {
    /// What its addresses are.
    fn address_space(&self) -> AddressSpace;
    /// Allocates a block. Panics with category and size if it does not fit, which a correct plan rules out.
    fn allocate(&self, bytes: u64, category: Category) -> Block;
    /// Releases a block.
    fn release(&self, block: Block);
    /// Bytes by category when their total was highest.
    fn peak(&self) -> Usage;
    /// Bytes taken from the device. On paper, the bytes that would be.
    fn reserved(&self) -> u64;
}

/// Memory that belongs to other ranks. It only reports its kind.
#[derive(Debug)]
pub struct Foreign(pub AddressSpace);

impl Memory for Foreign {
    fn address_space(&self) -> AddressSpace {
        self.0
    }

    fn allocate(&self, _: u64, _: Category) -> Block {
        panic!("another rank's memory is not given out here")
    }

    fn release(&self, _: Block) {}

    fn peak(&self) -> Usage {
        Usage::default()
    }

    fn reserved(&self) -> u64 {
        0
    }
}

/// A first-fit allocator of addresses, starting at `base`. One per rank, used from one thread.
#[derive(Debug)]
pub struct Arena {
    address_space: AddressSpace,
    base: u64,
    capacity: u64,
    state: RefCell<ArenaState>,
}

#[derive(Debug, Default)]
struct ArenaState {
    /// Free ranges below `top`, sorted by address; no two are adjacent.
    holes: Vec<(u64, u64)>,
    /// End of the highest live block.
    top: u64,
    high_water: u64,
    ledger: Ledger,
}

impl Arena {
    /// Every block starts at a multiple of this, and its size is a multiple of it. It suffices for every device.
    pub const ALIGNMENT: u64 = 256;

    /// An arena over `capacity` bytes from `base`.
    pub fn new(address_space: AddressSpace, base: u64, capacity: u64) -> Self {
        Arena { address_space, base, capacity, state: RefCell::default() }
    }

    /// An arena of unlimited size without memory behind it.
    pub fn on_paper() -> Self {
        Arena::new(AddressSpace::Paper, 0, u64::MAX)
    }

    /// The free ranges, as offsets and sizes. Two arenas with the same free ranges answer the same requests with the
    /// same offsets.
    pub fn free(&self) -> Vec<(u64, u64)> {
        let state = self.state.borrow();
        let above = (state.top, self.capacity - state.top);
        state.holes.iter().copied().chain([above]).collect()
    }

    /// The bytes that a request of `bytes` takes from the arena.
    pub fn rounded(bytes: u64) -> u64 {
        bytes.max(1).next_multiple_of(Self::ALIGNMENT)
    }
}

impl Memory for Arena {
    fn address_space(&self) -> AddressSpace {
        self.address_space
    }

    fn allocate(&self, bytes: u64, category: Category) -> Block {
        let bytes = Self::rounded(bytes);
        let state = &mut *self.state.borrow_mut();
        let offset = if let Some(i) = state.holes.iter().position(|&(_, size)| size >= bytes) {
            let (start, size) = state.holes[i];
            if size == bytes {
                state.holes.remove(i);
            } else {
                state.holes[i] = (start + bytes, size - bytes);
            }
            start
        } else {
            let start = state.top;
            state.top += bytes;
            assert!(
                state.top <= self.capacity,
                "out of memory: {} bytes of {} do not fit into the planned {} bytes",
                bytes,
                category.name(),
                self.capacity
            );
            state.high_water = state.high_water.max(state.top);
            start
        };
        state.ledger.add(category, bytes);
        Block { address: self.base + offset, bytes, category }
    }

    fn release(&self, block: Block) {
        let state = &mut *self.state.borrow_mut();
        state.ledger.subtract(block.category, block.bytes);
        let start = block.address - self.base;
        let i = state.holes.partition_point(|&(other, _)| other < start);
        let joins_next = state.holes.get(i).is_some_and(|&(next, _)| next == start + block.bytes);
        let joins_previous = i > 0 && state.holes[i - 1].0 + state.holes[i - 1].1 == start;
        match (joins_previous, joins_next) {
            (true, true) => {
                state.holes[i - 1].1 += block.bytes + state.holes[i].1;
                state.holes.remove(i);
            }
            (true, false) => state.holes[i - 1].1 += block.bytes,
            (false, true) => state.holes[i] = (start, block.bytes + state.holes[i].1),
            (false, false) => state.holes.insert(i, (start, block.bytes)),
        }
        // A free range that ends at the top is removed, and the top moves down to its start.
        if let Some(&(last, size)) = state.holes.last()
            && last + size == state.top
        {
            state.top = last;
            state.holes.pop();
        }
    }

    fn peak(&self) -> Usage {
        self.state.borrow().ledger.peak()
    }

    fn reserved(&self) -> u64 {
        self.state.borrow().high_water
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_neighbours_become_one_hole_and_are_used_again() {
        let arena = Arena::on_paper();
        let [a, b, c] = [300, 200, 1].map(|n| arena.allocate(n, Category::Activations));
        assert_eq!((a.address, b.address, c.address), (0, 512, 768));
        arena.release(a);
        arena.release(b);
        assert_eq!(arena.free(), [(0, 768), (1024, u64::MAX - 1024)]);
        assert_eq!(arena.allocate(700, Category::Weights).address, 0, "768 bytes are free in one piece");
        arena.release(c);
        assert_eq!(arena.allocate(1, Category::Weights).address, 768, "the top moved down");
        assert_eq!(arena.reserved(), 1024);
    }

    #[test]
    fn the_peak_is_a_snapshot_of_one_moment() {
        let arena = Arena::on_paper();
        let a = arena.allocate(1024, Category::Activations);
        arena.release(a);
        let _b = arena.allocate(512, Category::Weights);
        let peak = arena.peak();
        assert_eq!((peak.get(Category::Activations), peak.get(Category::Weights)), (1024, 0));
    }

    #[test]
    #[should_panic(expected = "512 bytes of states")]
    fn a_request_beyond_the_plan_names_category_and_size() {
        Arena::new(AddressSpace::Paper, 0, 256).allocate(300, Category::States);
    }
}

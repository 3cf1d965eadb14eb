//! A global allocator that counts the heap bytes of each rank, by category.
//!
//! It measures memory independently of the code that predicts it. A rank's threads call [`attribute`], and
//! [`super::memory`] sets the category of the blocks that it allocates. Everything else that those threads allocate is
//! "untracked". If the allocator is not installed, all counts are zero.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use crate::{CATEGORIES, Category, Usage};

/// Highest number of ranks that are counted.
pub const RANKS: usize = 1024;

const RESERVED: usize = CATEGORIES.len();
const UNTRACKED: usize = CATEGORIES.len() + 1;
const SLOTS: usize = CATEGORIES.len() + 2;

/// The system allocator with counters, for `#[global_allocator]`.
#[derive(Debug, Default)]
pub struct CountingAllocator;

/// The heap memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapUsage {
    /// Live bytes by category.
    pub live: Usage,
    /// Live bytes by category when their total was highest.
    pub peak: Usage,
    /// Live bytes of slabs. The blocks inside a slab are not counted separately.
    pub reserved: u64,
    /// Highest number of untracked bytes since [`reset`]. It is exact only if memory is freed on the rank that
    /// allocated it: memory of another rank that is freed here counts as negative.
    pub untracked_peak: i64,
    /// Calls of the allocator since [`reset`], of any kind.
    pub allocations: u64,
}

/// From now on, counts what this thread allocates for `rank`.
pub fn attribute(rank: usize) {
    RANK.set(rank);
}

/// Starts a measurement: resets the untracked bytes to zero, and the peak to the live bytes.
pub fn reset(rank: usize) {
    let Some(account) = ACCOUNTS.get(rank) else { return };
    account.locked(|| {
        account.live[UNTRACKED].store(0, Ordering::Relaxed);
        account.untracked_peak.store(0, Ordering::Relaxed);
        account.allocations.store(0, Ordering::Relaxed);
        account.take_picture(account.total());
    });
}

/// The counters of `rank`.
pub fn measured(rank: usize) -> HeapUsage {
    let Some(account) = ACCOUNTS.get(rank) else {
        let nothing = Usage::default();
        return HeapUsage { live: nothing, peak: nothing, reserved: 0, untracked_peak: 0, allocations: 0 };
    };
    account.locked(|| HeapUsage {
        live: usage(&account.live),
        peak: usage(&account.peak),
        reserved: account.live[RESERVED].load(Ordering::Relaxed) as u64,
        untracked_peak: account.untracked_peak.load(Ordering::Relaxed),
        allocations: account.allocations.load(Ordering::Relaxed),
    })
}

/// How allocations inside [`tagged`] are counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tag {
    /// Blocks of a category.
    Category(Category),
    /// A slab.
    Reserved,
}

/// Runs `body`. What it allocates or frees on this thread is counted as `tag`.
pub(super) fn tagged<R>(tag: Tag, body: impl FnOnce() -> R) -> R {
    let slot = match tag {
        Tag::Category(category) => category as usize,
        Tag::Reserved => RESERVED,
    };
    let before = SLOT.replace(slot);
    let result = body();
    SLOT.set(before);
    result
}

thread_local! {
    // Constants without destructor: the allocator may access them at any time, and they must not allocate.
    static RANK: Cell<usize> = const { Cell::new(usize::MAX) };
    static SLOT: Cell<usize> = const { Cell::new(UNTRACKED) };
}

static ACCOUNTS: [Account; RANKS] = [const { Account::new() }; RANKS];

/// One rank's counters. Several threads change them, so a snapshot is taken under a lock.
struct Account {
    lock: AtomicBool,
    live: [AtomicI64; SLOTS],
    peak: [AtomicI64; SLOTS],
    peak_total: AtomicI64,
    untracked_peak: AtomicI64,
    allocations: AtomicU64,
}

impl Account {
    const fn new() -> Self {
        Account {
            lock: AtomicBool::new(false),
            live: [const { AtomicI64::new(0) }; SLOTS],
            peak: [const { AtomicI64::new(0) }; SLOTS],
            peak_total: AtomicI64::new(0),
            untracked_peak: AtomicI64::new(0),
            allocations: AtomicU64::new(0),
        }
    }

    /// `body` neither allocates nor panics, so a spin lock suffices and is always released.
    fn locked<R>(&self, body: impl FnOnce() -> R) -> R {
        while self.lock.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::hint::spin_loop();
        }
        let result = body();
        self.lock.store(false, Ordering::Release);
        result
    }

    fn change(&self, slot: usize, bytes: i64) {
        self.locked(|| {
            self.allocations.fetch_add(u64::from(bytes > 0), Ordering::Relaxed);
            let live = self.live[slot].fetch_add(bytes, Ordering::Relaxed) + bytes;
            if slot == UNTRACKED {
                self.untracked_peak.fetch_max(live, Ordering::Relaxed);
            } else if self.total() > self.peak_total.load(Ordering::Relaxed) {
                self.take_picture(self.total());
            }
        });
    }

    fn total(&self) -> i64 {
        self.live[..CATEGORIES.len()].iter().map(|live| live.load(Ordering::Relaxed)).sum()
    }

    fn take_picture(&self, total: i64) {
        for (peak, live) in self.peak.iter().zip(&self.live) {
            peak.store(live.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.peak_total.store(total, Ordering::Relaxed);
    }
}

fn usage(slots: &[AtomicI64; SLOTS]) -> Usage {
    let mut usage = Usage::default();
    for category in CATEGORIES {
        usage.add(category, slots[category as usize].load(Ordering::Relaxed) as u64);
    }
    usage
}

fn count(bytes: i64) {
    // A thread that is ending may have lost its thread-locals. What it still frees is not counted.
    let (Ok(rank), Ok(slot)) = (RANK.try_with(Cell::get), SLOT.try_with(Cell::get)) else { return };
    if let Some(account) = ACCOUNTS.get(rank) {
        account.change(slot, bytes);
    }
}

// SAFETY: every call is forwarded unchanged to the system allocator; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as i64 - layout.size() as i64);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::memory::{Heap, Slab};
    use crate::{Arena, Memory};

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    /// Runs on its own thread, attributed to a rank that no other test uses.
    fn as_rank<R: Send>(rank: usize, body: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            let on_thread = scope.spawn(move || {
                attribute(rank);
                let result = body();
                attribute(usize::MAX);
                result
            });
            on_thread.join().expect("the rank's thread")
        })
    }

    #[test]
    fn the_count_agrees_with_the_heaps_own_accounts() {
        as_rank(60, || {
            let heap = Heap::default();
            let kept = heap.allocate(300, Category::Weights);
            reset(60);
            let [a, b] = [1000, 2000].map(|bytes| heap.allocate(bytes, Category::Activations));
            heap.release(a);
            let c = heap.allocate(10, Category::Communication);
            assert_eq!(measured(60).peak, heap.peak());
            for block in [b, c, kept] {
                heap.release(block);
            }
            assert_eq!(measured(60).live.total(), 0);
        });
    }

    #[test]
    fn other_allocations_are_untracked() {
        let measured = as_rank(61, || {
            reset(61);
            drop(std::hint::black_box(vec![0_u8; 5000]));
            drop(std::hint::black_box(vec![0_u8; 3000]));
            measured(61)
        });
        assert_eq!((measured.untracked_peak, measured.peak.total()), (5000, 0));
    }

    #[test]
    fn a_slab_counts_as_reserved() {
        let reserved = as_rank(62, || {
            let slab = Slab::new(10_000).unwrap();
            let live = measured(62).reserved;
            drop(slab);
            (live, measured(62).reserved)
        });
        assert_eq!(reserved, (Arena::rounded(10_000), 0));
    }

    #[test]
    fn several_threads_of_a_rank_share_its_account() {
        let block = |bytes: usize| std::hint::black_box(vec![0_u8; bytes]);
        as_rank(63, || reset(63));
        let blocks = [40_000, 50_000].map(|bytes| as_rank(63, move || block(bytes)));
        assert!(measured(63).untracked_peak >= 90_000);
        drop(blocks);
        measured(RANKS);
    }
}

//! Counts the work of this process for whose end other ranks may wait: parts of files that were read or written, kernels that were
//! compiled, steps that were trained.
//!
//! A rank that waits for another looks at this count. While it grows, the job is busy and not stalled.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

static FINISHED: AtomicU64 = AtomicU64::new(0);

static PAUSES: AtomicUsize = AtomicUsize::new(0);

/// Counts one finished piece of work: a part of a file of some MiB, a kernel, a step.
pub fn finish_piece() {
    FINISHED.fetch_add(1, Ordering::Relaxed);
}

/// Pieces that this process has finished so far.
pub fn finished_pieces() -> u64 {
    FINISHED.load(Ordering::Relaxed)
}

/// While it lives, a rank of this process does something whose time is not known: it reads or writes files. Others wait for it
/// longer than in a step.
#[derive(Debug)]
pub struct Pause(());

impl Pause {
    /// A rank pauses between two steps.
    pub fn begin() -> Self {
        PAUSES.fetch_add(1, Ordering::Relaxed);
        Pause(())
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        finish_piece();
        PAUSES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a rank of this process pauses.
pub fn is_paused() -> bool {
    PAUSES.load(Ordering::Relaxed) > 0
}

//! Counts the work of this process for whose end other ranks may wait: parts of files that were read or written, kernels that were
//! compiled, steps that were trained.
//!
//! A rank that waits for another looks at this count. While it grows, the job is busy and not stalled.

use std::sync::atomic::{AtomicU64, Ordering};

static FINISHED: AtomicU64 = AtomicU64::new(0);

/// Counts one finished piece of work: a part of a file of some MiB, a kernel, a step.
pub fn finish_piece() {
    FINISHED.fetch_add(1, Ordering::Relaxed);
}

/// Pieces that this process has finished so far.
pub fn finished_pieces() -> u64 {
    FINISHED.load(Ordering::Relaxed)
}

//! Counts how often the host thread of a rank waits for its device.

use std::sync::atomic::{AtomicU64, Ordering};

/// The waits of one rank's host thread. Another thread may read it.
#[derive(Debug, Default)]
pub(crate) struct HostWaits {
    /// Waits that were counted.
    counted: AtomicU64,
    /// All waits that have begun.
    begun: AtomicU64,
    /// Waits that have ended.
    ended: AtomicU64,
}

impl HostWaits {
    /// The waits so far, without those for the result of an earlier step.
    pub(crate) fn count(&self) -> u64 {
        self.counted.load(Ordering::Relaxed)
    }

    /// The number of the wait that the host is in now, if it is in one.
    pub(crate) fn current(&self) -> Option<u64> {
        let begun = self.begun.load(Ordering::Acquire);
        (begun > self.ended.load(Ordering::Acquire)).then_some(begun)
    }

    /// Waits, and counts the wait.
    pub(crate) fn counted<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.counted.fetch_add(1, Ordering::Relaxed);
        self.during(wait)
    }

    /// Waits for the result of an earlier step, which is not counted.
    pub(crate) fn during<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.begun.fetch_add(1, Ordering::Release);
        let result = wait();
        self.ended.fetch_add(1, Ordering::Release);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_counted_and_visible_while_it_lasts() {
        let waits = HostWaits::default();
        assert_eq!((waits.count(), waits.current()), (0, None));
        waits.counted(|| assert_eq!((waits.count(), waits.current()), (1, Some(1))));
        waits.during(|| assert_eq!((waits.count(), waits.current()), (1, Some(2))));
        assert_eq!((waits.count(), waits.current()), (1, None));
    }
}

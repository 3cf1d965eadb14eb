//! Calls into libraries that read anybody's files: a panic in one of them becomes a value, and its report is not printed.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether this thread is in such a call.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// What `work` returns, or nothing if it panicked.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                previous(info);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_no_value() {
        assert_eq!(guarded(|| 5), Some(5));
        assert_eq!(guarded(|| Vec::<u8>::new()[0]), None);
        assert!(!GUARDED.get());
    }
}

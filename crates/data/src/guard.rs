//! Guards calls of libraries that read untrusted files: turns a panic into an error and does not print its message.

use std::cell::Cell;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether this thread is in a guarded call.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work`, which runs a library on an untrusted file. Returns an error if the library panics.
pub(crate) fn catch_panic<T, E: Into<Box<dyn Error + Send + Sync>>>(
    library: &str,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, Box<dyn Error + Send + Sync>> {
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
    match result {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(format!("the {library} library cannot read this file; it may be damaged").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error() {
        assert_eq!(catch_panic("test", || Ok::<_, String>(5)).unwrap(), 5);
        let error = catch_panic("test", || Ok::<_, String>(Vec::<u8>::new()[0])).unwrap_err();
        assert_eq!(error.to_string(), "the test library cannot read this file; it may be damaged");
        assert!(!GUARDED.get());
    }
}

//! Ends a process whose main thread is in a call that does not return.

use std::ffi::c_int;

unsafe extern "C" {
    /// The C library's.
    fn _exit(status: c_int) -> !;
}

/// Ends the process at once. Handlers at exit would wait for the call that does not return.
pub(super) fn end_process(code: i32) -> ! {
    // SAFETY: `_exit` takes any status and does not return.
    unsafe { _exit(code) }
}

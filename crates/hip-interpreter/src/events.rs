//! The device, streams and events. Work has run when it is enqueued, so nothing waits.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::time::Instant;

use crate::state::{NO_DEVICE, NOT_SUPPORTED, SUCCESS};
use crate::{NO_CARD, has_fault};

type Handle = *mut c_void;

#[unsafe(no_mangle)]
pub extern "C" fn hipInit(_flags: c_uint) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> c_int {
    if has_fault(NO_CARD) {
        return NO_DEVICE;
    }
    // SAFETY: an integer to write to.
    unsafe { *count = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipSetDevice(_device: c_int) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(_error: c_int) -> *const c_char {
    const NAME: &CStr = c"an error of the interpreter";
    NAME.as_ptr()
}

/// A stream is the address of a byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithFlags(to: *mut Handle, _flags: c_uint) -> c_int {
    // SAFETY: room for a handle.
    unsafe { *to = Box::into_raw(Box::new(0_u8)).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithPriority(
    to: *mut Handle,
    flags: c_uint,
    _priority: c_int,
) -> c_int {
    // SAFETY: as above.
    unsafe { hipStreamCreateWithFlags(to, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamDestroy(stream: Handle) -> c_int {
    // SAFETY: made above, destroyed once.
    drop(unsafe { Box::from_raw(stream.cast::<u8>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamSynchronize(_stream: Handle) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamQuery(_stream: Handle) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamWaitEvent(_stream: Handle, _event: Handle, _flags: c_uint) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreateWithFlags(to: *mut Handle, _flags: c_uint) -> c_int {
    // SAFETY: room for a handle.
    unsafe { *to = Box::into_raw(Box::new(Instant::now())).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventRecord(event: Handle, _stream: Handle) -> c_int {
    // SAFETY: a live event, which one thread uses.
    unsafe { *event.cast::<Instant>() = Instant::now() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventSynchronize(_event: Handle) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventQuery(_event: Handle) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventElapsedTime(ms: *mut f32, start: Handle, stop: Handle) -> c_int {
    // SAFETY: live events, and a number to write to.
    unsafe {
        let between = (*stop.cast::<Instant>()).saturating_duration_since(*start.cast::<Instant>());
        *ms = between.as_secs_f32() * 1e3;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventDestroy(event: Handle) -> c_int {
    // SAFETY: made above, destroyed once.
    drop(unsafe { Box::from_raw(event.cast::<Instant>()) });
    SUCCESS
}

/// Graphs are off by default on AMD GPUs. Whoever asks for them learns that there are none.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamBeginCapture(_stream: Handle, _mode: c_int) -> c_int {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamEndCapture(_stream: Handle, graph: *mut Handle) -> c_int {
    // SAFETY: room for a handle.
    unsafe { *graph = ptr::null_mut() };
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphInstantiate(
    _to: *mut Handle,
    _graph: Handle,
    _node: *mut Handle,
    _log: *mut c_char,
    _bytes: usize,
) -> c_int {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphLaunch(_graph: Handle, _stream: Handle) -> c_int {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphExecDestroy(_graph: Handle) -> c_int {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphDestroy(_graph: Handle) -> c_int {
    NOT_SUPPORTED
}

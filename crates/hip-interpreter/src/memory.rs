//! Memory of the device and of the host, and copies between them.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::state::{INVALID, MEMORY, OUT_OF_MEMORY, SUCCESS, with};

/// Page-locked memory, by its address.
static HOST: LazyLock<Mutex<HashMap<usize, Box<[u8]>>>> = LazyLock::new(Mutex::default);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMalloc(to: *mut *mut c_void, bytes: usize) -> c_int {
    with(|state| {
        let taken: u64 = state.allocated.values().sum();
        if taken + bytes as u64 > MEMORY {
            return OUT_OF_MEMORY;
        }
        // Numbers that no kernel should read.
        let address = state.machine.buffer("device memory", vec![0xff; bytes]);
        state.allocated.insert(address, bytes as u64);
        // SAFETY: room for an address.
        unsafe { *to = address as *mut c_void };
        SUCCESS
    })
}

/// The addresses are not used again, so an access to freed memory is found in what is left of it only by its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipFree(address: *mut c_void) -> c_int {
    with(|state| if state.allocated.remove(&(address as u64)).is_some() { SUCCESS } else { INVALID })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> c_int {
    let taken: u64 = with(|state| state.allocated.values().sum());
    // SAFETY: two integers to write to.
    unsafe {
        *free = (MEMORY - taken) as usize;
        *total = MEMORY as usize;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostMalloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
    let mut memory = vec![0_u8; bytes.max(1)].into_boxed_slice();
    // SAFETY: room for an address.
    unsafe { *to = memory.as_mut_ptr().cast() };
    HOST.lock().unwrap_or_else(PoisonError::into_inner).insert(memory.as_ptr() as usize, memory);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostFree(address: *mut c_void) -> c_int {
    let freed = HOST.lock().unwrap_or_else(PoisonError::into_inner).remove(&(address as usize));
    if freed.is_some() { SUCCESS } else { INVALID }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyHtoDAsync(
    to: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    _stream: *mut c_void,
) -> c_int {
    // SAFETY: the host's range is the caller's promise.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
    with(|state| state.machine.write(to as u64, from));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyDtoHAsync(
    to: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    _stream: *mut c_void,
) -> c_int {
    let read = with(|state| state.machine.read(from as u64, bytes));
    // SAFETY: the host's range is the caller's promise.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(read.as_ptr(), bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemsetD8Async(
    to: *mut c_void,
    value: u8,
    bytes: usize,
    _stream: *mut c_void,
) -> c_int {
    with(|state| state.machine.write(to as u64, &vec![value; bytes]));
    SUCCESS
}

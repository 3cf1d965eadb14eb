//! The properties of the machine, in the layout of ROCm 6 and 7.

use std::ffi::{c_char, c_int};

use crate::state::{MEMORY, SUCCESS};
use crate::{WAVES_OF_48, has_fault};

/// Compute units. Few, so that grids that fill the device are small.
const UNITS: i32 = 4;

/// Bytes of `hipDeviceProp_tR0600`.
const BYTES: usize = 1472;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevicePropertiesR0600(to: *mut u8, _device: c_int) -> c_int {
    let mut bytes = [0_u8; BYTES];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, b"gfx90a interpreter");
    put(288, &MEMORY.to_ne_bytes());
    put(296, &(64_u64 << 10).to_ne_bytes());
    let wave = if has_fault(WAVES_OF_48) { 48_i32 } else { 64 };
    put(308, &wave.to_ne_bytes());
    put(388, &UNITS.to_ne_bytes());
    put(1160, b"gfx90a");
    // SAFETY: room for the structure.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), BYTES) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: an integer to write to.
    unsafe { *version = 70_000_000 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetPCIBusId(to: *mut c_char, bytes: c_int, _device: c_int) -> c_int {
    const BUS: &[u8] = b"0000:c1:00.0\0";
    assert!(bytes as usize >= BUS.len(), "no room for an address on the bus");
    // SAFETY: there is room.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(BUS.as_ptr(), BUS.len()) };
    SUCCESS
}

//! hiprtc: AMD's own compiler, with what it made kept in a folder.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::path::Path;
use std::ptr;

use kintsugi_gfx90a::Compiler;

use crate::CACHE;
use crate::state::SUCCESS;

/// `HIPRTC_ERROR_COMPILATION`.
const FAILED: c_int = 6;

/// A program: its source, and what the compiler said or made.
#[derive(Default)]
struct Program {
    source: String,
    log: Vec<u8>,
    code: Vec<u8>,
}

/// The program behind a handle.
///
/// # Safety
/// A live program, which one thread uses.
unsafe fn program<'a>(handle: *mut c_void) -> &'a mut Program {
    // SAFETY: the caller's promise.
    unsafe { &mut *handle.cast::<Program>() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: two integers to write to.
    unsafe {
        *major = 9;
        *minor = 0;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcCreateProgram(
    to: *mut *mut c_void,
    source: *const c_char,
    _name: *const c_char,
    _headers: c_int,
    _texts: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    // SAFETY: a text that ends with zero, and room for a handle.
    unsafe {
        let source = CStr::from_ptr(source).to_string_lossy().into_owned();
        *to = Box::into_raw(Box::new(Program { source, ..Program::default() })).cast();
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcCompileProgram(
    handle: *mut c_void,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    // SAFETY: a live program and as many texts as their number says.
    let (program, options) = unsafe {
        let texts = (0..count as usize).map(|i| CStr::from_ptr(*options.add(i)));
        (program(handle), texts.map(|text| text.to_string_lossy().into_owned()).collect::<Vec<_>>())
    };
    match compile(&program.source, &options) {
        Ok(code) => {
            program.code = code;
            SUCCESS
        }
        Err(log) => {
            program.log = log.into_bytes();
            FAILED
        }
    }
}

fn compile(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let folder = env::var_os(CACHE).ok_or_else(|| format!("{CACHE} is not set"))?;
    let compiler = Compiler::find(Path::new(&folder)).map_err(|error| error.to_string())?;
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let path = compiler.code_object("kernels", source, &options).map_err(|error| error.to_string())?;
    fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Writes the length of some bytes.
unsafe fn size(bytes: &[u8], to: *mut usize) -> c_int {
    // SAFETY: an integer to write to.
    unsafe { *to = bytes.len() };
    SUCCESS
}

/// Writes some bytes.
unsafe fn copy(bytes: &[u8], to: *mut c_char) -> c_int {
    // SAFETY: room for as many bytes as their size says.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetProgramLogSize(handle: *mut c_void, to: *mut usize) -> c_int {
    // SAFETY: as of the functions that are called.
    unsafe { size(&program(handle).log, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetProgramLog(handle: *mut c_void, to: *mut c_char) -> c_int {
    // SAFETY: as of the functions that are called.
    unsafe { copy(&program(handle).log, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetCodeSize(handle: *mut c_void, to: *mut usize) -> c_int {
    // SAFETY: as of the functions that are called.
    unsafe { size(&program(handle).code, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetCode(handle: *mut c_void, to: *mut c_char) -> c_int {
    // SAFETY: as of the functions that are called.
    unsafe { copy(&program(handle).code, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcDestroyProgram(handle: *mut *mut c_void) -> c_int {
    // SAFETY: made above, destroyed once.
    unsafe {
        drop(Box::from_raw((*handle).cast::<Program>()));
        *handle = ptr::null_mut();
    }
    SUCCESS
}

//! Modules and launches. A fault that the interpreter finds ends the process: it is what the test is for.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use kintsugi_gfx90a::{Argument, CodeObject, Error, Grid};

use crate::state::{INVALID_IMAGE, NOT_FOUND, SUCCESS, State, with};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoadData(to: *mut *mut c_void, image: *const c_void) -> c_int {
    // SAFETY: a whole code object, whose header says how long it is.
    let bytes = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), length(image.cast())) };
    let Ok(code) = read(bytes) else { return INVALID_IMAGE };
    with(|state| {
        state.modules.push(code);
        // SAFETY: room for a handle. Zero is none.
        unsafe { *to = state.modules.len() as *mut c_void };
    });
    SUCCESS
}

/// The length of an ELF file, at whose end is the table of sections.
unsafe fn length(image: *const u8) -> usize {
    // SAFETY: a whole ELF file of 64 bits has these fields: `e_shoff`, `e_shentsize` and `e_shnum`.
    unsafe {
        let wide = |at: usize| image.add(at).cast::<u64>().read_unaligned() as usize;
        let narrow = |at: usize| usize::from(image.add(at).cast::<u16>().read_unaligned());
        wide(0x28) + narrow(0x3a) * narrow(0x3c)
    }
}

/// Reads a code object by way of a file, because the disassembler reads files.
fn read(bytes: &[u8]) -> Result<CodeObject, String> {
    static READ: AtomicU64 = AtomicU64::new(0);
    let number = READ.fetch_add(1, Ordering::Relaxed);
    let path = env::temp_dir().join(format!("kintsugi-module-{}-{number}.co", process::id()));
    fs::write(&path, bytes).map_err(|error| error.to_string())?;
    let code = CodeObject::read(&path).map_err(|error| error.to_string());
    fs::remove_file(&path).map_err(|error| error.to_string())?;
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleGetFunction(
    to: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    // SAFETY: a text that ends with zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    with(|state| {
        let module = module as usize - 1;
        if !state.modules[module].kernels().any(|kernel| kernel == name) {
            return NOT_FOUND;
        }
        state.functions.push((module, name));
        // SAFETY: room for a handle.
        unsafe { *to = state.functions.len() as *mut c_void };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLaunchKernel(
    function: *mut c_void,
    x: c_uint,
    y: c_uint,
    z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared: c_uint,
    _stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    let grid = Grid { blocks: [x, y, z], threads: [threads_x, threads_y, threads_z], shared };
    with(|state| {
        // SAFETY: the parameters are as many and as large as the kernel's, by the caller's promise.
        if let Err(error) = unsafe { launch(state, function as usize - 1, grid, parameters) } {
            eprintln!("{error}");
            process::abort();
        }
    });
    SUCCESS
}

unsafe fn launch(
    state: &mut State,
    function: usize,
    grid: Grid,
    parameters: *mut *mut c_void,
) -> Result<(), Error> {
    let (module, name) = &state.functions[function];
    let code = &state.modules[*module];
    let sizes = code.argument_sizes(name)?;
    // SAFETY: the caller's promise.
    let argument = |(i, &bytes): (usize, &usize)| unsafe {
        std::slice::from_raw_parts((*parameters.add(i)).cast::<u8>(), bytes).to_vec()
    };
    let arguments: Vec<Argument> = sizes.iter().enumerate().map(argument).map(Argument::from).collect();
    state.machine.launch(code, name, grid, &arguments)
}

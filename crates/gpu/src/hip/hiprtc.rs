//! Compiles kernel files at run time for an AMD GPU.

use std::ffi::{CString, c_char, c_int};
use std::ptr;

use kintsugi_spec::work;

use super::api::{self, Handle, Hiprtc, SUCCESS};
use crate::driver::SourceText;
use crate::error::GpuError;
use crate::{image_cache, kernels};

/// The code object of a kernel file for an architecture with its features, from the disk cache if it is there.
pub(super) fn code_object(source: SourceText, architecture: &str) -> Result<Vec<u8>, GpuError> {
    let compiler = api::hiprtc()?;
    let text = kernels::with_included_headers(&kernels::with_header(source));
    let all = [format!("--offload-arch={architecture}"), "-std=c++17".into(), "-O3".into()];
    let definitions = source.definitions.iter().map(|definition| format!("-D{definition}"));
    let options: Vec<String> = all.into_iter().chain(definitions).collect();
    let name = format!("{}-{}", source.name, architecture.replace(':', "_"));
    let key = [text, options.join(" "), version(compiler)];
    image_cache::cached(&name, "co", &key, || {
        let image = compile(compiler, &key[0], &options).map_err(|log| GpuError::Compile {
            source_name: source.name.to_owned(),
            architecture: architecture.to_owned(),
            log,
        })?;
        work::finish_piece();
        Ok(image)
    })
}

/// The compiler's version, such as "9.0".
pub(super) fn version(compiler: &Hiprtc) -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers to write to.
    match unsafe { (compiler.hiprtcVersion)(&raw mut major, &raw mut minor) } {
        SUCCESS => format!("{major}.{minor}"),
        status => format!("error {status}"),
    }
}

/// Compiles a program. The error is the compiler's log.
fn compile(compiler: &Hiprtc, text: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let zero_ended = |text: &str| CString::new(text).expect("kernel sources hold no zero");
    let text = zero_ended(text);
    let mut program: Handle = ptr::null_mut();
    // SAFETY: the text ends with zero and is copied, and there are no headers.
    let status = unsafe {
        (compiler.hiprtcCreateProgram)(
            &raw mut program,
            text.as_ptr(),
            ptr::null(),
            0,
            ptr::null(),
            ptr::null(),
        )
    };
    check("hiprtcCreateProgram", status)?;
    let program = Program { compiler, program };
    let options: Vec<CString> = options.iter().map(|option| zero_ended(option)).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the program lives, and there are as many options as their number says.
    let compiled = unsafe {
        (compiler.hiprtcCompileProgram)(program.program, pointers.len() as c_int, pointers.as_ptr())
    };
    if compiled == SUCCESS {
        return program.bytes(compiler.hiprtcGetCodeSize, compiler.hiprtcGetCode);
    }
    let log = program.bytes(compiler.hiprtcGetProgramLogSize, compiler.hiprtcGetProgramLog)?;
    Err(String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
}

/// A program, destroyed when dropped.
struct Program<'a> {
    compiler: &'a Hiprtc,
    program: Handle,
}

impl Program<'_> {
    /// Bytes that one function counts and another writes.
    fn bytes(
        &self,
        count: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        write: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: the program lives, and the vector has the size that the compiler reports.
        unsafe {
            check("hiprtc's size", count(self.program, &raw mut size))?;
            let mut bytes = vec![0_u8; size];
            check("hiprtc's result", write(self.program, bytes.as_mut_ptr().cast()))?;
            Ok(bytes)
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by the compiler, destroyed once.
        let _ = unsafe { (self.compiler.hiprtcDestroyProgram)(&raw mut self.program) };
    }
}

fn check(call: &str, status: c_int) -> Result<(), String> {
    if status == SUCCESS { Ok(()) } else { Err(format!("{call} returned {status}")) }
}

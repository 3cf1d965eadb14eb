//! Compiles kernels for gfx90a by hiprtc, the run-time compiler of AMD's HIP, which needs no card.
//!
//! Code objects are kept in a folder, by a hash of the source and the compiler's version: a file takes seconds to compile.
#![expect(unsafe_code, reason = "hiprtc is a C library that is loaded at run time")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use xxhash_rust::xxh3::xxh3_128;

use crate::assembly::OBJDUMP;
use crate::code_object::CodeObject;
use crate::error::Error;

/// The library that contains hiprtc up to AMD's release 5.
const LIBRARY: &str = "libamdhip64.so.5";

/// The kernel files, with the header that is prepended to each.
const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../gpu/src/kernels");
const HEADER: &str = "common.cuh";

const OPTIONS: [&str; 4] = ["--offload-arch=gfx90a", "-std=c++17", "-O3", "-DWARP=64"];

/// AMD's compiler, and the folder that keeps what it made.
#[derive(Debug)]
pub struct Compiler {
    library: Library,
    version: (c_int, c_int),
    cache: PathBuf,
}

/// A program of hiprtc.
type Program = *mut c_void;

/// What hiprtc's functions return if all went well.
const SUCCESS: c_int = 0;

impl Compiler {
    /// Loads hiprtc and looks for the disassembler. Fails with a sentence that says what is missing.
    pub fn find(cache: &Path) -> Result<Self, Error> {
        let missing =
            |what: &str| Error::Compiler(format!("there is no {what} (scripts/amd-tools installs it)"));
        if Command::new(OBJDUMP).arg("--version").output().is_err() {
            return Err(missing(OBJDUMP));
        }
        // SAFETY: the library's initialisers do nothing without a card but look for one.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|_| missing(LIBRARY))?;
        let mut version = (0, 0);
        let get: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = function(&library, "hiprtcVersion")?;
        // SAFETY: the function writes two numbers.
        check("hiprtcVersion", unsafe { get(&raw mut version.0, &raw mut version.1) })?;
        Ok(Compiler { library, version, cache: cache.to_owned() })
    }

    /// Compiles one of Kintsugi's kernel files, by its name without the extension, with definitions such as
    /// `HEAD_DIM=64`.
    pub fn kernel_file(&self, name: &str, definitions: &[String]) -> Result<CodeObject, Error> {
        let definitions = definition_options(definitions);
        let options: Vec<&str> = OPTIONS.into_iter().chain(definitions.iter().map(String::as_str)).collect();
        CodeObject::read(&self.code_object(name, &kernel_source(name)?, &options)?)
    }

    /// Compiles a source. The name is for messages.
    pub fn compile(&self, name: &str, source: &str) -> Result<CodeObject, Error> {
        CodeObject::read(&self.code_object(name, source, &OPTIONS)?)
    }

    /// The file that holds the code object of a source, compiled with these options.
    pub fn code_object(&self, name: &str, source: &str, options: &[&str]) -> Result<PathBuf, Error> {
        let key = format!("{source}\n{options:?} {:?}", self.version);
        let path = self.cache.join(format!("gfx90a-{:032x}.co", xxh3_128(key.as_bytes())));
        let failed = |error| Error::File { path: path.clone(), error };
        fs::create_dir_all(&self.cache).map_err(failed)?;
        // Tests are processes that need the same files at the same time.
        let lock = File::create(path.with_extension("lock")).map_err(failed)?;
        lock.lock().map_err(failed)?;
        if !path.exists() {
            let part = path.with_extension("part");
            fs::write(&part, self.code(name, source, options)?).map_err(failed)?;
            fs::rename(&part, &path).map_err(failed)?;
        }
        drop(lock);
        Ok(path)
    }

    /// The code object of a source. The compiler is for one thread at a time.
    fn code(&self, name: &str, source: &str, options: &[&str]) -> Result<Vec<u8>, Error> {
        static COMPILING: Mutex<()> = Mutex::new(());
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        let _compiling = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
        let create: Create = function(&self.library, "hiprtcCreateProgram")?;
        let compile: Compile = function(&self.library, "hiprtcCompileProgram")?;
        let destroy: unsafe extern "C" fn(*mut Program) -> c_int =
            function(&self.library, "hiprtcDestroyProgram")?;
        let text = |text: &str| CString::new(text).expect("a source holds no zero");
        let (source, name_text) = (text(source), text(&format!("{name}.cu")));
        let mut program: Program = ptr::null_mut();
        // SAFETY: both texts end with zero and are copied, there are no headers, and the program is written.
        check("hiprtcCreateProgram", unsafe {
            create(&raw mut program, source.as_ptr(), name_text.as_ptr(), 0, ptr::null(), ptr::null())
        })?;
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program was created, and the options are as many texts.
        let compiled = unsafe { compile(program, options.len() as c_int, options.as_ptr()) };
        let result = if compiled == SUCCESS {
            self.bytes(program, "hiprtcGetCodeSize", "hiprtcGetCode")
        } else {
            self.bytes(program, "hiprtcGetProgramLogSize", "hiprtcGetProgramLog")
                .and_then(|log| Err(Error::Compiler(format!("{name}: {}", String::from_utf8_lossy(&log)))))
        };
        // SAFETY: the program was created and is not used any more.
        check("hiprtcDestroyProgram", unsafe { destroy(&raw mut program) })?;
        result
    }

    /// Bytes that one function of hiprtc counts and another writes.
    fn bytes(&self, program: Program, size: &str, get: &str) -> Result<Vec<u8>, Error> {
        let count: unsafe extern "C" fn(Program, *mut usize) -> c_int = function(&self.library, size)?;
        let write: unsafe extern "C" fn(Program, *mut c_char) -> c_int = function(&self.library, get)?;
        let mut len = 0;
        // SAFETY: the program lives, and the size is written.
        check(size, unsafe { count(program, &raw mut len) })?;
        let mut bytes = vec![0_u8; len];
        // SAFETY: there is room for as many bytes as the library counted.
        check(get, unsafe { write(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

/// The options of definitions such as `HEAD_DIM=64`.
pub(crate) fn definition_options(definitions: &[String]) -> Vec<String> {
    definitions.iter().map(|definition| format!("-D{definition}")).collect()
}

/// The whole text of a kernel file: the common header and the file, with the headers that it includes in their places. It is
/// the text that the HIP backend compiles, so that its tests find what these have compiled.
pub(crate) fn kernel_source(name: &str) -> Result<String, Error> {
    let file = format!("{name}.cu");
    Ok(format!("{}\n#line 1 \"{file}\"\n{}", read(HEADER)?, included(&file)?))
}

fn included(file: &str) -> Result<String, Error> {
    let mut whole = String::new();
    for line in read(file)?.split_inclusive('\n') {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix("\"\n")) {
            Some(header) => whole.extend([format!("#line 1 \"{header}\"\n"), included(header)?]),
            None => whole.push_str(line),
        }
    }
    Ok(whole)
}

fn read(file: &str) -> Result<String, Error> {
    let path = Path::new(KERNELS).join(file);
    fs::read_to_string(&path).map_err(|error| Error::File { path, error })
}

/// A function of the library.
fn function<F: Copy>(library: &Library, name: &str) -> Result<F, Error> {
    // SAFETY: every caller gives the type that hiprtc.h declares.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|error| Error::Compiler(format!("{LIBRARY}: {error}")))
}

fn check(name: &str, status: c_int) -> Result<(), Error> {
    if status == SUCCESS { Ok(()) } else { Err(Error::Compiler(format!("{name} returned {status}"))) }
}

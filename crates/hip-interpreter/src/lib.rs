//! A `libamdhip64` for tests on machines without an AMD GPU. Kernels are compiled by AMD's own compiler and executed by the
//! interpreter of gfx90a code; a `librocblas`, a `libhipblaslt` and a `librocm_smi64` are in the same file. It is never part of the binary.
//!
//! Everything runs when it is enqueued, so streams and events have nothing to wait for. A kernel that accesses memory out of
//! bounds, or races, ends the process with the interpreter's message.
#![expect(unsafe_code, reason = "the interface of a C library")]
#![allow(clippy::not_unsafe_ptr_arg_deref, reason = "as above")]

mod compiler;
mod events;
mod kernels;
mod matmul;
mod memory;
mod power;
mod products;
mod properties;
mod state;

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use kintsugi_gfx90a::Compiler;

/// The variable that names the folder with compiled kernels.
const CACHE: &str = "KINTSUGI_INTERPRETER_CACHE";

/// The names under which the library is loaded.
const NAMES: [&str; 3] = ["libamdhip64.so.7", "librocblas.so.5", "librocm_smi64.so.1"];

/// The name under which it is hipBLASLt too, for [`this_program_with`].
pub const HIPBLASLT: &str = "libhipblaslt.so.1";

/// The variable that names a fault of the machine.
pub const FAULT: &str = "KINTSUGI_INTERPRETER_FAULT";
/// The driver shows no device.
pub const NO_CARD: &str = "no-card";
/// The device has waves of a size that does not exist.
pub const WAVES_OF_48: &str = "waves-of-48";

/// Whether the machine has a fault.
fn has_fault(name: &str) -> bool {
    env::var_os(FAULT).is_some_and(|fault| fault == name)
}

/// Fails with a sentence that names the missing one of AMD's tools, if this machine cannot run the interpreter.
pub fn check_tools(folder: &Path) -> Result<(), String> {
    Compiler::find(folder).map(drop).map_err(|error| error.to_string())
}

/// Whether this process has the interpreter in the place of AMD's libraries.
pub fn is_here() -> bool {
    env::var_os(CACHE).is_some()
}

/// The same program as this one, for a process that has the interpreter in the place of AMD's libraries.
pub fn this_program(folder: &Path) -> io::Result<Command> {
    program(&env::current_exe()?, folder)
}

/// The same with libraries of these names only.
pub fn this_program_with(folder: &Path, names: &[&str]) -> io::Result<Command> {
    program_with(&env::current_exe()?, folder, names)
}

/// A program in a process that has the interpreter in the place of AMD's libraries. `folder` keeps the library's names and
/// compiled kernels. Fails if the library was not built beside the program that runs now.
pub fn program(program: &Path, folder: &Path) -> io::Result<Command> {
    program_with(program, folder, &NAMES)
}

/// The same with libraries of these names only.
pub fn program_with(program: &Path, folder: &Path, names: &[&str]) -> io::Result<Command> {
    let current = env::current_exe()?;
    let beside = |name: &str| current.parent().map(|folder| folder.join(name));
    let library = beside("libamdhip64.so").filter(|path| path.exists());
    let library = library.ok_or_else(|| io::Error::other("libamdhip64.so is not beside the test"))?;
    let names = link(&library, folder, names)?;
    let mut command = Command::new(program);
    let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let all = [names].into_iter().chain(env::split_paths(&before));
    command.env("LD_LIBRARY_PATH", env::join_paths(all).map_err(io::Error::other)?);
    command.env(CACHE, folder).env("XDG_CACHE_HOME", folder);
    Ok(command)
}

/// A folder with the library under these names, which other tests with the same names share.
fn link(library: &Path, folder: &Path, names: &[&str]) -> io::Result<PathBuf> {
    let place = folder.join(format!("libraries-{}", names.join("-")));
    fs::create_dir_all(&place)?;
    for name in names {
        match symlink(library, place.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(place)
}

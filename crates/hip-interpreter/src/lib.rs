//! A `libamdhip64` for tests on machines without an AMD GPU. Kernels are compiled by AMD's own compiler and executed by the
//! interpreter of gfx90a code; a `librocblas` and a `librocm_smi64` are in the same file. It is never part of the binary.
//!
//! Everything runs when it is enqueued, so streams and events have nothing to wait for. A kernel that accesses memory out of
//! bounds, or races, ends the process with the interpreter's message.
#![expect(unsafe_code, reason = "the interface of a C library")]
#![allow(clippy::not_unsafe_ptr_arg_deref, reason = "as above")]

mod compiler;
mod events;
mod kernels;
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
const NAMES: [&str; 3] = ["libamdhip64.so.7", "librocblas.so.5", "librocm_smi64.so.7"];

/// Fails with a sentence that names the missing one of AMD's tools, if this machine cannot run the interpreter.
pub fn check_tools(folder: &Path) -> Result<(), String> {
    Compiler::find(folder).map(drop).map_err(|error| error.to_string())
}

/// Whether this process has the interpreter in the place of AMD's libraries.
pub fn is_here() -> bool {
    env::var_os(CACHE).is_some()
}

/// The same program as this one, for a process that has the interpreter in the place of AMD's libraries. `folder` keeps the
/// library's names and compiled kernels. Fails if the library was not built beside this program.
pub fn this_program(folder: &Path) -> io::Result<Command> {
    let program = env::current_exe()?;
    let beside = |name: &str| program.parent().map(|folder| folder.join(name));
    let library = beside("libamdhip64.so").filter(|path| path.exists());
    let library = library.ok_or_else(|| io::Error::other("libamdhip64.so is not beside the test"))?;
    let names = link(&library, folder)?;
    let mut command = Command::new(program);
    let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let all = [names].into_iter().chain(env::split_paths(&before));
    command.env("LD_LIBRARY_PATH", env::join_paths(all).map_err(io::Error::other)?);
    command.env(CACHE, folder).env("XDG_CACHE_HOME", folder);
    Ok(command)
}

/// A folder with the library under all of its names.
fn link(library: &Path, folder: &Path) -> io::Result<PathBuf> {
    let names = folder.join("libraries");
    fs::create_dir_all(&names)?;
    for name in NAMES {
        match symlink(library, names.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(names)
}

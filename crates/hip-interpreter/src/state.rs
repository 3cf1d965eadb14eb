//! What the library holds: one machine with its memory, modules and kernels.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use kintsugi_gfx90a::{CodeObject, Machine};

/// `hipSuccess`, `hipErrorInvalidValue`, `hipErrorOutOfMemory`, `hipErrorInvalidImage`, `hipErrorNotFound`,
/// `hipErrorNotSupported`.
pub const SUCCESS: c_int = 0;
pub const INVALID: c_int = 1;
pub const OUT_OF_MEMORY: c_int = 2;
pub const INVALID_IMAGE: c_int = 200;
pub const NOT_FOUND: c_int = 500;
pub const NOT_SUPPORTED: c_int = 801;

/// `hipErrorNoDevice`.
pub const NO_DEVICE: c_int = 100;

/// Bytes of the machine's memory.
pub const MEMORY: u64 = 2 << 30;

/// The machine, and what was loaded into it. Ranks that are threads share it.
pub struct State {
    pub machine: Machine,
    /// Bytes of each allocation, by its address.
    pub allocated: HashMap<u64, u64>,
    pub modules: Vec<CodeObject>,
    /// The module and the name of a kernel.
    pub functions: Vec<(usize, String)>,
}

/// The state behind its lock.
struct Shared(State);

// SAFETY: everything in the state, reference counts of decoded programs included, is reached only under the lock.
unsafe impl Send for Shared {}

static STATE: LazyLock<Mutex<Shared>> = LazyLock::new(|| {
    let machine = Machine::new(1);
    let state = State { machine, allocated: HashMap::new(), modules: Vec::new(), functions: Vec::new() };
    Mutex::new(Shared(state))
});

/// Runs something on the state.
pub fn with<T>(run: impl FnOnce(&mut State) -> T) -> T {
    let mut state: MutexGuard<Shared> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    run(&mut state.0)
}

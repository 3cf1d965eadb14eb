//! The `kintsugi` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use kintsugi_tensor::cpu::counting::CountingAllocator;

/// Measures the memory of every rank, for `predicted / measured`.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    kintsugi::main()
}

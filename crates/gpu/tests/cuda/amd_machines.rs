//! Machines with AMD's libraries: with hipBLASLt, and those on which a run cannot begin, which say so in one sentence.
//!
//! Each is a process of its own, with the test library in the place of AMD's.

use std::path::Path;
use std::process::Command;
use std::thread;

use kintsugi_conformance::products::{ending, gradients, linear, past_gelu};
use kintsugi_conformance::{COMPUTE, gradient_types};
use kintsugi_gpu::HIP;
use kintsugi_testing::{Need, skip};

use crate::test_backend::agree;

const HIP_NAME: &str = "libamdhip64.so.7";
const ROCBLAS_NAME: &str = "librocblas.so.5";

const MEMORY: u64 = 64 << 20;

/// The calling test in a process with libraries of these names. `None` in that process, and if it cannot be started.
fn again(names: &[&str]) -> Option<Command> {
    if amdhip64::is_here() {
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if let Err(missing) = amdhip64::check_tools(folder) {
        skip(Need::AmdTools, missing);
        return None;
    }
    let test = thread::current().name().expect("a test's thread has its name").to_owned();
    let mut program = amdhip64::this_program_with(folder, names).expect("the interpreter's library");
    program.args([&test, "--exact", "--nocapture"]);
    Some(program)
}

/// Starts the test again, in which the backend must fail with `message`.
fn refuses(names: &[&str], fault: Option<&str>, memory: u64, message: &str) {
    if let Some(mut program) = again(names) {
        let status = program.envs(fault.map(|fault| (amdhip64::FAULT, fault))).status().expect("it starts");
        assert!(status.success(), "{status}");
    } else if amdhip64::is_here() {
        let error = HIP.backend(0, memory, true).expect_err("the machine is not fit").to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn without_a_card_there_is_no_device() {
    if let Some(mut program) = again(&[HIP_NAME, ROCBLAS_NAME]) {
        let status = program.env(amdhip64::FAULT, amdhip64::NO_CARD).status().expect("it starts");
        assert!(status.success(), "{status}");
    } else if amdhip64::is_here() {
        assert_eq!(HIP.devices().expect("the driver answers"), 0);
        assert!(!HIP.is_here());
    }
}

#[test]
fn waves_of_an_unknown_size_are_refused() {
    let message = "gfx90a interpreter has waves of 48 threads; kernels are written for 32 and 64";
    refuses(&[HIP_NAME, ROCBLAS_NAME], Some(amdhip64::WAVES_OF_48), MEMORY, message);
}

#[test]
fn more_memory_than_there_is_is_refused() {
    refuses(&[HIP_NAME, ROCBLAS_NAME], None, 3 << 30, "3221225472 bytes of memory were refused");
}

#[test]
fn a_missing_library_of_products_is_named() {
    refuses(&[HIP_NAME], None, MEMORY, "rocBLAS");
}

/// A library that has none of the functions.
#[test]
fn a_library_that_is_too_old_is_named() {
    if let Some(mut program) = again(&[HIP_NAME]) {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("an-old-rocblas");
        std::fs::create_dir_all(&folder).expect("a folder");
        let old = folder.join(ROCBLAS_NAME);
        let built = Command::new("cc").args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(&old).status();
        assert!(built.expect("a C compiler").success());
        let others =
            program.get_envs().find(|(name, _)| *name == "LD_LIBRARY_PATH").and_then(|(_, value)| value);
        let mut path = folder.into_os_string();
        path.push(":");
        path.push(others.expect("the folder of the interpreter"));
        let status = program.env("LD_LIBRARY_PATH", path).status().expect("it starts");
        assert!(status.success(), "{status}");
    } else if amdhip64::is_here() {
        let error = HIP.backend(0, MEMORY, true).expect_err("it has no functions").to_string();
        assert!(error.contains("rocBLAS") && error.contains("rocblas_gemm_ex"), "{error}");
    }
}

/// With epilogues for widths that are multiples of 8; others are rocBLAS's and ours.
#[test]
fn products_by_hipblaslt() {
    if let Some(mut program) = again(&[HIP_NAME, ROCBLAS_NAME, amdhip64::HIPBLASLT]) {
        let status = program.status().expect("it starts");
        assert!(status.success(), "{status}");
        return;
    }
    if !amdhip64::is_here() {
        return;
    }
    let found =
        HIP.libraries().into_iter().find(|library| library.name == "hipBLASLt").expect("it is listed");
    assert_eq!(found.version.as_deref(), Some("100202"));
    for deterministic in [true, false] {
        let gpu = HIP.backend(0, MEMORY, deterministic).expect("a backend").without_tuning_cache();
        for dtype in COMPUTE {
            for shape in [(7, 5, 3), (30, 88, 136)] {
                let what = format!("{shape:?}, deterministic {deterministic}");
                for (bias, gelu) in [(false, false), (true, false), (false, true), (true, true)] {
                    agree(&gpu, dtype, &what, |backend| linear(backend, shape, bias, gelu));
                }
                agree(&gpu, dtype, &what, |backend| ending(backend, shape, true));
                for kept in gradient_types(dtype) {
                    agree(&gpu, dtype, &what, |backend| gradients(backend, shape, kept, true, [false, true]));
                    agree(&gpu, dtype, &what, |backend| past_gelu(backend, shape, kept, [false, true]));
                }
            }
        }
    }
}

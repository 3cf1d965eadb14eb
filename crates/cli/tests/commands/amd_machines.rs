//! A run on a machine whose AMD GPU cannot be used says why in one sentence. The machine's libraries are the interpreter's.

use std::fs;
use std::path::Path;
use std::process::Command;

use kintsugi_testing::{Need, skip};

use crate::support::{TINY, folder};

const HIP: &str = "libamdhip64.so.7";
const ROCBLAS: &str = "librocblas.so.5";
/// Names under which HIP is looked for.
const HIP_NAMES: [&str; 4] = [HIP, "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];

/// Trains on AMD's GPU with libraries of these names and expects an exit code and an error.
fn refused(name: &str, libraries: &[&str], prepare: impl Fn(&Path, &mut Command), code: i32, message: &str) {
    let (folder, cache) = (folder(name), Path::new(env!("CARGO_TARGET_TMPDIR")));
    if let Err(missing) = amdhip64::check_tools(cache) {
        return skip(Need::AmdTools, missing);
    }
    let binary = Path::new(env!("CARGO_BIN_EXE_kintsugi"));
    let mut program = amdhip64::program_with(binary, cache, libraries).expect("the interpreter's library");
    let settings =
        TINY.into_iter().chain(["run.device=hip", "parallel.tp=1", "parallel.pp=1", "parallel.dp=1"]);
    program.current_dir(&folder).arg("train").args(settings.flat_map(|setting| ["--set", setting]));
    prepare(&folder, &mut program);
    let output = program.output().expect("it starts");
    let problems = String::from_utf8_lossy(&output.stderr);
    let error = problems.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(error.contains(message) && problems.ends_with(&format!("{error}\n")), "{problems}");
    assert_eq!(output.status.code(), Some(code), "{problems}");
}

/// The libraries in `folder` are found before others.
fn first(folder: &Path, program: &mut Command) {
    let others = program.get_envs().find(|(name, _)| *name == "LD_LIBRARY_PATH").and_then(|(_, path)| path);
    let mut path = folder.as_os_str().to_owned();
    path.push(":");
    path.push(others.expect("the interpreter's folder"));
    program.env("LD_LIBRARY_PATH", path);
}

#[test]
fn without_a_driver() {
    if Path::new("/opt/rocm").exists() {
        return eprintln!("skipped: this machine has AMD's driver in /opt/rocm");
    }
    let prepare = |folder: &Path, program: &mut Command| {
        for name in HIP_NAMES {
            fs::write(folder.join(name), "no library").expect("a file");
        }
        first(folder, program);
    };
    let message = "run.device = \"hip\": HIP was not found (tried libamdhip64.so.7, ";
    refused("without-hip", &[], prepare, 1, message);
}

#[test]
fn with_a_driver_that_is_too_old() {
    let prepare = |folder: &Path, program: &mut Command| {
        let built =
            Command::new("cc").args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(folder.join(HIP)).status();
        assert!(built.expect("a C compiler").success());
        first(folder, program);
    };
    refused(
        "old-hip",
        &[],
        prepare,
        1,
        "run.device = \"hip\": HIP has no hipInit; ROCm 5.2 or newer is needed",
    );
}

#[test]
fn without_a_card() {
    let prepare = |_: &Path, program: &mut Command| {
        program.env(amdhip64::FAULT, amdhip64::NO_CARD);
    };
    refused("no-card", &[HIP], prepare, 1, "run.device = \"hip\": the HIP driver shows no device");
}

#[test]
fn without_a_library_of_products() {
    refused("without-rocblas", &[HIP], |_, _| {}, 1, "rocBLAS was not found (tried librocblas.so.5, ");
}

#[test]
fn with_waves_of_an_unknown_size() {
    let prepare = |_: &Path, program: &mut Command| {
        program.env(amdhip64::FAULT, amdhip64::WAVES_OF_48);
    };
    let message = "has waves of 48 threads; kernels are written for 32 and 64";
    refused("waves-of-48", &[HIP, ROCBLAS], prepare, 1, message);
}

#[test]
fn with_too_little_memory() {
    let prepare = |_: &Path, program: &mut Command| {
        program.args(["--set", "model.hidden=4096", "--set", "model.layers=4"]);
    };
    refused("little-memory", &[HIP, ROCBLAS], prepare, 2, "but has 2.00 GiB (free on the GPU)");
}

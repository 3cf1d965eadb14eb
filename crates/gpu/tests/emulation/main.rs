//! Kernels for the tensor cores, compiled as C++ and run lane by lane on the CPU. Their results are compared with the
//! plain definition. Every memory access must be in bounds, and two threads must not access the same address without a
//! barrier in between.
//!
//! `machine.hpp` emulates the GPU. Without a C++ compiler the tests say so and pass.

use kintsugi_testing::{Need, skip};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files of this folder, and unchanged kernel files. Headers with PTX are replaced by emulations in this folder.
const FILES: [(&str, &str); 7] = [
    ("machine.hpp", include_str!("machine.hpp")),
    ("machine.cpp", include_str!("machine.cpp")),
    ("attention.cpp", include_str!("attention.cpp")),
    ("matrix_instructions.cuh", include_str!("matrix_instructions.cuh")),
    ("tensor_core.cuh", include_str!("../../src/kernels/tensor_core.cuh")),
    ("forward.cpp", include_str!("../../src/kernels/tensor_attention_forward.cu")),
    ("backward.cpp", include_str!("../../src/kernels/tensor_attention_backward.cu")),
];

/// Head sizes for both kinds of tiles that do not fill a whole number of columns.
#[test]
fn attention_with_small_heads() {
    attention("small", 40, "f16");
}

#[test]
fn attention_with_large_heads() {
    attention("large", 88, "bf16");
}

fn attention(name: &str, head_dim: usize, element: &str) {
    if Command::new("c++").arg("--version").output().is_err() {
        skip(Need::Compiler, "there is no C++ compiler (c++)");
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("a folder for the build");
    for (file, text) in FILES {
        fs::write(folder.join(file), text).expect("a file of the build");
    }
    let definitions = definitions(head_dim, element);
    // Only the accesses of kernels are checked.
    let watched = ["-fsanitize=thread", "-include", "machine.hpp", "-O1"];
    let objects = [
        compile(&folder, "forward", &watched, &definitions),
        compile(&folder, "backward", &watched, &definitions),
        compile(&folder, "machine", &["-O2"], &[]),
        compile(&folder, "attention", &["-O2"], &definitions),
    ];
    let program = folder.join("attention");
    succeed(Command::new("c++").args(&objects).arg("-o").arg(&program));
    succeed(&mut Command::new(&program));
}

/// The definitions with which `tensor.rs` launches the kernels. The kernels assert that they match.
fn definitions(head_dim: usize, element: &str) -> Vec<String> {
    let padded = head_dim.next_multiple_of(16);
    let (key_threads, queries, keys) = if padded <= 64 { (128, 32, 64) } else { (256, 64, 32) };
    let vectors = |count: usize| count * (padded + 8) * 2;
    vec![
        format!("-DHEAD_DIM={head_dim}"),
        format!("-DELEMENT={element}"),
        "-DLAUNCH_QUERY_THREADS=128".to_owned(),
        format!("-DLAUNCH_KEY_THREADS={key_threads}"),
        format!("-DLAUNCH_FORWARD_SHARED={}", vectors(128 + 2 * 64)),
        format!("-DLAUNCH_DKEYS_SHARED={}", vectors(2 * 128 + 4 * queries) + 2 * 12 * queries),
        format!("-DLAUNCH_DQUERIES_SHARED={}", vectors(2 * 128 + 4 * keys)),
    ]
}

fn compile(folder: &Path, file: &str, options: &[&str], definitions: &[String]) -> PathBuf {
    let object = folder.join(file).with_extension("o");
    let source = format!("{file}.cpp");
    let mut compiler = Command::new("c++");
    compiler.current_dir(folder).args(["-std=c++17", "-w", "-c", &source, "-o"]).arg(&object);
    succeed(compiler.args(options).args(definitions));
    object
}

fn succeed(command: &mut Command) {
    let output = command.output().expect("the command starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}\n{}{}", text(&output.stdout), text(&output.stderr));
}

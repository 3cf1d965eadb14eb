//! What compilers report of every kernel: no register is spilled, and LDS suffices. By AMD's own compiler for gfx90a, and by
//! LLVM's for gfx90a, gfx942 and gfx1030.

use std::fs;
use std::path::Path;

use kintsugi_gfx90a::{Architecture, Clang, CodeObject, Resources};
use kintsugi_tensor::DType;
use kintsugi_testing::{Need, cases, skip};

use crate::mfma_attention::{HEAD_DIMS, definitions};
use crate::support::compiler;

const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../gpu/src/kernels");

/// LDS of a workgroup.
const LDS: usize = 64 << 10;

/// LLVM's compiler. `None` without it, with a note.
pub fn clang() -> Option<Clang> {
    match Clang::find(Path::new(env!("CARGO_TARGET_TMPDIR"))) {
        Ok(clang) => Some(clang),
        Err(missing) => {
            skip(Need::AmdTools, missing);
            None
        }
    }
}

/// The names of kernel files in plain arithmetic: the others are for matrix instructions of one maker.
fn portable_files() -> Vec<String> {
    let entries =
        fs::read_dir(KERNELS).expect("the kernels' folder").map(|entry| entry.expect("a file").path());
    let kernels = entries.filter(|path| path.extension().is_some_and(|ending| ending == "cu"));
    let portable = kernels.filter(|path| {
        let text = fs::read_to_string(path).expect("text");
        ["#include \"tensor_core", "#include \"hopper", "#include \"mfma", "// architecture: "]
            .iter()
            .all(|mark| !text.contains(mark))
    });
    let mut names: Vec<String> =
        portable.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

fn fits(code: &CodeObject, what: &str) {
    assert!(code.kernels().count() > 0, "{what}: no kernels");
    for kernel in code.kernels() {
        let Resources { lds, scratch, .. } = code.resources(kernel).expect("the kernel is there");
        assert_eq!(scratch, 0, "{what}, {kernel}: bytes of scratch memory");
        assert!(lds <= LDS, "{what}, {kernel}: {lds} bytes of LDS");
    }
}

#[test]
fn portable_kernels_fit_gfx90a_by_amds_compiler() {
    let Some(compiler) = compiler() else { return };
    for file in portable_files() {
        fits(&compiler.kernel_file(&file, &[]).unwrap_or_else(|error| panic!("{error}")), &file);
    }
}

fn portable_kernels_fit(architecture: Architecture) {
    let Some(clang) = clang() else { return };
    let files = portable_files();
    assert!(files.len() >= 14, "{files:?}");
    for file in files {
        let code = clang.kernel_file(&file, architecture, &[]).unwrap_or_else(|error| panic!("{error}"));
        fits(&code, &format!("{file} for {}", architecture.name()));
    }
}

#[test]
fn portable_kernels_fit_gfx90a_by_llvm() {
    portable_kernels_fit(Architecture::Gfx90a);
}

#[test]
fn portable_kernels_fit_gfx942_by_llvm() {
    portable_kernels_fit(Architecture::Gfx942);
}

#[test]
fn portable_kernels_fit_gfx1030_by_llvm() {
    portable_kernels_fit(Architecture::Gfx1030);
}

/// Attention on matrix cores, for some widths of heads.
fn matrix_kernels(head_dims: &[usize], compile: impl Fn(&str, &[String]) -> CodeObject) {
    for &head_dim in head_dims {
        for file in ["mfma_attention_forward", "mfma_attention_backward"] {
            let definitions = definitions(head_dim, DType::BF16);
            fits(&compile(file, &definitions), &format!("{file}, heads of {head_dim}"));
        }
    }
}

#[test]
fn attention_on_matrix_cores_fits_by_amds_compiler() {
    let Some(compiler) = compiler() else { return };
    matrix_kernels(&HEAD_DIMS, |file, definitions| {
        compiler.kernel_file(file, definitions).unwrap_or_else(|error| panic!("{error}"))
    });
}

#[test]
fn attention_on_matrix_cores_fits_gfx90a_and_gfx942_by_llvm() {
    let Some(clang) = clang() else { return };
    // The widest takes the most registers.
    let head_dims = &HEAD_DIMS[HEAD_DIMS.len() - cases(1, HEAD_DIMS.len())..];
    for architecture in [Architecture::Gfx90a, Architecture::Gfx942] {
        matrix_kernels(head_dims, |file, definitions| {
            clang.kernel_file(file, architecture, definitions).unwrap_or_else(|error| panic!("{error}"))
        });
    }
}

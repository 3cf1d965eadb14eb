//! Compiles kernels with LLVM's clang for any of AMD's architectures, as ROCm 6 does, whose compiler is made of the same sources.
//!
//! The device libraries are those of Debian's ROCm 5.2.3, which are bitcode. They have no file for gfx942; the few differences
//! that such a file declares are those of gfx90a.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use xxhash_rust::xxh3::xxh3_128;

use crate::code_object::CodeObject;
use crate::compile::{definition_options, kernel_source};
use crate::error::Error;

const CLANG: &str = "clang-19";
const LINKER: &str = "ld.lld-19";
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode";
const HEADER: &str = "/usr/include/hip/hip_runtime.h";

/// An architecture that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// MI200.
    Gfx90a,
    /// MI300.
    Gfx942,
    /// RDNA 2, whose waves have 32 lanes.
    Gfx1030,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Architecture; 3] = [Architecture::Gfx90a, Architecture::Gfx942, Architecture::Gfx1030];

    /// The name that compilers give it.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Gfx90a => "gfx90a",
            Architecture::Gfx942 => "gfx942",
            Architecture::Gfx1030 => "gfx1030",
        }
    }

    /// Lanes of a wave.
    pub fn wave(self) -> usize {
        if self == Architecture::Gfx1030 { 32 } else { 64 }
    }

    /// The device libraries that a kernel is linked with.
    fn libraries(self) -> [&'static str; 10] {
        let (waves, isa) = match self {
            Architecture::Gfx90a | Architecture::Gfx942 => {
                ("oclc_wavefrontsize64_on", "oclc_isa_version_90a")
            }
            Architecture::Gfx1030 => ("oclc_wavefrontsize64_off", "oclc_isa_version_1030"),
        };
        [
            "hip",
            "ocml",
            "ockl",
            "oclc_daz_opt_off",
            "oclc_unsafe_math_off",
            "oclc_finite_only_off",
            "oclc_correctly_rounded_sqrt_on",
            "oclc_abi_version_500",
            waves,
            isa,
        ]
    }
}

/// LLVM's compiler, and the folder that keeps what it made.
#[derive(Debug)]
pub struct Clang {
    version: Vec<u8>,
    cache: PathBuf,
}

impl Clang {
    /// Looks for the compiler, its linker, and HIP's header and libraries. Fails with a sentence that says what is missing.
    pub fn find(cache: &Path) -> Result<Self, Error> {
        let missing =
            |what: &str| Error::Compiler(format!("there is no {what} (scripts/amd-tools installs it)"));
        let version = |program: &str| {
            let output = Command::new(program).arg("--version").output();
            output.map(|output| output.stdout).map_err(|_| missing(program))
        };
        version(LINKER)?;
        for path in [HEADER, LIBRARIES] {
            if !Path::new(path).exists() {
                return Err(missing(path));
            }
        }
        Ok(Clang { version: version(CLANG)?, cache: cache.to_owned() })
    }

    /// Compiles one of Kintsugi's kernel files, by its name without the extension, with definitions such as `HEAD_DIM=64`.
    pub fn kernel_file(
        &self,
        name: &str,
        architecture: Architecture,
        definitions: &[String],
    ) -> Result<CodeObject, Error> {
        let source = kernel_source(name)?;
        let options = [options(architecture), definition_options(definitions)].concat();
        let key = format!("{source}\n{options:?} {:?}", self.version);
        let stem = format!("{}-clang-{name}-{:032x}", architecture.name(), xxh3_128(key.as_bytes()));
        let path = |extension: &str| self.cache.join(format!("{stem}.{extension}"));
        let (object, text, part) = (path("co"), path("hip"), path("part"));
        let failed = |error| Error::File { path: object.clone(), error };
        fs::create_dir_all(&self.cache).map_err(failed)?;
        // Tests are processes that need the same files at the same time.
        let lock = File::create(path("lock")).map_err(failed)?;
        lock.lock().map_err(failed)?;
        if !object.exists() {
            fs::write(&text, source).map_err(failed)?;
            let output = Command::new(CLANG).args(&options).arg(&text).arg("-o").arg(&part).output();
            let output = output.map_err(|error| Error::File { path: CLANG.into(), error })?;
            if !output.status.success() {
                let log = String::from_utf8_lossy(&output.stderr).into_owned();
                return Err(Error::Compiler(format!("{name} for {}: {log}", architecture.name())));
            }
            fs::remove_file(&text).map_err(failed)?;
            fs::rename(&part, &object).map_err(failed)?;
        }
        drop(lock);
        CodeObject::read(&object)
    }
}

/// The options of clang.
fn options(architecture: Architecture) -> Vec<String> {
    let all = [
        "-x",
        "hip",
        "--cuda-device-only",
        "--no-gpu-bundle-output",
        "-nogpulib",
        "-D__HIP_PLATFORM_AMD__",
        "-std=c++17",
        "-O3",
        "-include",
        "hip/hip_runtime.h",
    ];
    let link = |library: &str| {
        [
            "-Xclang".into(),
            "-mlink-builtin-bitcode".into(),
            "-Xclang".into(),
            format!("{LIBRARIES}/{library}.bc"),
        ]
    };
    let own = [format!("--offload-arch={}", architecture.name()), format!("-DWARP={}", architecture.wave())];
    all.map(str::to_owned)
        .into_iter()
        .chain(own)
        .chain(architecture.libraries().into_iter().flat_map(link))
        .collect()
}

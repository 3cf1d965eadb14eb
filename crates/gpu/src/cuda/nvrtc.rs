//! Compiles kernel files at run time for an NVIDIA GPU.

use std::ffi::{CString, c_char};
use std::iter;

use cudarc::nvrtc::{result, sys};
use kintsugi_spec::work;

use super::libraries;
use crate::driver::SourceText;
use crate::error::GpuError;
use crate::kernels::HEADERS;
use crate::{image_cache, kernels};

/// The machine code of a kernel file for `architecture` (such as `sm_90`), from the disk cache if it is there.
pub(crate) fn cubin(source: SourceText, architecture: &str) -> Result<Vec<u8>, GpuError> {
    libraries::NVRTC.require()?;
    let text = kernels::with_header(source);
    let options = options(architecture, source.definitions);
    let included = HEADERS.iter().map(|(_, text)| *text).filter(|_| includes_headers(&text));
    let whole: String = iter::once(text.as_str()).chain(included).collect();
    let key = [whole, options.join(" "), version()];
    image_cache::cached(&format!("{}-{architecture}", source.name), "cubin", &key, || {
        let image = compile(&text, &options).map_err(|log| GpuError::Compile {
            source_name: source.name.to_owned(),
            architecture: architecture.to_owned(),
            log,
        })?;
        work::finish_piece();
        Ok(image)
    })
}

/// Compiler options. Functions without annotation are device code, because lambdas cannot be annotated.
fn options(architecture: &str, definitions: &[String]) -> Vec<String> {
    let all = [format!("--gpu-architecture={architecture}"), "-std=c++17".into(), "-default-device".into()];
    all.into_iter().chain(definitions.iter().map(|definition| format!("-D{definition}"))).collect()
}

/// Whether a kernel file includes a header for NVIDIA's tensor cores.
fn includes_headers(text: &str) -> bool {
    text.contains("#include \"")
}

/// NVRTC's version, such as "13.0". NVRTC must have been loaded.
pub(crate) fn version() -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers to write to; the caller has asked for the library.
    let status = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    match status.result() {
        Ok(()) => format!("{major}.{minor}"),
        Err(error) => error.to_string(),
    }
}

/// Compiles a program. The error is NVRTC's log.
fn compile(text: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let text = CString::new(text).expect("kernel sources hold no zero");
    let program = Program::new(&text)?;
    // SAFETY: the program lives.
    if let Err(error) = unsafe { result::compile_program(program.0, options) } {
        return Err(program.log().unwrap_or_else(|| error.to_string()));
    }
    program.image().map_err(|error| error.to_string())
}

/// An NVRTC program, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    /// A program that can include [`HEADERS`].
    fn new(text: &CString) -> Result<Self, String> {
        let zero_ended = |text: &str| CString::new(text).expect("kernel sources hold no zero");
        let headers = HEADERS.map(|(name, text)| (zero_ended(name), zero_ended(text)));
        let names = headers.each_ref().map(|(name, _)| name.as_ptr());
        let texts = headers.each_ref().map(|(_, text)| text.as_ptr());
        let mut program = std::ptr::null_mut();
        // SAFETY: texts and names end with zeros, there are as many of each, and NVRTC copies them.
        let status = unsafe {
            let (count, texts, names) = (HEADERS.len() as i32, texts.as_ptr(), names.as_ptr());
            sys::nvrtcCreateProgram(&raw mut program, text.as_ptr(), std::ptr::null(), count, texts, names)
        };
        status.result().map(|()| Program(program)).map_err(|error| error.to_string())
    }

    fn log(&self) -> Option<String> {
        // SAFETY: the program lives.
        let log = unsafe { result::get_program_log(self.0) }.ok()?;
        let bytes: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn image(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut size = 0;
        // SAFETY: the program lives and was compiled for a real architecture; the vector has the size that NVRTC
        // reports.
        unsafe {
            sys::nvrtcGetCUBINSize(self.0, &raw mut size).result()?;
            let mut image = vec![0_u8; size];
            sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast::<c_char>()).result()?;
            Ok(image)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by NVRTC, destroyed once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use kintsugi_testing::{Need, cases, skip};

    use super::*;
    use crate::attention::tensor_attention_definitions;
    use crate::cuda::hopper_attention::definitions as hopper_attention_definitions;
    use crate::kernels::{COMMON, architecture, soft_cap_definition, warp_definition};
    use kintsugi_tensor::DType;

    /// Every kernel file of the folder that is not for AMD's matrix cores, with its name.
    fn kernel_files() -> Vec<(String, String)> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/kernels");
        let paths =
            fs::read_dir(folder).expect("the kernels' folder").map(|entry| entry.expect("a file").path());
        let kernels = paths.filter(|path| path.extension().is_some_and(|ending| ending == "cu"));
        let name = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
        let files = kernels.map(|path| (name(&path), fs::read_to_string(&path).expect("text")));
        files.filter(|(_, text)| !text.contains("#include \"mfma.cuh\"")).collect()
    }

    #[test]
    fn every_kernel_file_compiles() {
        if let Err(missing) = libraries::NVRTC.require() {
            skip(Need::Nvrtc, missing);
            return;
        }
        let files = kernel_files();
        assert!(!files.is_empty(), "no kernels were found");
        for (name, text) in files.iter().filter(|(_, text)| !is_for_one_head(text)) {
            for architecture in architectures(text) {
                compiles(name, text, architecture, &[]);
            }
        }
    }

    /// Whether a file is compiled separately for each head size.
    fn is_for_one_head(text: &str) -> bool {
        text.contains("HEAD_DIM")
    }

    /// The architectures that a file is compiled for. A portable file differs between them only if it asks for one.
    fn architectures(text: &str) -> Vec<&str> {
        let portable =
            if cases(text.contains("__CUDA_ARCH__"), true) { &["sm_80", "sm_90"][..] } else { &["sm_80"] };
        architecture(text).map_or(portable.to_vec(), |only| vec![only])
    }

    fn compiles(name: &str, text: &str, architecture: &str, definitions: &[String]) {
        let definitions = &[definitions, &[warp_definition(32)]].concat();
        let source = SourceText { name, text, architecture: None, definitions };
        let image = cubin(source, architecture).unwrap_or_else(|error| panic!("{error}"));
        assert!(image.starts_with(b"\x7fELF"), "{name} gave no machine code");
    }

    /// The files themselves assert that the definitions match their tiles.
    #[test]
    fn every_file_for_one_head_compiles() {
        if let Err(missing) = libraries::NVRTC.require() {
            skip(Need::Nvrtc, missing);
            return;
        }
        let mut files = kernel_files();
        files.retain(|(_, text)| is_for_one_head(text));
        assert!(!files.is_empty(), "no kernels were found");
        std::thread::scope(|threads| {
            for (name, text) in &files {
                threads.spawn(move || {
                    for (head_dim, dtype) in [(64, DType::BF16), (88, DType::F16), (128, DType::BF16)] {
                        let definitions = tensor_attention_definitions(head_dim, dtype).expect("a type");
                        let all = [definitions, hopper_attention_definitions(head_dim)].concat();
                        for architecture in architectures(text) {
                            compiles(name, text, architecture, &all);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn files_with_a_soft_cap_compile() {
        if let Err(missing) = libraries::NVRTC.require() {
            skip(Need::Nvrtc, missing);
            return;
        }
        let capped = ["attention", "sliced_attention", "cached_attention", "loss"];
        let files = kernel_files().into_iter().filter(|(name, _)| capped.contains(&&name[..]));
        let files: Vec<_> = files.collect();
        assert_eq!(files.len(), capped.len());
        let definitions: Vec<String> = soft_cap_definition(Some(50.0)).into_iter().collect();
        for (name, text) in files {
            compiles(&name, &text, "sm_80", &definitions);
        }
    }

    /// If the compiler cannot track asynchronous products, it waits after each one. That halves the speed and fails no
    /// other test.
    #[test]
    fn asynchronous_products_are_not_waited_for_one_by_one() {
        if let Err(missing) = libraries::NVRTC.require() {
            skip(Need::Nvrtc, missing);
            return;
        }
        let files = kernel_files();
        for (name, text) in files.iter().filter(|(_, text)| architecture(text) == Some("sm_90a")) {
            let heads: &[usize] = if is_for_one_head(text) { &[64, 88, 128] } else { &[64] };
            for &head_dim in heads {
                let text = CString::new(format!("{COMMON}\n{text}")).expect("no zero");
                let definitions =
                    [hopper_attention_definitions(head_dim), vec![warp_definition(32)]].concat();
                let mut options = options("sm_90a", &definitions);
                options.push("--ptxas-options=-v".to_owned());
                let program = Program::new(&text).expect("a program");
                // SAFETY: the program lives.
                unsafe { result::compile_program(program.0, &options) }.expect("it compiles");
                let log = program.log().expect("a log");
                assert!(log.contains("registers"), "{name}: no word of ptxas in {log:?}");
                assert!(!log.contains("serialized"), "{name} with heads of {head_dim}: {log}");
            }
        }
    }

    #[test]
    fn compile_errors_name_file_and_line() {
        if let Err(missing) = libraries::NVRTC.require() {
            skip(Need::Nvrtc, missing);
            return;
        }
        let text = "\nextern \"C\" __global__ void broken() { nothing(); }";
        let definitions = [warp_definition(32)];
        let source = SourceText { name: "broken", text, architecture: None, definitions: &definitions };
        let message = cubin(source, "sm_90").expect_err("there is no such function").to_string();
        assert!(message.contains("broken.cu(2)") && message.contains("nothing"), "{message}");
    }
}

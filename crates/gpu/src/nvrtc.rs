//! Compiles kernel files at run time for the GPU of this machine, and caches the result on disk.
//!
//! The cache key is a hash of source, options and NVRTC version, so an outdated file is never loaded. Each cached file
//! ends with its own hash, because the driver does not check the machine code that it is given.

use std::ffi::{CString, c_char};
use std::fs;
use std::iter;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::nvrtc::{result, sys};
use kintsugi_spec::{output, work};

use super::cache;
use super::error::CudaError;
use super::kernels::{COMMON, HEADERS};
use super::libraries;

/// The machine code of a kernel file for `architecture` (such as `sm_90`) and definitions (`NAME=value`), from the disk
/// cache if it is there. [`COMMON`](super::kernels::COMMON) is prepended to the text; compiler messages use the file's
/// own line numbers.
pub(crate) fn cubin(
    name: &str,
    text: &str,
    architecture: &str,
    definitions: &[String],
) -> Result<Vec<u8>, CudaError> {
    libraries::NVRTC.require()?;
    let text = format!("{COMMON}\n#line 1 \"{name}.cu\"\n{text}");
    let options = options(architecture, definitions);
    let kept = cache::folder("kernels").map(|folder| {
        let included = HEADERS.iter().map(|(_, text)| *text).filter(|_| includes_headers(&text));
        let whole: String = iter::once(text.as_str()).chain(included).collect();
        let key = fingerprint(&[whole.as_bytes(), options.join(" ").as_bytes(), version().as_bytes()]);
        folder.join(format!("{name}-{architecture}-{key:032x}.cubin"))
    });
    if let Some(image) = kept.as_deref().and_then(find) {
        return Ok(image);
    }
    let image = compile(&text, &options).map_err(|log| CudaError::Compile {
        source_name: name.to_owned(),
        architecture: architecture.to_owned(),
        log,
    })?;
    work::finish_piece();
    if let Some(path) = kept {
        keep(&path, &image);
    }
    Ok(image)
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

/// Reads a cached image. `None` if the file is missing or damaged, for example by a crash or a full disk.
fn find(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let (image, hash) = bytes.split_last_chunk()?;
    (fingerprint(&[image]) == u128::from_le_bytes(*hash)).then(|| {
        bytes.truncate(bytes.len() - size_of::<u128>());
        bytes
    })
}

/// Writes to a temporary name first, so that ranks that compile the same file at once never read a partial file. A
/// failed write is ignored.
fn keep(path: &Path, image: &[u8]) {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let unfinished = path.with_extension(format!("{}-{number}.part", std::process::id()));
    let bytes = [image, &fingerprint(&[image]).to_le_bytes()].concat();
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    folder.and_then(|()| output::write_whole(path, unfinished, &bytes)).ok();
}

/// FNV-1a with 128 bits, over the parts and their lengths.
fn fingerprint(parts: &[&[u8]]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for part in parts {
        for byte in part.len().to_le_bytes().iter().chain(*part) {
            hash = (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kintsugi_testing::{Need, skip};

    use super::*;
    use crate::attention::{hopper_attention_definitions, tensor_attention_definitions};
    use crate::kernels::architecture;
    use kintsugi_tensor::DType;

    /// Every kernel file of the folder, with its name.
    fn kernel_files() -> Vec<(String, String)> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/kernels");
        let paths =
            fs::read_dir(folder).expect("the kernels' folder").map(|entry| entry.expect("a file").path());
        let kernels = paths.filter(|path| path.extension().is_some_and(|ending| ending == "cu"));
        let name = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
        kernels.map(|path| (name(&path), fs::read_to_string(&path).expect("text"))).collect()
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

    fn architectures(text: &str) -> Vec<&str> {
        architecture(text).map_or(vec!["sm_80", "sm_90"], |only| vec![only])
    }

    fn compiles(name: &str, text: &str, architecture: &str, definitions: &[String]) {
        let image = cubin(name, text, architecture, definitions).unwrap_or_else(|error| panic!("{error}"));
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
                let mut options = options("sm_90a", &hopper_attention_definitions(head_dim));
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
        let message = cubin("broken", text, "sm_90", &[]).expect_err("there is no such function").to_string();
        assert!(message.contains("broken.cu(2)") && message.contains("nothing"), "{message}");
    }

    #[test]
    fn a_cached_image_is_read_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("kintsugi-cubin-{}", std::process::id()));
        let path = folder.join("kernel.cubin");
        assert_eq!(find(&path), None);
        let image: Vec<u8> = (0..1000_u32).map(|i| (i * i % 251) as u8).collect();
        keep(&path, &image);
        assert_eq!(find(&path).as_ref(), Some(&image));
        let whole = fs::read(&path).expect("a file");
        let mut changed = whole.clone();
        changed[500] ^= 1;
        for broken in [&whole[..999], &whole[..15], &[], &image[..], &changed[..]] {
            fs::write(&path, broken).expect("it is changed");
            assert_eq!(find(&path), None, "{} bytes", broken.len());
        }
        keep(&path, &image);
        assert_eq!(find(&path), Some(image), "what is compiled again takes its place");
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1, "nothing unfinished is left");
        fs::remove_dir_all(&folder).expect("it can be removed");
    }

    #[test]
    fn fingerprints_differ_by_content_and_by_where_parts_end() {
        assert_ne!(fingerprint(&[b"ab", b"c"]), fingerprint(&[b"a", b"bc"]));
        assert_ne!(fingerprint(&[b"ab"]), fingerprint(&[b"ac"]));
        assert_eq!(fingerprint(&[b"ab", b"c"]), fingerprint(&[b"ab", b"c"]));
    }
}

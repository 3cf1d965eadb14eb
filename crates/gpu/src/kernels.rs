//! The kernel source files, and a cache of the kernels that have been loaded.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CString;
use std::rc::Rc;

use crate::driver::{Function, Grid, Module, SourceText};
use crate::error::GpuError;
use crate::stream::{Argument, Stream, Table};
use kintsugi_tensor::DType;

/// The header that is prepended to every kernel file: types, conversions, reductions.
pub(crate) const COMMON: &str = include_str!("kernels/common.cuh");

/// The headers that kernel files for attention and for matrix instructions include, by name.
pub(crate) const HEADERS: [(&str, &str); 7] = [
    ("attention_tiles.cuh", include_str!("kernels/attention_tiles.cuh")),
    ("tensor_core.cuh", include_str!("kernels/tensor_core.cuh")),
    ("matrix_instructions.cuh", include_str!("kernels/matrix_instructions.cuh")),
    ("hopper_instructions.cuh", include_str!("kernels/hopper_instructions.cuh")),
    ("hopper_attention.cuh", include_str!("kernels/hopper_attention.cuh")),
    ("mfma.cuh", include_str!("kernels/mfma.cuh")),
    ("mfma_slices.cuh", include_str!("kernels/mfma_slices.cuh")),
];

/// A kernel source file, without [`COMMON`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// File name without extension.
    pub(crate) name: &'static str,
    /// CUDA C++ that hipcc also compiles, unless the file includes a header for matrix instructions or names an architecture.
    pub(crate) text: &'static str,
}

/// The text that is compiled: the common header and the file, whose line numbers are the compiler's.
pub(crate) fn with_header(source: SourceText) -> String {
    format!("{COMMON}\n#line 1 \"{}.cu\"\n{}", source.name, source.text)
}

/// The text with the headers that it includes in their places.
pub(crate) fn with_included_headers(text: &str) -> String {
    HEADERS.iter().fold(text.to_owned(), |text, (name, header)| {
        text.replace(&format!("#include \"{name}\"\n"), &format!("#line 1 \"{name}\"\n{header}"))
    })
}

/// The definition of the number of threads of a warp, with which every file is compiled.
pub(crate) fn warp_definition(threads: usize) -> String {
    format!("WARP={threads}")
}

/// The definition of a soft cap, with which a file is compiled if its operation has one.
pub(crate) fn soft_cap_definition(soft_cap: Option<f64>) -> Option<String> {
    soft_cap.map(|cap| format!("SOFT_CAP={:?}f", cap as f32))
}

/// The architecture in the file's `// architecture:` line. `None` if the file compiles for every architecture.
pub(crate) fn architecture(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("// architecture: "))
}

/// Declares kernel files.
macro_rules! sources {
    ($($constant:ident = $name:literal),+ $(,)?) => {
        $(pub(crate) static $constant: Source =
            Source { name: $name, text: include_str!(concat!("kernels/", $name, ".cu")) };)+

        /// All of them.
        pub(crate) static SOURCES: &[&Source] = &[$(&$constant),+];
    };
}

sources! {
    ELEMENTWISE = "elementwise",
    COLUMN_SUM = "column_sum",
    NORM = "norm",
    SPLIT_NORM = "split_norm",
    ACTIVATION = "activation",
    ROTARY = "rotary",
    EMBEDDING = "embedding",
    LOSS = "loss",
    OPTIMIZER = "optimizer",
    QUANTIZE = "quantize",
    FLOAT8 = "float8",
    EPILOGUE = "epilogue",
    ATTENTION = "attention",
    SLICED_ATTENTION = "sliced_attention",
    CACHED_ATTENTION = "cached_attention",
    HOPPER_PRODUCT = "hopper_product",
    HOPPER_ATTENTION_FORWARD = "hopper_attention_forward",
    HOPPER_ATTENTION_BACKWARD = "hopper_attention_backward",
    TENSOR_ATTENTION_FORWARD = "tensor_attention_forward",
    TENSOR_ATTENTION_BACKWARD = "tensor_attention_backward",
    MFMA_ATTENTION_FORWARD = "mfma_attention_forward",
    MFMA_ATTENTION_BACKWARD = "mfma_attention_backward",
}

/// The kernels of one device. A file is compiled and loaded when one of its kernels is first used.
#[derive(Clone, Debug)]
pub(crate) struct Kernels {
    stream: Stream,
    loaded: Rc<RefCell<Loaded>>,
}

#[derive(Debug, Default)]
struct Loaded {
    /// Keyed by file name and definitions; functions are keyed by kernel name and definitions.
    modules: HashMap<String, Module>,
    functions: HashMap<String, Function>,
}

impl Kernels {
    /// An empty cache.
    pub(crate) fn new(stream: &Stream) -> Self {
        Kernels { stream: stream.clone(), loaded: Rc::default() }
    }

    /// The stream that kernels are enqueued on.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Looks up kernel `name` of a file compiled with these definitions (`NAME=value`). Kernel names are unique over
    /// all files.
    fn defined(
        &self,
        source: &'static Source,
        definitions: &[String],
        name: &str,
    ) -> Result<Function, GpuError> {
        let loaded = &mut *self.loaded.borrow_mut();
        let key = |name: &str| format!("{name} {}", definitions.join(" "));
        if let Some(&function) = loaded.functions.get(&key(name)) {
            return Ok(function);
        }
        self.stream.mark_not_repeatable();
        let module = match loaded.modules.get(&key(source.name)) {
            Some(&module) => module,
            None => *loaded.modules.entry(key(source.name)).or_insert(self.load(source, definitions)?),
        };
        let symbol = CString::new(name).expect("kernel names hold no zero");
        let function = self.stream.driver().function(module, &symbol)?;
        loaded.functions.insert(key(name), function);
        Ok(function)
    }

    /// Enqueues the kernel `name` of a file. It takes the table by value before its other arguments, if there is one.
    ///
    /// # Safety
    /// As [`Stream::launch`].
    pub(crate) unsafe fn launch_with_table(
        &self,
        source: &'static Source,
        name: &str,
        grid: Grid,
        table: Table,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_defined(source, &[], name, grid, table, arguments) }
    }

    /// The same for a file that is compiled with definitions.
    ///
    /// # Safety
    /// As [`Stream::launch`].
    pub(crate) unsafe fn launch_defined(
        &self,
        source: &'static Source,
        definitions: &[String],
        name: &str,
        grid: Grid,
        table: Table,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        let function = self.defined(source, definitions, name)?;
        let launched = self.stream.launching(
            || name.to_owned(),
            || {
                // SAFETY: the caller's promise.
                unsafe { self.stream.launch(function, grid, table, arguments) }
            },
        );
        launched.map_err(|error| error.during(format_args!("{name}, {grid:?}")))
    }

    /// Compiles a file and loads it.
    pub(crate) fn load(&self, source: &Source, definitions: &[String]) -> Result<Module, GpuError> {
        let driver = self.stream.driver();
        let definitions = [&[warp_definition(driver.properties().warp)], definitions].concat();
        let Source { name, text } = *source;
        let image = driver.compile(SourceText {
            name,
            text,
            architecture: architecture(text),
            definitions: &definitions,
        })?;
        // SAFETY: a whole image made for this device, which is current.
        let module = unsafe { driver.load(&image) };
        module.map_err(|error| error.during(format_args!("the kernels of {name}.cu")))
    }
}

/// The suffix of a type in kernel names.
pub(crate) fn suffix(dtype: DType) -> Result<&'static str, GpuError> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::BF16 => Ok("bf16"),
        DType::F16 => Ok("f16"),
        DType::F64 => Err(GpuError::Unsupported(
            "f64 is for finite differences on the CPU: GPUs compute in f32, bf16 and f16".into(),
        )),
        DType::U32 | DType::U8 => Err(GpuError::Unsupported("token ids and bytes are not numbers".into())),
    }
}

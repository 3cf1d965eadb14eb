//! The GPU backend: every operation is enqueued on one stream, and only reads wait.
//!
//! It is written once over a small seam to the driver (`driver.rs`) and to a library of matrix products
//! (`products/library.rs`); [`CUDA`] and [`HIP`] implement both. Everything that is not a product, or on NVIDIA attention, is a
//! kernel of `kernels/`, compiled at run time. Libraries are loaded at run time too; if one is missing,
//! [`Platform::backend`] returns an error that names it.

mod activation;
mod attention;
mod backend;
mod cache;
mod cached_attention;
mod column_sum;
mod compile_all;
mod cuda;
mod driver;
mod elementwise;
mod embedding;
mod error;
mod float8;
mod gpu;
mod hip;
mod host_waits;
mod image_cache;
mod kernels;
mod launcher;
mod library;
mod loss;
mod memory;
mod norm;
mod notice_handler;
mod optimizer;
mod pinned;
mod platform;
mod products;
mod quantize;
mod readback;
mod replay;
mod rotary;
mod side_stream;
mod split_norm;
mod staging;
mod stream;

pub use cuda::CUDA;
pub use error::GpuError;
pub use gpu::{Gpu, PowerMeter, Sensors};
pub use hip::HIP;
pub use library::Report;
pub use platform::Platform;

use std::rc::Rc;

use kintsugi_tensor::{Buffer, Category, DType, Device, Memory};

use attention::Attentions;
use driver::DeviceRange;
use kernels::Kernels;
use launcher::Launcher;
use memory::DeviceSlab;
use notice_handler::NoticeHandler;
use products::Products;
use readback::ReadbackPool;
use replay::Replay;
use staging::Staging;
use stream::Stream;

/// A rank on a GPU.
#[derive(Debug)]
pub struct GpuBackend {
    memory: Rc<dyn Memory>,
    stream: Stream,
    staging: Staging,
    readbacks: ReadbackPool,
    replay: Rc<Replay>,
    launcher: Launcher,
    products: Products,
    attentions: Attentions,
    notices: NoticeHandler,
    _workspace: Buffer,
}

impl GpuBackend {
    /// See [`Platform::backend`].
    pub(crate) fn new(
        platform: &Platform,
        device: usize,
        capacity: u64,
        deterministic: bool,
    ) -> Result<Self, GpuError> {
        let Device::Gpu { workspace: bytes, attention } = platform.device(deterministic) else {
            unreachable!("a platform's devices are GPUs");
        };
        let stream = Stream::new((platform.open)(device)?)?;
        let slab = Rc::new(DeviceSlab::new(&stream, capacity)?);
        let memory: Rc<dyn Memory> = Rc::clone(&slab) as Rc<dyn Memory>;
        let elements = bytes as usize / DType::F64.bytes();
        let workspace = Buffer::new(&memory, elements, DType::F64, Category::Workspace);
        let scratch = DeviceRange { address: workspace.address(), bytes };
        let kernels = Kernels::new(&stream);
        let notices = NoticeHandler::default();
        let products = Products::new(&stream, &kernels, scratch, &notices)?;
        products.tune(!deterministic);
        Ok(GpuBackend {
            products,
            attentions: Attentions::new(&stream, &kernels, deterministic, attention, &notices)?,
            launcher: Launcher::new(&stream, kernels, scratch),
            staging: Staging::new(&stream)?,
            readbacks: ReadbackPool::new(&stream),
            replay: Rc::new(Replay::new(&stream, &slab)),
            notices,
            memory,
            stream,
            _workspace: workspace,
        })
    }

    /// The same backend for short work, such as generating from a prompt of a new length. A product that training has
    /// not tuned is then tuned in milliseconds instead of about a second, while the GPU is below its power cap.
    #[must_use]
    pub fn for_short_work(self) -> Self {
        self.products.tune_in_bursts();
        self
    }

    /// The same backend without the tuning results on disk: it tunes its own products and writes no results.
    #[must_use]
    pub fn without_tuning_cache(self) -> Self {
        self.products.ignore_tuning_cache();
        self
    }

    /// The same backend with our own attention kernels, as if cuDNN were missing. It allocates the same memory as with
    /// cuDNN.
    #[must_use]
    pub fn without_cudnn(mut self) -> Self {
        self.attentions.disable_cudnn();
        self
    }

    /// The same backend without our attention kernels for compute capability 9.0, so that cuDNN's run if they support
    /// the shape.
    #[must_use]
    pub fn without_hopper_attention(mut self) -> Self {
        self.attentions.disable_hopper();
        self
    }
}

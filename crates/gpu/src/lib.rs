//! The CUDA backend: every operation is enqueued on one stream, and only reads wait.
//!
//! Matrix products use cuBLASLt or our own kernels, attention uses cuDNN or our own kernels, and everything else is a
//! kernel of `kernels/`, compiled at run time. Libraries are loaded at run time too; if one is missing,
//! [`CudaBackend::new`] returns an error that names it.

pub mod libraries;

mod activation;
mod attention;
mod backend;
mod cache;
mod cached_attention;
mod column_sum;
mod elementwise;
mod embedding;
mod error;
mod gpu;
mod host_waits;
mod kernels;
mod launcher;
mod loss;
mod matmul;
mod memory;
mod norm;
mod notice_handler;
mod nvrtc;
mod optimizer;
mod pinned;
mod quantize;
mod readback;
mod replay;
mod rotary;
mod side_stream;
mod staging;
mod stream;
mod tensor_map;

pub use error::CudaError;
pub use gpu::{Gpu, NvmlDevice};

use std::rc::Rc;

use attention::Attentions;
use kernels::Kernels;
use launcher::Launcher;
use matmul::Products;
use memory::DeviceSlab;
use notice_handler::NoticeHandler;
use readback::ReadbackPool;
use replay::Replay;
use staging::Staging;
use stream::{DeviceRange, Stream};

use kintsugi_tensor::{Buffer, Category, DType, Device, Memory};

/// A rank on a CUDA device.
#[derive(Debug)]
pub struct CudaBackend {
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

impl CudaBackend {
    /// A backend on device number `device` that allocates `capacity` bytes of its memory at once, workspace included.
    ///
    /// With `deterministic` the same inputs give the same bits. The backward of attention is then slower, and matrix
    /// products use cuBLASLt's first choice instead of the algorithm that measures fastest.
    pub fn new(device: usize, capacity: u64, deterministic: bool) -> Result<Self, CudaError> {
        let stream = Stream::new(device)?;
        let slab = Rc::new(DeviceSlab::new(&stream, capacity)?);
        let memory: Rc<dyn Memory> = Rc::clone(&slab) as Rc<dyn Memory>;
        let bytes = Device::cuda(deterministic).workspace_bytes();
        let elements = bytes as usize / DType::F64.bytes();
        let workspace = Buffer::new(&memory, elements, DType::F64, Category::Workspace);
        let scratch = DeviceRange { address: workspace.address(), bytes };
        let kernels = Kernels::new(&stream);
        let notices = NoticeHandler::default();
        let products = Products::new(&stream, &kernels, scratch, &notices)?;
        products.tune(!deterministic);
        Ok(CudaBackend {
            products,
            attentions: Attentions::new(&stream, &kernels, deterministic, &notices)?,
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

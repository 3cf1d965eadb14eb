//! The CUDA backend: every operation is enqueued on one stream, and only reads wait.
//!
//! Matrix products are cuBLASLt's or our own, attention is cuDNN's or our own, everything else is a kernel of `kernels/`,
//! compiled at run time. Libraries are loaded at run time too: where one is missing, [`CudaBackend::new`] says so.

pub mod libraries;

mod activation;
mod attention;
mod backend;
mod cache;
mod cached_attention;
mod card;
mod column_sum;
mod elementwise;
mod embedding;
mod error;
mod kernels;
mod landing;
mod launcher;
mod listener;
mod loss;
mod matmul;
mod memory;
mod norm;
mod nvrtc;
mod optimizer;
mod pinned;
mod quantize;
mod replay;
mod rotary;
mod staging;
mod stream;
mod tensor_map;

pub use card::{Card, Meter};
pub use error::CudaError;

pub(crate) use attention::{Pass, asks_cudnn, workspace_bytes as attention_workspace_bytes};
pub(crate) use stream::Moment;

use std::rc::Rc;

use attention::Attentions;
use kernels::Kernels;
use landing::Landings;
use launcher::Launcher;
use listener::Listener;
use matmul::Products;
use memory::DeviceSlab;
use replay::Replay;
use staging::Staging;
use stream::{DeviceRange, Stream};

use crate::{Buffer, Category, DType, Device, Memory};

/// Workspace of the stream. 32 MiB is what NVIDIA advises for cuBLASLt on Hopper; our kernels and the libraries use
/// it in turn, which the order of the stream makes safe.
pub const WORKSPACE_BYTES: u64 = 32 << 20;

/// A rank on a CUDA device.
#[derive(Debug)]
pub struct CudaBackend {
    memory: Rc<dyn Memory>,
    stream: Stream,
    staging: Staging,
    landings: Landings,
    replay: Replay,
    launcher: Launcher,
    products: Products,
    attentions: Attentions,
    listener: Listener,
    _workspace: Buffer,
}

impl CudaBackend {
    /// A backend on device number `device` that takes `capacity` bytes of its memory at once, workspace included.
    ///
    /// With `deterministic` the same inputs give the same bits: attention's backward is then slower, and matrix
    /// products run what cuBLASLt thinks best instead of what proves fastest.
    pub fn new(device: usize, capacity: u64, deterministic: bool) -> Result<Self, CudaError> {
        let stream = Stream::new(device)?;
        let slab = Rc::new(DeviceSlab::new(&stream, capacity)?);
        let memory: Rc<dyn Memory> = Rc::clone(&slab) as Rc<dyn Memory>;
        let bytes = Device::Cuda { deterministic }.workspace_bytes();
        let elements = bytes as usize / DType::F64.bytes();
        let workspace = Buffer::new(&memory, elements, DType::F64, Category::Workspace);
        let scratch = DeviceRange { address: workspace.address(), bytes };
        let kernels = Kernels::new(&stream);
        let listener = Listener::default();
        let products = Products::new(&stream, &kernels, scratch, &listener)?;
        products.tune(!deterministic);
        Ok(CudaBackend {
            products,
            attentions: Attentions::new(&stream, &kernels, deterministic, &listener)?,
            launcher: Launcher::new(&stream, kernels, scratch),
            staging: Staging::new(&stream)?,
            landings: Landings::new(&stream),
            replay: Replay::new(&stream, &slab),
            listener,
            memory,
            stream,
            _workspace: workspace,
        })
    }

    /// The same backend for work that is soon over, as a prompt, whose length may be no other's: products that are not
    /// known from training are then chosen in milliseconds and not in a second each, on a card that is not at its power cap.
    #[must_use]
    pub fn for_short_work(self) -> Self {
        self.products.tune_in_bursts();
        self
    }

    /// The same backend without choices of products that were kept on disk: it makes its own, and keeps none.
    #[must_use]
    pub fn without_kept_products(self) -> Self {
        self.products.forget_kept();
        self
    }

    /// The same backend with attention by our own kernels, as where cuDNN is missing. Memory is asked for as with it.
    #[must_use]
    pub fn without_cudnn(mut self) -> Self {
        self.attentions.forget_cudnn();
        self
    }

    /// The same backend without attention of ours that is for compute capability 9.0 alone, so that it is cuDNN's where
    /// it can be.
    #[must_use]
    pub fn without_hopper_attention(mut self) -> Self {
        self.attentions.forget_hopper();
        self
    }
}

//! What is NVIDIA's own: the driver, NVRTC, cuBLASLt, cuDNN and NVML, and the kernels for Hopper.

mod cublaslt;
pub(crate) mod cudnn;
mod driver;
pub(crate) mod hopper_attention;
pub(crate) mod hopper_product;
mod libraries;
mod nvml;
mod nvrtc;
mod tensor_map;

use kintsugi_tensor::Device;

use crate::Platform;
use driver::CudaDriver;

/// NVIDIA GPUs.
pub static CUDA: Platform = Platform {
    name: "CUDA",
    devices: libraries::devices,
    open: CudaDriver::open,
    libraries: libraries::reports,
    device: Device::cuda,
};

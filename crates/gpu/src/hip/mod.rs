//! What is AMD's own: HIP's run time, hiprtc, hipBLASLt, rocBLAS and ROCm SMI.
//!
//! Nothing here has run on a GPU yet: docs/amd.md says what was executed, and how.

mod api;
mod driver;
#[cfg(test)]
mod headers;
mod hipblaslt;
mod hiprtc;
mod libraries;
mod power;
mod rocblas;

use kintsugi_tensor::Device;

use crate::Platform;
use crate::error::GpuError;
use crate::library::Report;
use driver::HipDriver;

/// AMD GPUs.
pub static HIP: Platform =
    Platform { name: "HIP", devices, open: HipDriver::open, libraries: reports, device };

fn devices() -> Result<usize, GpuError> {
    api::hip()?.devices()
}

/// Our own attention needs the same scratch either way.
fn device(_deterministic: bool) -> Device {
    Device::hip()
}

fn reports() -> Vec<Report> {
    let hip = || api::hip().and_then(api::Hip::version).ok();
    let hiprtc = || api::hiprtc().ok().map(hiprtc::version);
    let mut compiler = libraries::HIPRTC.report(hiprtc);
    // Up to ROCm 5 it is a part of the run time.
    compiler.version = hiprtc();
    vec![
        libraries::HIP.report(hip),
        compiler,
        libraries::ROCBLAS.report(rocblas::version),
        libraries::HIPBLASLT.report(hipblaslt::version),
        libraries::ROCM_SMI.report(power::version),
    ]
}

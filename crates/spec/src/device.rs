//! A device and how fast it is: peaks from data sheets, and the few figures that say how much of them is reached.

use serde::{Deserialize, Serialize};

/// One device (GPU, GCD or CPU rank) as the planner sees it.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceSpec {
    /// Product name.
    pub name: String,
    /// What kind of device it is, which decides its workspace and how operations are lowered; `None` where it is whatever
    /// the ranks run on here.
    pub kind: Option<Hardware>,
    /// Memory in bytes; `None` where it is whatever the machine has.
    pub memory: Option<u64>,
    /// Peak of the 16-bit matrix units, FLOP/s.
    pub peak_16bit: Option<f64>,
    /// Peak in fp32, FLOP/s.
    pub peak_fp32: Option<f64>,
    /// Memory bandwidth, bytes/s.
    pub memory_bandwidth: Option<f64>,
    /// Multiprocessors (compute units, cores) that share the tiles of a product.
    pub units: Option<usize>,
    /// The share of the peak that the tiles of a large product reach, for as long as a training runs.
    pub matmul: Option<f64>,
    /// Terms of a product's sums that would take as long as beginning and ending a tile.
    pub ramp: Option<f64>,
    /// The share of the memory bandwidth that a kernel reaches which only moves bytes.
    pub streaming: Option<f64>,
    /// Seconds from the end of one kernel to the beginning of the next.
    pub launch: Option<f64>,
    /// Watts of a rank that has nothing to do.
    pub power_idle: Option<f64>,
    /// Watts of a rank that computes without a pause.
    pub power_max: Option<f64>,
    /// Watts of a rank that only sends, receives or waits for others.
    pub power_links: Option<f64>,
    /// Operations per second of what is fused behind a product (GELU, its derivative, biases); `None` where it is free.
    pub epilogue: Option<f64>,
    /// Rates of flash attention.
    pub attention: Vec<AttentionPoint>,
    /// Rates of matrix products as they were measured; they correct the model near them.
    pub products: Vec<ProductPoint>,
    /// Kernels that only move bytes, as they were measured; the others reach the streaming share of the bandwidth.
    pub kernels: Vec<KernelPoint>,
}

/// A kind of device. GPUs of all makers run the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hardware {
    /// A rank is one or more threads of a CPU.
    Cpu,
    /// A rank is a GPU, or a GCD.
    Gpu,
}

/// How fast a kernel is that only moves bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelPoint {
    /// The operation.
    pub name: String,
    /// Bytes per second, each counted once that must be read or written.
    pub bandwidth: f64,
}

/// How fast flash attention is for one shape, with only the causal half of the scores counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionPoint {
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens of a sample.
    pub sequence: usize,
    /// Whether it is of 32-bit numbers, as opposed to 16-bit ones.
    #[serde(default)]
    pub fp32: bool,
    /// FLOP/s of the forward.
    pub forward: f64,
    /// FLOP/s of the backward (five products).
    pub backward: f64,
}

/// How fast a matrix product was.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductPoint {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Whether it is a product of 32-bit numbers, as opposed to 16-bit ones.
    #[serde(default)]
    pub fp32: bool,
    /// FLOP/s, run back to back for seconds.
    pub flops: f64,
    /// FLOP/s of a single run on a cool device, for information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<f64>,
}

//! A device and its speed: peaks from data sheets, and the shares of them that are reached.

use serde::{Deserialize, Serialize};

/// One device (GPU, GCD or CPU rank) as the planner describes it.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceSpec {
    /// Product name.
    pub name: String,
    /// The kind of device, which decides its workspace and how operations are lowered; `None` for the kind that the
    /// ranks run on.
    pub kind: Option<Hardware>,
    /// Memory in bytes; `None` for the memory of this machine.
    pub memory: Option<u64>,
    /// The share of the memory that plans leave free: context, communication library, fragmentation. `None` for
    /// [`GPU_HEADROOM`] on a GPU and nothing on a CPU.
    pub headroom: Option<f64>,
    /// Peak of the 16-bit matrix units, FLOP/s.
    pub peak_16bit: Option<f64>,
    /// Peak in fp32, FLOP/s.
    pub peak_fp32: Option<f64>,
    /// Memory bandwidth, bytes/s.
    pub memory_bandwidth: Option<f64>,
    /// Multiprocessors (compute units, cores) that share the tiles of a product.
    pub units: Option<usize>,
    /// The share of the peak that the tiles of a large product reach when sustained, as in training.
    pub matmul: Option<f64>,
    /// How much faster a product of less than 80 µs is than one of more than 1.5 ms, after which the power limit has lowered the
    /// clock; `None` for as fast.
    pub boost: Option<f64>,
    /// How much longer a 16-bit product takes if its columns or its terms are no multiple of 8; `None` for as long.
    pub misaligned: Option<f64>,
    /// The start and end of a tile cost as much as this many terms of a product's sums.
    pub ramp: Option<f64>,
    /// The share of the memory bandwidth that a memory-bound kernel reaches.
    pub streaming: Option<f64>,
    /// Seconds from the end of one kernel to the start of the next.
    pub launch: Option<f64>,
    /// Watts of an idle rank.
    pub power_idle: Option<f64>,
    /// Watts of a rank that computes without a pause.
    pub power_max: Option<f64>,
    /// Watts of a rank that only sends, receives or waits for others.
    pub power_links: Option<f64>,
    /// Operations per second of a product's epilogue (GELU, its derivative, biases); `None` if it is free.
    pub epilogue: Option<f64>,
    /// Rates of flash attention.
    pub attention: Vec<AttentionPoint>,
    /// Measured rates of matrix products. They correct the model for similar products.
    pub products: Vec<ProductPoint>,
    /// Measured bandwidths of memory-bound kernels. Other kernels reach the streaming share of the bandwidth.
    pub kernels: Vec<KernelPoint>,
}

/// The headroom of a GPU that plans for this engine leave, as a share of its memory. The engine takes one slab of a planned
/// size, so there is no fragmentation; the rest is for the context and the communication library.
pub const GPU_HEADROOM: f64 = 0.05;

impl DeviceSpec {
    /// The bytes that plans may use, if the memory is known: all but the headroom.
    pub fn planned_memory(&self) -> Option<u64> {
        let default = if self.kind == Some(Hardware::Cpu) { 0.0 } else { GPU_HEADROOM };
        let headroom = self.headroom.unwrap_or(default);
        self.memory.map(|bytes| (bytes as f64 * (1.0 - headroom)) as u64)
    }
}

/// A kind of device. GPUs of all vendors count as one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hardware {
    /// A rank is one or more threads of a CPU.
    Cpu,
    /// A rank is a GPU, or a GCD.
    Gpu,
}

/// The speed of a memory-bound kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelPoint {
    /// The operation.
    pub name: String,
    /// Whether it was measured in fp32; otherwise some of its numbers have 16 bits.
    #[serde(default)]
    pub fp32: bool,
    /// Bytes per second. Every byte that must be read or written counts once.
    pub bandwidth: f64,
}

/// The speed of flash attention for one shape. Only the causal half of the scores is counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionPoint {
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens of a sample.
    pub sequence: usize,
    /// Whether it is fp32; otherwise 16 bits.
    #[serde(default)]
    pub fp32: bool,
    /// FLOP/s of the forward.
    pub forward: f64,
    /// FLOP/s of the backward (five products).
    pub backward: f64,
}

/// The measured speed of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductPoint {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Whether it is fp32; otherwise 16 bits.
    #[serde(default)]
    pub fp32: bool,
    /// FLOP/s, sustained over seconds.
    pub flops: f64,
    /// FLOP/s of a single run on a cool device, for information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<f64>,
}

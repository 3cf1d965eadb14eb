//! A device and its speed: peaks from data sheets, and the shares of them that are reached.

use serde::{Deserialize, Serialize};

use crate::key::spec_table;

spec_table! {
    /// One device (GPU, GCD or CPU rank) as the planner describes it.
    pub struct DeviceSpec {
        /// the name in tables and messages
        name: String, else "the preset's";
        /// `"cpu"` or `"gpu"`: whose workspace and kernels memory is predicted with; without it those of `run.device`
        kind: Option<Hardware>, else "the preset's";
        /// bytes, which decide `fits`; without it what this machine has
        memory: Option<u64>, else "the preset's";
        /// 0 to 0.9: the share of the memory that plans and searches leave free ([headroom](memory.md#headroom))
        headroom: Option<f64>, else "0.05 on a GPU, 0 on a CPU, 0.08 with a framework";
        /// FLOP/s of the data sheet in bf16 and fp16
        peak_16bit: Option<f64>, else "`peak_fp32`";
        /// FLOP/s of the data sheet in fp8
        peak_8bit: Option<f64>, else "`peak_16bit`";
        /// FLOP/s of the data sheet in fp32
        peak_fp32: Option<f64>, else "required";
        /// bytes/s of the data sheet
        memory_bandwidth: Option<f64>, else "required";
        /// multiprocessors that process the tiles of a product
        units: Option<usize>, else "1";
        /// share of the peak that a large product reaches when sustained, as in training
        matmul: Option<f64>, else "0.8";
        /// the same for a product in 8 bits
        matmul_8bit: Option<f64>, else "`matmul`";
        /// how much faster a product of less than 80 µs is than one of more than 1.5 ms
        boost: Option<f64>, else "1";
        /// how much longer a 16-bit product takes if its columns or terms are no multiple of 8
        misaligned: Option<f64>, else "1";
        /// cost of the beginning and end of a tile, in terms of a product's sums
        ramp: Option<f64>, else "128";
        /// share of the memory bandwidth that a memory-bound kernel reaches
        streaming: Option<f64>, else "0.8";
        /// seconds from one kernel to the next
        launch: Option<f64>, else "4e-6";
        /// watts of an idle rank
        power_idle: Option<f64>, else "no energy";
        /// watts of a rank that runs kernels
        power_max: Option<f64>, else "no energy";
        /// watts to which the device is capped: [products and attention](cost-model.md#a-power-cap) get slower
        power_cap: Option<f64>, else "`power_max`";
        /// watts of a rank that waits for links or other ranks
        power_links: Option<f64>, else "`power_idle`";
        /// operations/s of the epilogue of a product: GELU, its derivative, biases
        epilogue: Option<f64>, else "free";
        /// list of `{ head_dim, sequence, fp32, forward, backward }`: FLOP/s of flash attention, counting the causal half
        attention: Vec<AttentionPoint>, else "0.45 and 0.35 of the peak";
        /// the same for this engine's own kernels
        portable_attention: Vec<AttentionPoint>, else "as `attention`";
        /// list of `{ m, n, k, fp32, flops, burst }`: measured products
        products: Vec<ProductPoint>, else "none";
        /// list of `{ name, bandwidth }`: measured memory-bound kernels
        kernels: Vec<KernelPoint>, else "`streaming`";
    }
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

    /// The rate of products and attention under the power cap, as a share of that at `power_max`. Power grows as the square of
    /// the clock: the clock falls, and the voltage with it.
    pub fn capped_rate(&self) -> f64 {
        let share = self.power_cap.zip(self.power_max).map_or(1.0, |(cap, most)| cap / most);
        share.min(1.0).sqrt()
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

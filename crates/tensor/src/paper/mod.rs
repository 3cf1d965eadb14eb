//! The paper backend: shapes without data. It records which kernels a device would run.
//!
//! A paper backend always stands for a device. It takes the same workspace and assigns the same addresses, so its
//! memory usage equals the device's exactly.

mod cost;

pub use cost::GELU;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::device::asks_library;
use crate::ops::{
    Attention, AttentionBackward, AttentionShape, CachedAttention, CastToFloat8, Check, ColumnSum,
    CopyColumns, CrossEntropy, Dequantize, Embedding, EmbeddingBackward, Gated, GatedBackward, Linear,
    LinearBackwardInput, LinearBackwardWeight, LossStatistics, Momentum, Norm, NormBackward, Normalize,
    Positions, PositionsBackward, Quantize, Requantize, Residual, Rotary, RowDots, ScaledSum,
    SlicedAttention, SlicedAttentionBackward, SplitNorm, SplitNormBackward, SumsOfSquares, Update,
    UpdateControl,
};
use crate::{Arena, Backend, Buffer, Category, DType, Device, Memory, View};

/// One kernel that the device would run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kernel {
    /// The operation.
    pub name: &'static str,
    /// Floating-point operations that are needed: causal attention counts half the square.
    pub flops: u64,
    /// Bytes that must be read or written at least once.
    pub bytes: u64,
    /// The kind of kernel, which decides what bounds its speed.
    pub kind: KernelKind,
}

/// What bounds the speed of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelKind {
    /// The bytes it moves.
    Memory {
        /// Whether no number that it reads or writes has 16 bits.
        fp32: bool,
    },
    /// A matrix product: `m × n` sums of `k` terms.
    Product {
        /// Rows of the result.
        m: usize,
        /// Columns of the result.
        n: usize,
        /// Terms of each sum.
        k: usize,
        /// Type of the factors.
        dtype: DType,
    },
    /// Causal attention.
    Attention {
        /// Its shape.
        shape: AttentionShape,
        /// Type of the factors.
        dtype: DType,
        /// Flash attention; otherwise plain attention with the scores in memory.
        flash: bool,
        /// The backward pass; otherwise the forward.
        backward: bool,
    },
}

/// Totals over kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of kernels.
    pub kernels: u64,
    /// Their floating-point operations.
    pub flops: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A rank on paper.
#[derive(Debug)]
pub struct Paper {
    device: Device,
    memory: Rc<dyn Memory>,
    totals: Cell<Totals>,
    trace: Option<RefCell<Vec<Kernel>>>,
    _workspace: Buffer,
}

impl Paper {
    /// A paper backend of `device`, with the device's workspace allocated.
    pub fn new(device: Device) -> Self {
        Paper::over(device, Rc::new(Arena::on_paper()))
    }

    /// The same with another memory than an arena.
    pub fn over(device: Device, memory: Rc<dyn Memory>) -> Self {
        let elements = device.workspace_bytes() as usize / DType::F64.bytes();
        let workspace = Buffer::new(&memory, elements, DType::F64, Category::Workspace);
        Paper { device, memory, totals: Cell::default(), trace: None, _workspace: workspace }
    }

    /// Also records every kernel, not only the totals.
    #[must_use]
    pub fn tracing(self) -> Self {
        Paper { trace: Some(RefCell::default()), ..self }
    }

    /// The totals over the kernels so far.
    pub fn totals(&self) -> Totals {
        self.totals.get()
    }

    /// The recorded kernels, oldest first, and clears the record. Empty without [`Paper::tracing`].
    pub fn take_trace(&self) -> Vec<Kernel> {
        self.trace.as_ref().map(RefCell::take).unwrap_or_default()
    }

    fn record(&self, kernel: Kernel) {
        let mut totals = self.totals.get();
        totals.kernels += 1;
        // The totals of the largest possible plans overflow 64 bits.
        totals.flops = totals.flops.saturating_add(kernel.flops);
        totals.bytes = totals.bytes.saturating_add(kernel.bytes);
        self.totals.set(totals);
        if let Some(trace) = &self.trace {
            trace.borrow_mut().push(kernel);
        }
    }

    /// Allocates and releases the scratch that attention needs beside the workspace, as the device does.
    fn take_scratch(&self, shape: AttentionShape, dtype: DType, asked: bool, backward: bool) {
        let Device::Gpu { attention, .. } = self.device else { return };
        let bytes = attention.workspace(shape, dtype, asked, backward).bytes();
        if bytes > 0 {
            self.memory.release(self.memory.allocate(bytes, Category::Workspace));
        }
    }
}

/// Operations that are checked and recorded.
macro_rules! recorded {
    ($($name:ident: $op:ident),+ $(,)?) => {
        $(fn $name(&self, op: $op) {
            op.check();
            self.record(cost::$name(&op));
        })+
    };
}

impl Backend for Paper {
    fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    fn allocate(&self, len: usize, dtype: DType, category: Category) -> Buffer {
        Buffer::new(&self.memory, len, dtype, category)
    }

    fn synchronize(&self) {}

    fn upload_tokens(&self, tokens: &[u32], to: View) {
        assert_eq!(tokens.len(), to.len(), "an upload of another length");
        self.record(cost::moved("upload", 0, &[to]));
    }

    fn upload(&self, values: &[f32], to: View) {
        assert_eq!(values.len(), to.len(), "an upload of another length");
        self.record(cost::moved("upload", 0, &[to]));
    }

    fn read(&self, from: View) -> Vec<f32> {
        vec![0.0; from.len()]
    }

    fn upload_bytes(&self, _from: &[u8], _to: View) {}

    fn download(&self, _from: View, _to: &mut [u8]) {}

    fn read_scalar(&self, _from: View, _index: usize) -> f64 {
        0.0
    }

    fn fill(&self, _value: f64, to: View) {
        self.record(cost::moved("fill", 0, &[to]));
    }

    fn copy(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a copy between different lengths");
        self.record(cost::moved("copy", 0, &[from, to]));
    }

    fn add(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "an addition of different lengths");
        self.record(cost::moved("add", to.len(), &[from, to, to]));
    }

    fn scale(&self, _factor: f64, x: View) {
        self.record(cost::moved("scale", x.len(), &[x, x]));
    }

    fn gelu(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a GELU between different lengths");
        self.record(cost::moved("gelu", cost::GELU * from.len(), &[from, to]));
    }

    fn exact_gelu(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a GELU between different lengths");
        self.record(cost::moved("exact gelu", cost::EXACT_GELU * from.len(), &[from, to]));
    }

    fn exact_gelu_backward(&self, from: View, d: View) {
        assert_eq!(from.len(), d.len(), "a GELU between different lengths");
        let flops = cost::EXACT_GELU_DERIVATIVE * from.len();
        self.record(cost::moved("exact gelu backward", flops, &[from, d, d]));
    }

    fn attention(&self, op: Attention) {
        op.check();
        let asked = asks_library(op.shape, &op.saved, op.starts);
        self.take_scratch(op.shape, op.qkv.dtype(), asked, false);
        self.record(cost::attention(&op));
    }

    fn attention_backward(&self, op: AttentionBackward) {
        op.check();
        let asked = asks_library(op.shape, &op.saved, op.starts);
        self.take_scratch(op.shape, op.qkv.dtype(), asked, true);
        self.record(cost::attention_backward(&op));
    }

    fn sliced_attention(&self, op: SlicedAttention) {
        op.check();
        self.record(cost::sliced_attention(&op));
    }

    fn sliced_attention_backward(&self, op: SlicedAttentionBackward) {
        op.check();
        self.take_scratch(op.shape, op.qkv.dtype(), false, true);
        self.record(cost::sliced_attention_backward(&op));
    }

    recorded! {
        linear: Linear,
        linear_backward_input: LinearBackwardInput,
        linear_backward_weight: LinearBackwardWeight,
        residual: Residual,
        column_sum: ColumnSum,
        copy_columns: CopyColumns,
        norm: Norm,
        norm_backward: NormBackward,
        row_dots: RowDots,
        split_norm: SplitNorm,
        split_norm_backward: SplitNormBackward,
        cached_attention: CachedAttention,
        rotary: Rotary,
        gated: Gated,
        gated_backward: GatedBackward,
        embedding: Embedding,
        embedding_backward: EmbeddingBackward,
        positions: Positions,
        positions_backward: PositionsBackward,
        loss_statistics: LossStatistics,
        cross_entropy: CrossEntropy,
        quantize: Quantize,
        dequantize: Dequantize,
        requantize: Requantize,
        cast_to_float8: CastToFloat8,
        sums_of_squares: SumsOfSquares,
        update_control: UpdateControl,
        update: Update,
        momentum: Momentum,
        normalize: Normalize,
        scaled_sum: ScaledSum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuBackend;
    use crate::cpu::memory::Slab;
    use crate::ops::{AttentionSaved, GateFunction, Scores};

    const DEVICE: Device = Device::Cpu { threads: 3 };

    /// Some allocations and an operation. Returns the address of the last buffer.
    fn run_linear(backend: &dyn Backend) -> u64 {
        let [x, weight, out] =
            [12, 20, 15].map(|len| backend.allocate(len, DType::F32, Category::Activations));
        backend.linear(Linear {
            x: x.view(),
            weight: weight.view(),
            bias: None,
            gelu: None,
            residual: None,
            out: out.view(),
            rows: 3,
            inputs: 4,
            outputs: 5,
            float8: None,
        });
        drop(weight);
        backend.allocate(40, DType::F16, Category::Weights).address()
    }

    #[test]
    fn paper_predicts_the_memory_of_its_device() {
        let paper = Paper::new(DEVICE);
        let predicted = run_linear(&paper);
        let slab = Slab::new(paper.memory().reserved()).unwrap();
        let cpu = CpuBackend::new(Rc::new(slab), 3);
        let base = cpu.allocate(1, DType::F32, Category::Weights).address() - DEVICE.workspace_bytes();
        assert_eq!(run_linear(&cpu) - base, predicted);
        assert_eq!(cpu.memory().peak(), paper.memory().peak());
    }

    #[test]
    fn kernels_are_counted_and_traced_on_request() {
        let paper = Paper::new(DEVICE).tracing();
        run_linear(&paper);
        let kind = KernelKind::Product { m: 3, n: 5, k: 4, dtype: DType::F32 };
        let linear = Kernel { name: "linear", flops: 2 * 3 * 4 * 5, bytes: 4 * (12 + 20 + 15), kind };
        assert_eq!(paper.take_trace(), [linear]);
        assert_eq!(paper.totals(), Totals { kernels: 1, flops: linear.flops, bytes: linear.bytes });
        assert_eq!(paper.take_trace(), []);
    }

    #[test]
    fn causal_attention_counts_the_pairs_that_exist() {
        let paper = Paper::new(DEVICE);
        let shape = AttentionShape {
            batch: 2,
            sequence: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            scores: Scores::PLAIN,
        };
        let [qkv, out, sums] =
            [6 * 64, 6 * 32, 24].map(|len| paper.allocate(len, DType::F32, Category::Activations));
        let saved = AttentionSaved::LogSumExp(sums.view());
        paper.attention(Attention { qkv: qkv.view(), starts: None, out: out.view(), saved, shape });
        // 6 pairs of 3 tokens, 8 heads, two products of 8 multiplications and additions.
        assert_eq!(paper.totals().flops, 6 * 8 * 2 * 8 * 2);
    }

    #[test]
    fn attention_on_a_gpu_allocates_and_releases_scratch() {
        let paper = Paper::new(Device::cuda(true));
        let shape = AttentionShape {
            batch: 2,
            sequence: 128,
            heads: 2,
            kv_heads: 2,
            head_dim: 64,
            scores: Scores::PLAIN,
        };
        let (rows, heads) = (shape.rows(), shape.heads);
        let [qkv, out] =
            [rows * 384, rows * 128].map(|len| paper.allocate(len, DType::BF16, Category::Activations));
        let sums = paper.allocate(rows * heads, DType::F32, Category::Activations);
        let (saved, before) = (AttentionSaved::LogSumExp(sums.view()), paper.memory().peak().total());
        let (qkv, out) = (qkv.view(), out.view());
        let op =
            AttentionBackward { qkv, starts: None, out, dout: out, saved, dqkv: qkv, dbias: None, shape };
        paper.attention_backward(op);
        let peak = paper.memory().peak();
        assert!(peak.total() - before >= 2 * shape.score_elements() as u64, "the scores' gradients, in bf16");
        assert_eq!(peak.get(Category::Activations), before - Device::cuda(true).workspace_bytes());
        let next = paper.allocate(1, DType::F32, Category::Weights).address();
        assert_eq!(next, before, "the scratch was released");

        let masked = Paper::new(Device::cuda(true));
        let starts = paper.allocate(rows, DType::U32, Category::Activations);
        masked.attention_backward(AttentionBackward { starts: Some(starts.view()), ..op });
        let dots = masked.memory().peak().total() - Device::cuda(true).workspace_bytes();
        assert_eq!(dots, 4 * (rows * heads) as u64, "our own kernels run, and need no more");
    }

    #[test]
    #[should_panic(expected = "x has the wrong number of elements")]
    fn shapes_are_checked() {
        let paper = Paper::new(DEVICE);
        let buffer = paper.allocate(4, DType::F32, Category::Activations);
        let view = buffer.view();
        paper.gated(Gated { x: view, out: view, gate: GateFunction::Silu, rows: 1, width: 4 });
    }
}

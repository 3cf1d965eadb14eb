//! The trait that the layers are written against.

use std::rc::Rc;

use crate::memory::Memory;
use crate::ops::{
    Attention, AttentionBackward, CachedAttention, CastToFloat8, ColumnSum, CopyColumns, CrossEntropy,
    Dequantize, Embedding, EmbeddingBackward, Gated, GatedBackward, Linear, LinearBackwardInput,
    LinearBackwardWeight, LossStatistics, Momentum, Norm, NormBackward, Normalize, Positions,
    PositionsBackward, Quantize, Requantize, Residual, Rotary, RowDots, ScaledSum, SlicedAttention,
    SlicedAttentionBackward, SplitNorm, SplitNormBackward, Squares, SumsOfSquares, Update, UpdateControl,
};
use crate::{
    Buffer, Category, DType, Fetch, Launch, Mark, Notice, ReplayOutcome, ReplayRequest, SideStream, View,
};

/// One rank's device: its memory and the operations on it.
///
/// Operations are enqueued in order. Only [`Backend::read`], [`Backend::download`], [`Backend::read_scalar`] and
/// [`Fetch::wait`] wait for them. No operation looks at data to decide what to do, so the same calls serve a device
/// that executes later and the paper backend, which never executes.
pub trait Backend {
    /// The rank's memory.
    fn memory(&self) -> &dyn Memory;
    /// Allocates a buffer. Its contents are undefined.
    fn allocate(&self, len: usize, dtype: DType, category: Category) -> Buffer;

    /// Waits until everything enqueued has run.
    fn synchronize(&self);

    /// Sets the function that receives the device's notices. A device without notices ignores it.
    fn set_notice_handler(&self, handler: Box<dyn Fn(Notice)>) {
        drop(handler);
    }

    /// Records a timestamp after everything enqueued so far. Does not wait.
    fn mark(&self) -> Mark {
        Mark::now()
    }

    /// Records every launch from now on, with a mark before and after it, until [`Backend::take_launches`] is called.
    fn record_launches(&self) {}

    /// Returns the recorded launches, in order, and stops recording. Empty on a device whose operations have finished
    /// when they return.
    fn take_launches(&self) -> Vec<Launch> {
        Vec::new()
    }

    /// Runs a step that enqueues the same operations on the same buffers every time, with different tokens. A device
    /// may capture the step as a graph and later ask only for its tokens, so everything else that changes must live on
    /// the device. If the capture failed, the device may call `step` for the whole step a second time.
    fn replay_step(&self, step: &mut dyn FnMut(ReplayRequest)) -> ReplayOutcome {
        step(ReplayRequest::WholeStep);
        ReplayOutcome::Enqueued
    }

    /// A new stream for transfers, with a name for traces. `None` on a device that has no streams.
    fn side_stream(&self, name: &str) -> Option<Rc<dyn SideStream>> {
        let _ = name;
        None
    }

    /// How often the host has waited for the device since the backend was made. Waits of [`Fetch::wait`] are not counted,
    /// since they are for the result of a whole step. A wait for something that has already happened may not count. `None`
    /// on a device whose operations have finished when they return.
    fn host_waits(&self) -> Option<u64> {
        None
    }

    /// Copies token ids from the host.
    fn upload_tokens(&self, tokens: &[u32], to: View);
    /// Copies numbers from the host, rounding to the type of `to`.
    fn upload(&self, values: &[f32], to: View);
    /// Copies bytes from the host to `to` without conversion. `from` must have as many bytes.
    fn upload_bytes(&self, from: &[u8], to: View);
    /// Waits, then copies numbers to the host. The paper backend returns zeros.
    fn read(&self, from: View) -> Vec<f32>;
    /// Waits, then copies the bytes of `from` to the host without conversion. `to` must have as many bytes.
    fn download(&self, from: View, to: &mut [u8]);
    /// Waits, then reads element `index`. The paper backend returns zero.
    fn read_scalar(&self, from: View, index: usize) -> f64;
    /// Starts a copy of a few numbers (up to 4096 bytes) to the host, as they are once everything enqueued so far has
    /// run. Does not wait.
    fn fetch(&self, from: View) -> Fetch {
        Fetch::ready((0..from.len()).map(|i| self.read_scalar(from, i)).collect())
    }

    /// Sets every element.
    fn fill(&self, value: f64, to: View);
    /// Copies, converting between types. Bytes are copied to bytes.
    fn copy(&self, from: View, to: View);
    /// `to += from`, converting between types.
    fn add(&self, from: View, to: View);
    /// `x *= factor`.
    fn scale(&self, factor: f64, x: View);
    /// `to[0] += Σ from²`. The result is not finite if any element is not. `to` has the accumulator type.
    fn sum_of_squares(&self, from: View, to: View) {
        let parts = [Squares { from, own: Some(to), counts: false }];
        self.sums_of_squares(SumsOfSquares { parts: &parts, total: None });
    }
    /// `to = GELU(from)`, tanh form. Recomputes an activation from the saved pre-activation.
    fn gelu(&self, from: View, to: View);
    /// `to = GELU(from)`, by the error function.
    fn exact_gelu(&self, from: View, to: View);
    /// `d = d ∘ GELU'(from)`, by the error function.
    fn exact_gelu_backward(&self, from: View, d: View);

    /// See [`Linear`].
    fn linear(&self, op: Linear);
    /// See [`LinearBackwardInput`].
    fn linear_backward_input(&self, op: LinearBackwardInput);
    /// See [`LinearBackwardWeight`].
    fn linear_backward_weight(&self, op: LinearBackwardWeight);
    /// See [`Residual`].
    fn residual(&self, op: Residual);
    /// See [`ColumnSum`].
    fn column_sum(&self, op: ColumnSum);
    /// See [`CopyColumns`].
    fn copy_columns(&self, op: CopyColumns);
    /// See [`Norm`].
    fn norm(&self, op: Norm);
    /// See [`NormBackward`].
    fn norm_backward(&self, op: NormBackward);
    /// See [`RowDots`].
    fn row_dots(&self, op: RowDots);
    /// See [`SplitNorm`].
    fn split_norm(&self, op: SplitNorm);
    /// See [`SplitNormBackward`].
    fn split_norm_backward(&self, op: SplitNormBackward);
    /// See [`Attention`].
    fn attention(&self, op: Attention);
    /// See [`AttentionBackward`].
    fn attention_backward(&self, op: AttentionBackward);
    /// See [`SlicedAttention`].
    fn sliced_attention(&self, op: SlicedAttention);
    /// See [`SlicedAttentionBackward`].
    fn sliced_attention_backward(&self, op: SlicedAttentionBackward);
    /// See [`CachedAttention`].
    fn cached_attention(&self, op: CachedAttention);
    /// See [`Rotary`].
    fn rotary(&self, op: Rotary);
    /// See [`Gated`].
    fn gated(&self, op: Gated);
    /// See [`GatedBackward`].
    fn gated_backward(&self, op: GatedBackward);
    /// See [`Embedding`].
    fn embedding(&self, op: Embedding);
    /// See [`EmbeddingBackward`].
    fn embedding_backward(&self, op: EmbeddingBackward);
    /// See [`Positions`].
    fn positions(&self, op: Positions);
    /// See [`PositionsBackward`].
    fn positions_backward(&self, op: PositionsBackward);
    /// See [`LossStatistics`].
    fn loss_statistics(&self, op: LossStatistics);
    /// See [`CrossEntropy`].
    fn cross_entropy(&self, op: CrossEntropy);
    /// See [`Quantize`].
    fn quantize(&self, op: Quantize);
    /// See [`Dequantize`].
    fn dequantize(&self, op: Dequantize);
    /// See [`Requantize`].
    fn requantize(&self, op: Requantize);
    /// See [`CastToFloat8`].
    fn cast_to_float8(&self, op: CastToFloat8);
    /// See [`SumsOfSquares`].
    fn sums_of_squares(&self, op: SumsOfSquares);
    /// See [`UpdateControl`].
    fn update_control(&self, op: UpdateControl);
    /// See [`Update`].
    fn update(&self, op: Update);
    /// See [`Momentum`].
    fn momentum(&self, op: Momentum);
    /// See [`Normalize`].
    fn normalize(&self, op: Normalize);
    /// See [`ScaledSum`].
    fn scaled_sum(&self, op: ScaledSum);
}

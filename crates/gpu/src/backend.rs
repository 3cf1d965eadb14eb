//! The operations of the GPU backend: shapes are checked, then kernels are enqueued.
//!
//! A layer never looks at the result of an operation, so a failure cannot be returned to it. Instead the rank panics
//! with the message of the [`GpuError`].

use std::rc::Rc;

use half::{bf16, f16};

use super::replay::token_bytes;
use super::side_stream::GpuSideStream;
use super::{
    GpuBackend, GpuError, activation, cached_attention, column_sum, elementwise, embedding, float8, loss,
    norm, optimizer, quantize, rotary, split_norm,
};
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, CachedAttention, CastToFloat8, Check, ColumnSum, CopyColumns, CrossEntropy,
    Dequantize, Embedding, EmbeddingBackward, Gated, GatedBackward, Linear, LinearBackwardInput,
    LinearBackwardWeight, LossStatistics, Momentum, Norm, NormBackward, Normalize, Positions,
    PositionsBackward, Quantize, Requantize, Residual, Rotary, RowDots, ScaledSum, SlicedAttention,
    SlicedAttentionBackward, SplitNorm, SplitNormBackward, SumsOfSquares, Update, UpdateControl,
};
use kintsugi_tensor::{
    AddressSpace, Backend, Buffer, Category, DType, Fetch, Launch, Mark, Memory, Notice, ReplayOutcome,
    ReplayRequest, SideStream, View,
};

/// Panics if something failed.
fn done<T>(result: Result<T, GpuError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Operations that are checked and then enqueued by the function of the given name.
macro_rules! launched {
    ($($name:ident: $op:ident => $function:path),+ $(,)?) => {
        $(fn $name(&self, op: $op) {
            op.check();
            self.enqueued($function(&self.launcher, &op));
        })+
    };
}

impl GpuBackend {
    /// Panics if an operation could not be enqueued or an earlier one failed. A failure during a graph capture is
    /// deferred instead.
    fn enqueued(&self, result: Result<(), GpuError>) {
        done(result.or_else(|error| self.replay.defer_failure(error)));
    }

    fn download_bytes(&self, from: View) -> Vec<u8> {
        let mut bytes = vec![0; from.bytes()];
        self.download(from, &mut bytes);
        bytes
    }
}

/// Panics unless the view is device memory of `bytes`.
fn check_copy(bytes: usize, view: View) {
    assert_eq!(bytes, view.bytes(), "a copy of another length");
    assert_eq!(view.address_space(), AddressSpace::Device, "the GPU cannot reach this memory");
}

/// Converts numbers to the bytes of a type.
fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => values.iter().flat_map(|&x| f64::from(x).to_ne_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes()).collect(),
        DType::U32 | DType::U8 => panic!("token ids and bytes are not numbers"),
    }
}

/// The inverse of [`encode`], without loss: values are widened to f64.
fn decode(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::F64 => bytes.as_chunks().0.iter().map(|&x| f64::from_ne_bytes(x)).collect(),
        DType::F32 => bytes.as_chunks().0.iter().map(|&x| f32::from_ne_bytes(x).into()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|&x| bf16::from_ne_bytes(x).into()).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|&x| f16::from_ne_bytes(x).into()).collect(),
        DType::U32 | DType::U8 => panic!("token ids and bytes are not numbers"),
    }
}

impl Backend for GpuBackend {
    fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    fn allocate(&self, len: usize, dtype: DType, category: Category) -> Buffer {
        Buffer::new(&self.memory, len, dtype, category)
    }

    fn synchronize(&self) {
        self.stream.mark_not_repeatable();
        self.enqueued(self.stream.synchronize());
    }

    fn set_notice_handler(&self, handler: Box<dyn Fn(Notice)>) {
        self.notices.set(handler);
    }

    fn mark(&self) -> Mark {
        self.stream.mark_not_repeatable();
        Mark::on_device(done(self.stream.timing_event()))
    }

    fn record_launches(&self) {
        self.stream.record_launches();
    }

    fn take_launches(&self) -> Vec<Launch> {
        self.stream.mark_not_repeatable();
        self.stream.take_launches()
    }

    fn replay_step(&self, step: &mut dyn FnMut(ReplayRequest)) -> ReplayOutcome {
        done(self.replay.replay_step(step))
    }

    fn side_stream(&self, name: &str) -> Option<Rc<dyn SideStream>> {
        Some(Rc::new(done(GpuSideStream::new(&self.stream, name, &self.replay))))
    }

    fn host_waits(&self) -> Option<u64> {
        Some(self.stream.host_waits().count())
    }

    fn upload_tokens(&self, tokens: &[u32], to: View) {
        assert_eq!(to.dtype(), DType::U32, "token ids into another type");
        let bytes = token_bytes(tokens);
        check_copy(bytes.len(), to);
        self.stream.add_to_digest([to.address(), bytes.len() as u64]);
        // SAFETY: the view is device memory of this length.
        let uploaded = unsafe {
            self.replay.upload(&bytes, to.address()).and_then(|captured| {
                if captured { Ok(()) } else { self.staging.upload(&bytes, to.address()) }
            })
        };
        self.enqueued(uploaded);
    }

    fn upload(&self, values: &[f32], to: View) {
        self.upload_bytes(&encode(values, to.dtype()), to);
    }

    fn upload_bytes(&self, from: &[u8], to: View) {
        check_copy(from.len(), to);
        self.stream.mark_not_repeatable();
        // SAFETY: the view is device memory of this length.
        self.enqueued(unsafe { self.staging.upload(from, to.address()) });
    }

    fn read(&self, from: View) -> Vec<f32> {
        decode(&self.download_bytes(from), from.dtype()).into_iter().map(|x| x as f32).collect()
    }

    fn download(&self, from: View, to: &mut [u8]) {
        check_copy(to.len(), from);
        self.stream.mark_not_repeatable();
        // SAFETY: the view is device memory of this length.
        self.enqueued(unsafe { self.staging.download(from.address(), to) });
    }

    fn read_scalar(&self, from: View, index: usize) -> f64 {
        decode(&self.download_bytes(from.slice(index..index + 1)), from.dtype())[0]
    }

    fn fetch(&self, from: View) -> Fetch {
        check_copy(from.bytes(), from);
        self.stream.mark_not_repeatable();
        // SAFETY: the view is device memory of this length.
        match unsafe { self.readbacks.fetch(from.address(), from.bytes()) } {
            Ok(coming) => {
                let dtype = from.dtype();
                Fetch::pending(move || decode(&done(coming.wait()), dtype))
            }
            Err(error) => {
                self.enqueued(Err(error));
                Fetch::ready(vec![f64::NAN; from.len()])
            }
        }
    }

    fn fill(&self, value: f64, to: View) {
        self.enqueued(elementwise::fill(&self.launcher, value, to));
    }

    fn copy(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a copy between different lengths");
        self.enqueued(elementwise::copy(&self.launcher, from, to));
    }

    fn add(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "an addition of different lengths");
        self.enqueued(elementwise::add(&self.launcher, from, to));
    }

    fn scale(&self, factor: f64, x: View) {
        self.enqueued(elementwise::scale(&self.launcher, factor, x));
    }

    fn gelu(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a GELU between different lengths");
        self.enqueued(activation::gelu(&self.launcher, from, to));
    }

    fn exact_gelu(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a GELU between different lengths");
        self.enqueued(activation::exact_gelu(&self.launcher, from, to));
    }

    fn exact_gelu_backward(&self, from: View, d: View) {
        assert_eq!(from.len(), d.len(), "a GELU between different lengths");
        self.enqueued(activation::exact_gelu_backward(&self.launcher, from, d));
    }

    fn linear(&self, op: Linear) {
        op.check();
        self.enqueued(self.products.linear(&op));
    }

    fn linear_backward_input(&self, op: LinearBackwardInput) {
        op.check();
        self.enqueued(self.products.linear_backward_input(&op));
    }

    fn linear_backward_weight(&self, op: LinearBackwardWeight) {
        op.check();
        self.enqueued(self.products.linear_backward_weight(&op));
    }

    fn attention(&self, op: Attention) {
        op.check();
        self.enqueued(self.attentions.forward(&op, &self.memory));
    }

    fn attention_backward(&self, op: AttentionBackward) {
        op.check();
        self.enqueued(self.attentions.backward(&op, &self.memory, &self.launcher));
    }

    fn sliced_attention(&self, op: SlicedAttention) {
        op.check();
        self.enqueued(self.attentions.sliced_forward(&op));
    }

    fn sliced_attention_backward(&self, op: SlicedAttentionBackward) {
        op.check();
        self.enqueued(self.attentions.sliced_backward(&op, &self.memory));
    }

    launched! {
        cached_attention: CachedAttention => cached_attention::cached_attention,
        residual: Residual => elementwise::residual,
        column_sum: ColumnSum => column_sum::column_sum,
        copy_columns: CopyColumns => elementwise::copy_columns,
        norm: Norm => norm::forward,
        norm_backward: NormBackward => norm::backward,
        row_dots: RowDots => split_norm::row_dots,
        split_norm: SplitNorm => split_norm::forward,
        split_norm_backward: SplitNormBackward => split_norm::backward,
        rotary: Rotary => rotary::rotary,
        gated: Gated => activation::gated,
        gated_backward: GatedBackward => activation::gated_backward,
        embedding: Embedding => embedding::forward,
        embedding_backward: EmbeddingBackward => embedding::backward,
        positions: Positions => embedding::positions,
        positions_backward: PositionsBackward => embedding::positions_backward,
        loss_statistics: LossStatistics => loss::statistics,
        cross_entropy: CrossEntropy => loss::cross_entropy,
        quantize: Quantize => quantize::quantize,
        dequantize: Dequantize => quantize::dequantize,
        requantize: Requantize => quantize::requantize,
        cast_to_float8: CastToFloat8 => float8::cast,
        sums_of_squares: SumsOfSquares => optimizer::sums_of_squares,
        update_control: UpdateControl => optimizer::update_control,
        update: Update => optimizer::update,
        momentum: Momentum => optimizer::momentum,
        normalize: Normalize => optimizer::normalize,
        scaled_sum: ScaledSum => optimizer::scaled_sum,
    }
}

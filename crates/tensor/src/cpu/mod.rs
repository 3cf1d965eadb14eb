//! The CPU backend: every operation runs immediately, on the threads of the rank's rayon pool.
//!
//! Kernels are generic over the storage type (`Element`) and compute in its accumulator type. The same inputs give the
//! same bits for every number of threads, and no operation allocates memory.

pub mod counting;
pub mod memory;

mod access;
mod activation;
mod attention;
mod element;
mod elementwise;
mod embedding;
mod exact_gelu;
mod float8;
mod gemm;
mod lanes;
mod linear;
mod loss;
mod muon;
mod norm;
mod parallel;
mod quantize;
mod rotary;
mod soft_cap;
mod split_norm;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod update;
mod update_control;

use std::cell::RefCell;
use std::rc::Rc;

use access::Access;
use element::{Element, Real};
use float8::{E4M3, E5M2};
use half::{bf16, f16};
use parallel::Threads;

use crate::ops::{
    Attention, AttentionBackward, CachedAttention, CastToFloat8, Check, ColumnSum, CopyColumns, CrossEntropy,
    Dequantize, Embedding, EmbeddingBackward, Float8Source, Gated, GatedBackward, Linear,
    LinearBackwardInput, LinearBackwardWeight, LossStatistics, Momentum, Norm, NormBackward, Normalize,
    Positions, PositionsBackward, Quantize, Requantize, Residual, Rotary, RowDots, ScaledSum,
    SlicedAttention, SlicedAttentionBackward, SplitNorm, SplitNormBackward, SumsOfSquares, Update,
    UpdateControl,
};
use crate::{AddressSpace, Backend, Buffer, Category, DType, Float8, Memory, View};

const fn larger(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// Scratch per thread, shared by matrix products and attention, which never run at the same time.
const SCRATCH_BYTES: usize = larger(gemm::SCRATCH_BYTES, attention::SCRATCH_BYTES);

/// Bytes of workspace for a rank with this many threads.
pub fn workspace_bytes(threads: usize) -> u64 {
    (threads * SCRATCH_BYTES) as u64
}

/// A CPU rank. Call its operations inside a rayon pool with exactly `threads` threads. With one thread they may be
/// called anywhere.
#[derive(Debug)]
pub struct CpuBackend {
    memory: Rc<dyn Memory>,
    threads: Threads,
    workspace: RefCell<Buffer>,
}

impl CpuBackend {
    /// A backend over host memory. It allocates its workspace immediately.
    pub fn new(memory: Rc<dyn Memory>, threads: usize) -> Self {
        assert!(threads > 0, "a rank has at least one thread");
        assert_eq!(memory.address_space(), AddressSpace::Host, "the CPU needs host memory");
        let elements = workspace_bytes(threads) as usize / DType::F64.bytes();
        let workspace = Buffer::new(&memory, elements, DType::F64, Category::Workspace);
        CpuBackend { memory, threads: Threads(threads), workspace: RefCell::new(workspace) }
    }

    /// Runs `body` with the scratch of all threads.
    fn with_scratch(&self, body: impl FnOnce(&mut [u8])) {
        let workspace = self.workspace.borrow_mut();
        let access = Access::new();
        body(access::bytes_of(access.write::<f64>(workspace.view())));
    }
}

/// Runs `$body` with `$T` standing for the float type `$dtype`.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $T = f64;
                $body
            }
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            DType::U32 | DType::U8 => panic!("token ids and bytes are not numbers"),
        }
    };
}

/// Runs `$body` with `$T` standing for a float type whose accumulator is f32.
macro_rules! with_narrow {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            other => panic!("{other:?} cannot be quantised"),
        }
    };
}

/// Runs `$body` with `$A` and `$B` standing for the codes of a product's factors.
macro_rules! with_codes {
    ($factors:expr, $A:ident, $B:ident => $body:expr) => {
        with_codes!(@ $factors.left.format, $A => with_codes!(@ $factors.right.format, $B => $body))
    };
    (@ $format:expr, $T:ident => $body:expr) => {
        match $format {
            Float8::E4M3 => {
                type $T = E4M3;
                $body
            }
            Float8::E5M2 => {
                type $T = E5M2;
                $body
            }
        }
    };
}

/// Runs `$body` with `$A` standing for f32 or f64.
macro_rules! with_real {
    ($dtype:expr, $A:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $A = f64;
                $body
            }
            DType::F32 => {
                type $A = f32;
                $body
            }
            other => panic!("{other:?} cannot hold sums"),
        }
    };
}

/// Runs `$body` with `$G` as an alias of the Rust type of `$dtype`: `$T` or its accumulator type.
macro_rules! with_gradient {
    ($T:ident, $dtype:expr, $G:ident => $body:expr) => {
        if $dtype == $T::DTYPE {
            type $G = $T;
            $body
        } else {
            type $G = <$T as Element>::Accumulator;
            $body
        }
    };
}

impl Backend for CpuBackend {
    fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    fn allocate(&self, len: usize, dtype: DType, category: Category) -> Buffer {
        Buffer::new(&self.memory, len, dtype, category)
    }

    fn synchronize(&self) {}

    fn upload_tokens(&self, tokens: &[u32], to: View) {
        Access::new().write_tokens(to).copy_from_slice(tokens);
    }

    fn upload(&self, values: &[f32], to: View) {
        assert_eq!(values.len(), to.len(), "an upload of another length");
        with_float!(to.dtype(), T => elementwise::upload::<T>(self.threads, values, to));
    }

    fn upload_bytes(&self, from: &[u8], to: View) {
        Access::new().write_bytes(to).copy_from_slice(from);
    }

    fn read(&self, from: View) -> Vec<f32> {
        with_float!(from.dtype(), T => {
            Access::new().read::<T>(from).iter().map(|x| x.widen().to_f64() as f32).collect()
        })
    }

    fn download(&self, from: View, to: &mut [u8]) {
        let access = Access::new();
        let from = access.bytes(from);
        assert_eq!(from.len(), to.len(), "a download of another length");
        self.threads.each(to.len(), 1, (from, to), |_, (from, to)| to.copy_from_slice(from));
    }

    fn read_scalar(&self, from: View, index: usize) -> f64 {
        with_float!(from.dtype(), T => Access::new().read::<T>(from)[index].widen().to_f64())
    }

    fn fill(&self, value: f64, to: View) {
        with_float!(to.dtype(), T => elementwise::fill::<T>(self.threads, value, to));
    }

    fn copy(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a copy between different lengths");
        if from.dtype() == to.dtype() {
            return elementwise::copy_bytes(self.threads, from, to);
        }
        with_float!(from.dtype(), S => with_float!(to.dtype(), T => {
            elementwise::copy::<S, T>(self.threads, from, to);
        }));
    }

    fn add(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "an addition of different lengths");
        with_float!(from.dtype(), S => with_float!(to.dtype(), T => {
            elementwise::add::<S, T>(self.threads, from, to);
        }));
    }

    fn scale(&self, factor: f64, x: View) {
        with_float!(x.dtype(), T => elementwise::scale::<T>(self.threads, factor, x));
    }

    fn gelu(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a GELU between different lengths");
        with_float!(from.dtype(), T => activation::gelu_forward::<T>(self.threads, from, to));
    }

    fn exact_gelu(&self, from: View, to: View) {
        assert_eq!(from.len(), to.len(), "a GELU between different lengths");
        with_float!(from.dtype(), T => exact_gelu::forward::<T>(self.threads, from, to));
    }

    fn exact_gelu_backward(&self, from: View, d: View) {
        assert_eq!(from.len(), d.len(), "a GELU between different lengths");
        with_float!(from.dtype(), T => exact_gelu::backward::<T>(self.threads, from, d));
    }

    fn linear(&self, op: Linear) {
        op.check();
        self.with_scratch(|scratch| match op.float8 {
            None => with_float!(op.x.dtype(), T => linear::forward::<T>(self.threads, scratch, &op)),
            Some(factors) => with_codes!(factors, X, W => with_narrow!(op.out.dtype(), T => {
                let scale = Some(float8::factor(&factors));
                linear::forward_of::<X, W, T>(self.threads, scratch, &op, scale);
            })),
        });
    }

    fn linear_backward_input(&self, op: LinearBackwardInput) {
        op.check();
        self.with_scratch(|scratch| match op.float8 {
            None => {
                with_float!(op.dy.dtype(), T => linear::backward_input::<T>(self.threads, scratch, &op));
            }
            Some(factors) => with_codes!(factors, D, W => with_narrow!(op.dx.dtype(), T => {
                let scale = float8::factor(&factors);
                linear::backward_input_of::<D, W, T>(self.threads, scratch, &op, scale);
            })),
        });
        if let Some(out) = op.dbias {
            self.column_sum(ColumnSum { x: op.dx, out, rows: op.rows, width: op.inputs });
        }
    }

    fn linear_backward_weight(&self, op: LinearBackwardWeight) {
        op.check();
        self.with_scratch(|scratch| {
            if let Some(factors) = op.float8 {
                let scale = float8::factor(&factors);
                with_codes!(factors, D, X => with_narrow!(op.dweight.view.dtype(), G => {
                    linear::backward_weight_of::<D, X, G>(self.threads, scratch, &op, scale);
                }));
                return;
            }
            with_float!(op.x.dtype(), T => with_gradient!(T, op.dweight.view.dtype(), G => {
                linear::backward_weight::<T, G>(self.threads, scratch, &op);
            }));
        });
    }

    fn residual(&self, op: Residual) {
        op.check();
        with_float!(op.x.dtype(), T => elementwise::residual::<T>(self.threads, &op));
    }

    fn column_sum(&self, op: ColumnSum) {
        op.check();
        with_float!(op.x.dtype(), T => with_gradient!(T, op.out.view.dtype(), G => {
            elementwise::column_sum::<T, G>(self.threads, &op);
        }));
    }

    fn copy_columns(&self, op: CopyColumns) {
        op.check();
        with_float!(op.from.view.dtype(), T => elementwise::copy_columns::<T>(self.threads, &op));
    }

    fn norm(&self, op: Norm) {
        op.check();
        with_float!(op.x.dtype(), T => norm::forward::<T>(self.threads, &op));
    }

    fn norm_backward(&self, op: NormBackward) {
        op.check();
        let gradient = op.dweight.map_or(op.x.dtype().accumulator(), |dweight| dweight.view.dtype());
        with_float!(op.x.dtype(), T => with_gradient!(T, gradient, G => {
            norm::backward::<T, G>(self.threads, &op);
        }));
    }

    fn row_dots(&self, op: RowDots) {
        op.check();
        with_float!(op.x.dtype(), T => split_norm::row_dots::<T>(self.threads, &op));
    }

    fn split_norm(&self, op: SplitNorm) {
        op.check();
        with_float!(op.x.dtype(), T => split_norm::forward::<T>(self.threads, &op));
    }

    fn split_norm_backward(&self, op: SplitNormBackward) {
        op.check();
        let gradient = op.dweight.map_or(op.x.dtype().accumulator(), |dweight| dweight.view.dtype());
        with_float!(op.x.dtype(), T => with_gradient!(T, gradient, G => {
            split_norm::backward::<T, G>(self.threads, &op);
        }));
    }

    fn attention(&self, op: Attention) {
        op.check();
        self.with_scratch(|scratch| {
            with_float!(op.qkv.dtype(), T => attention::forward::<T>(self.threads, scratch, &op));
        });
    }

    fn attention_backward(&self, op: AttentionBackward) {
        op.check();
        self.with_scratch(|scratch| {
            with_float!(op.qkv.dtype(), T => attention::backward::<T>(self.threads, scratch, &op));
        });
        if let Some(out) = op.dbias {
            let (rows, width) = (op.shape.rows(), op.shape.qkv_width());
            self.column_sum(ColumnSum { x: op.dqkv, out, rows, width });
        }
    }

    fn sliced_attention(&self, op: SlicedAttention) {
        op.check();
        self.with_scratch(|scratch| {
            with_float!(op.qkv.dtype(), T => with_gradient!(T, op.out.dtype(), O => {
                attention::sliced_forward::<T, O>(self.threads, scratch, &op);
            }));
        });
    }

    fn sliced_attention_backward(&self, op: SlicedAttentionBackward) {
        op.check();
        self.with_scratch(|scratch| {
            with_float!(op.qkv.dtype(), T => with_gradient!(T, op.dqueries.view.dtype(), Q => {
                with_gradient!(T, op.dkeys.dtype(), G => {
                    attention::sliced_backward::<T, Q, G>(self.threads, scratch, &op);
                });
            }));
        });
    }

    fn cached_attention(&self, op: CachedAttention) {
        op.check();
        with_float!(op.qkv.dtype(), T => attention::cached::<T>(self.threads, &op));
    }

    fn rotary(&self, op: Rotary) {
        op.check();
        with_float!(op.qkv.dtype(), T => rotary::rotary::<T>(self.threads, &op));
    }

    fn gated(&self, op: Gated) {
        op.check();
        with_float!(op.x.dtype(), T => activation::gated::<T>(self.threads, &op));
    }

    fn gated_backward(&self, op: GatedBackward) {
        op.check();
        with_float!(op.x.dtype(), T => activation::gated_backward::<T>(self.threads, &op));
    }

    fn embedding(&self, op: Embedding) {
        op.check();
        with_float!(op.table.dtype(), T => embedding::forward::<T>(self.threads, &op));
    }

    fn embedding_backward(&self, op: EmbeddingBackward) {
        op.check();
        self.with_scratch(|scratch| {
            with_float!(op.dout.dtype(), T => with_gradient!(T, op.dtable.view.dtype(), G => {
                embedding::backward::<T, G>(self.threads, scratch, &op);
            }));
        });
    }

    fn positions(&self, op: Positions) {
        op.check();
        with_float!(op.x.dtype(), T => embedding::positions::<T>(self.threads, &op));
    }

    fn positions_backward(&self, op: PositionsBackward) {
        op.check();
        with_float!(op.dx.dtype(), T => with_gradient!(T, op.dtable.view.dtype(), G => {
            embedding::positions_backward::<T, G>(self.threads, &op);
        }));
    }

    fn loss_statistics(&self, op: LossStatistics) {
        op.check();
        with_float!(op.logits.dtype(), T => loss::statistics::<T>(self.threads, &op));
    }

    fn cross_entropy(&self, op: CrossEntropy) {
        op.check();
        with_float!(op.logits.dtype(), T => loss::cross_entropy::<T>(self.threads, &op));
    }

    fn quantize(&self, op: Quantize) {
        op.check();
        with_narrow!(op.x.dtype(), T => quantize::quantize::<T>(self.threads, &op));
    }

    fn dequantize(&self, op: Dequantize) {
        op.check();
        with_narrow!(op.out.view.dtype(), T => quantize::dequantize::<T>(self.threads, &op));
    }

    fn requantize(&self, op: Requantize) {
        op.check();
        quantize::requantize(self.threads, &op);
    }

    fn cast_to_float8(&self, op: CastToFloat8) {
        op.check();
        with_narrow!(op.x.view().dtype(), T => match op.x {
            Float8Source::Numbers(_) => float8::cast::<T>(self.threads, &op, |x| x),
            Float8Source::Gelu(_) => float8::cast::<T>(self.threads, &op, activation::gelu),
        });
    }

    fn sums_of_squares(&self, op: SumsOfSquares) {
        op.check();
        for part in op.parts {
            with_float!(part.from.dtype(), T => {
                elementwise::sum_of_squares::<T>(self.threads, part, op.total);
            });
        }
    }

    fn update_control(&self, op: UpdateControl) {
        op.check();
        with_real!(op.control.dtype(), A => update_control::update_control::<A>(&op));
    }

    fn momentum(&self, op: Momentum) {
        op.check();
        match op.gradient.dtype() {
            DType::F64 => muon::momentum::<f64, f64, f64>(self.threads, &op),
            DType::F32 => muon::momentum_in_f32::<f32>(self.threads, &op),
            DType::BF16 => muon::momentum_in_f32::<bf16>(self.threads, &op),
            DType::F16 => muon::momentum_in_f32::<f16>(self.threads, &op),
            DType::U32 | DType::U8 => panic!("token ids and bytes are not numbers"),
        }
    }

    fn normalize(&self, op: Normalize) {
        op.check();
        with_float!(op.x.dtype(), T => muon::normalize::<T>(self.threads, &op));
    }

    fn scaled_sum(&self, op: ScaledSum) {
        op.check();
        with_float!(op.x.dtype(), T => muon::scaled_sum::<T>(self.threads, &op));
    }

    fn update(&self, op: Update) {
        op.check();
        for parameters in op.parameters {
            match parameters.gradient.dtype() {
                DType::F64 => update::update::<f64, f64, f64>(self.threads, &op, parameters),
                DType::F32 => update::update_in_f32::<f32>(self.threads, &op, parameters),
                DType::BF16 => update::update_in_f32::<bf16>(self.threads, &op, parameters),
                DType::F16 => update::update_in_f32::<f16>(self.threads, &op, parameters),
                DType::U32 | DType::U8 => panic!("token ids and bytes are not numbers"),
            }
        }
    }
}

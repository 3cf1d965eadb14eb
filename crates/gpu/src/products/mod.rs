//! Matrix products. Most are a library's: with bias, residual and GELU as its epilogue if it supports that and it is
//! faster than a separate kernel of ours. On Hopper, products with GELU or its derivative can be a single kernel of
//! ours.
//!
//! A library's matrices are column-major, so it sees a row-major matrix as its transpose: `out = x · weightᵀ` becomes
//! `outᵀ = weight · xᵀ`, and no matrix is copied. Descriptors and algorithms are prepared once per kind of product.

mod epilogue;
mod library;
mod product;
#[cfg(test)]
mod tests;
mod trial_rows;
mod tune;
mod tuning_cache;
mod tuning_progress;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Instant;

use crate::cuda::hopper_product as hopper;
use crate::driver::DeviceRange;
use crate::error::GpuError;
use crate::kernels::Kernels;
use crate::launcher::{Launcher, device_address};
use crate::notice_handler::NoticeHandler;
use crate::stream::Stream;
use crate::{activation, column_sum};
use kintsugi_tensor::ops::{
    ColumnSum, Float8Factors, Float8Scale, Linear, LinearBackwardInput, LinearBackwardWeight,
};
use kintsugi_tensor::{DType, View};
pub(crate) use library::{Addresses, Algorithm, ProductDescription, ProductLibrary};
use product::{Addend, Choice, Product, Provider};
pub(crate) use product::{Epilogue, EpilogueAddresses, Factors, Key};
use trial_rows::TrialRows;
use tuning_cache::TuningCache;
use tuning_progress::TuningProgress;

/// The matrix products of one stream.
#[derive(Debug)]
pub(crate) struct Products {
    stream: Stream,
    workspace: DeviceRange,
    launcher: Launcher,
    tuning: Cell<bool>,
    in_bursts: Cell<bool>,
    notices: NoticeHandler,
    progress: RefCell<TuningProgress>,
    prepared: RefCell<PreparedProducts>,
    library: Box<dyn ProductLibrary>,
}

#[derive(Debug)]
struct PreparedProducts {
    /// Keyed by the keys of all variants.
    products: HashMap<Vec<Key>, Product>,
    cache: Option<TuningCache>,
}

/// The matrices of a product; `m`, `n`, `k` as in [`Key`].
#[derive(Clone, Copy)]
struct Call<'a> {
    size: [usize; 3],
    transposed: [bool; 2],
    a: View<'a>,
    b: View<'a>,
    d: View<'a>,
    addend: Option<View<'a>>,
    float8: Option<Float8Call<'a>>,
}

/// What factors in 8 bits have beside their codes.
#[derive(Clone, Copy)]
struct Float8Call<'a> {
    a: Float8Scale<'a>,
    b: Float8Scale<'a>,
    /// Whether some low bits of the sums may be lost.
    fast: bool,
}

impl<'a> Float8Call<'a> {
    /// The library sees the right factor as A.
    fn new(factors: Option<Float8Factors<'a>>, fast: bool) -> Option<Self> {
        factors.map(|Float8Factors { left, right }| Float8Call { a: right, b: left, fast })
    }
}

/// A kernel of ours that runs after the product, or instead of it.
type OwnKernel<'a> = dyn Fn(&Launcher) -> Result<(), GpuError> + 'a;

/// One variant to compute an operation: cuBLASLt's product with an epilogue and optionally a kernel of ours after it, or a
/// single kernel of ours.
struct Variant<'a> {
    provider: Provider,
    call: Call<'a>,
    epilogue: Epilogue,
    bias: Option<View<'a>>,
    pre_activation: Option<View<'a>>,
    finish: Option<&'a OwnKernel<'a>>,
}

/// The variants of an operation. A `repeatable` operation neither accumulates nor overwrites its inputs.
struct Variants<'a> {
    variants: Vec<Variant<'a>>,
    repeatable: bool,
}

/// What is done with the variants of an operation.
type Enqueue<'a> = dyn FnMut(Variants) -> Result<(), GpuError> + 'a;

impl<'a> Variant<'a> {
    /// cuBLASLt's product without an epilogue.
    fn plain(call: Call<'a>) -> Self {
        Variant {
            provider: Provider::Library,
            call,
            epilogue: Epilogue::Nothing,
            bias: None,
            pre_activation: None,
            finish: None,
        }
    }

    fn epilogue_addresses(&self) -> EpilogueAddresses {
        let address = |view: Option<View>| view.map_or(0, device_address);
        let scales =
            self.call.float8.map(|Float8Call { a, b, .. }| [a, b].map(|scale| device_address(scale.inverse)));
        EpilogueAddresses {
            bias: address(self.bias),
            pre_activation: address(self.pre_activation),
            scales: scales.unwrap_or_default(),
        }
    }

    /// The pre-activation must be aligned like the result. cuBLASLt does not check its address.
    fn is_aligned(&self) -> bool {
        let EpilogueAddresses { bias, pre_activation, .. } = self.epilogue_addresses();
        (bias | pre_activation).is_multiple_of(product::ALIGNMENT.into())
    }

    fn addresses(&self) -> Addresses {
        let Call { a, b, d, addend, .. } = self.call;
        let [a, b, c, d] = [a, b, addend.unwrap_or(d), d].map(device_address);
        Addresses { a, b, c, d }
    }

    /// A readable name of cuBLASLt's part: rows, columns, the inner dimension, and the epilogue.
    fn name(&self) -> String {
        let [columns, rows, inner] = self.call.size;
        let behind = match self.epilogue {
            Epilogue::Nothing => "",
            Epilogue::Bias => " + bias",
            Epilogue::Gelu => ", GELU",
            Epilogue::BiasGelu => " + bias, GELU",
            Epilogue::GeluDerivative => ", GELU's derivative",
        };
        let add = if self.call.addend.is_some() { ", added" } else { "" };
        format!("product {rows} × {columns} × {inner}{behind}{add}")
    }

    fn key(&self) -> Result<Key, GpuError> {
        let [m, n, k] = self.call.size;
        for view in [self.bias, self.pre_activation, self.call.addend].into_iter().flatten() {
            same_type(view, self.call.d)?;
        }
        let addend = match self.call.addend {
            Some(view) if view.address() != self.call.d.address() => Addend::Other,
            Some(_) | None => Addend::Nothing,
        };
        let factors = match self.call.float8 {
            Some(Float8Call { a, b, fast }) => Factors::Float8 { formats: [a.format, b.format], fast },
            None => Factors::Numbers(same_type(self.call.a, self.call.b)?),
        };
        Ok(Key {
            provider: self.provider,
            m,
            n,
            k,
            transposed: self.call.transposed,
            factors,
            output: self.call.d.dtype(),
            epilogue: self.epilogue,
            addend,
            alignments: product::alignments(self.addresses()),
        })
    }
}

impl Products {
    /// Products on a stream, which share `workspace` with everything else on it.
    ///
    /// They are not tuned: each uses cuBLASLt's first choice, the same in every run.
    pub(crate) fn new(
        stream: &Stream,
        kernels: &Kernels,
        workspace: DeviceRange,
        notices: &NoticeHandler,
    ) -> Result<Self, GpuError> {
        let library = stream.driver().products()?;
        let cache = TuningCache::open(&stream.driver().name()?, library.version());
        Ok(Products {
            library,
            stream: stream.clone(),
            workspace,
            launcher: Launcher::new(stream, kernels.clone(), workspace),
            tuning: Cell::new(false),
            in_bursts: Cell::new(false),
            notices: notices.clone(),
            progress: RefCell::default(),
            prepared: RefCell::new(PreparedProducts { products: HashMap::new(), cache }),
        })
    }

    /// Sets whether to use the fastest algorithms: from disk, or by measuring them when a product first occurs. The
    /// last bits of results then depend on the measured speeds.
    pub(crate) fn tune(&self, tuning: bool) {
        if self.tuning.replace(tuning) != tuning {
            self.prepared.borrow_mut().products.clear();
        }
    }

    /// From now on, tunes with short bursts only. Such choices are not written to disk, because they may not be the
    /// fastest for long runs.
    pub(crate) fn tune_in_bursts(&self) {
        self.in_bursts.set(true);
    }

    /// Ignores the tuning results on disk, and writes none.
    pub(crate) fn ignore_tuning_cache(&self) {
        self.prepared.borrow_mut().cache = None;
    }

    /// See [`Linear`].
    pub(crate) fn linear(&self, op: &Linear) -> Result<(), GpuError> {
        self.enqueue(op, |op, enqueue| self.linear_variants(op, enqueue))
    }

    /// See [`LinearBackwardInput`].
    pub(crate) fn linear_backward_input(&self, op: &LinearBackwardInput) -> Result<(), GpuError> {
        self.enqueue(op, |op, enqueue| self.linear_backward_input_variants(op, enqueue))
    }

    /// See [`LinearBackwardWeight`]. The bias gradient is a separate kernel, because cuBLASLt's epilogue for it cannot
    /// accumulate.
    pub(crate) fn linear_backward_weight(&self, op: &LinearBackwardWeight) -> Result<(), GpuError> {
        let LinearBackwardWeight { dy, rows, outputs, .. } = *op;
        if let Some(out) = op.dbias {
            column_sum::column_sum(&self.launcher, &ColumnSum { x: dy, out, rows, width: outputs })?;
        }
        self.enqueue(op, |op, enqueue| linear_backward_weight_variants(op, enqueue))
    }

    /// Enqueues an operation whose variants `with_variants` passes on. If it has many rows, candidates are tried on fewer.
    fn enqueue<O: TrialRows>(
        &self,
        op: &O,
        with_variants: impl Fn(&O, &mut Enqueue) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        match op.trial() {
            None => with_variants(op, &mut |whole| self.run(whole, None)),
            Some(trial) => with_variants(&trial, &mut |trial| {
                let mut trial = Some(trial);
                with_variants(op, &mut |whole| self.run(whole, trial.take()))
            }),
        }
    }

    /// The variants are: cuBLASLt's epilogue; for GELU, a pass from the pre-activation to its GELU; a pass over the plain
    /// product; and one kernel of ours for product and GELU. All but the third round at the same points.
    fn linear_variants(&self, op: &Linear, enqueue: &mut Enqueue) -> Result<(), GpuError> {
        let call = Call {
            size: [op.outputs, op.rows, op.inputs],
            transposed: [true, false],
            a: op.weight,
            b: op.x,
            d: op.out,
            addend: None,
            float8: Float8Call::new(op.float8, true),
        };
        let epilogue = match (op.bias, op.gelu) {
            (None, None) => Epilogue::Nothing,
            (Some(_), None) => Epilogue::Bias,
            (None, Some(_)) => Epilogue::Gelu,
            (Some(_), Some(_)) => Epilogue::BiasGelu,
        };
        let fused = Call { addend: op.residual, ..call };
        let mut variants =
            vec![Variant { epilogue, bias: op.bias, pre_activation: op.gelu, ..Variant::plain(fused) }];
        let activate = |launcher: &Launcher| match op.gelu {
            Some(pre_activation) => activation::gelu(launcher, pre_activation, op.out),
            None => Ok(()),
        };
        if let Some(pre_activation) = op.gelu {
            let epilogue = if op.bias.is_some() { Epilogue::Bias } else { Epilogue::Nothing };
            let call = Call { d: pre_activation, ..call };
            variants.push(Variant {
                epilogue,
                bias: op.bias,
                finish: Some(&activate),
                ..Variant::plain(call)
            });
        }
        let finish = |launcher: &Launcher| epilogue::finish(launcher, op);
        if epilogue != Epilogue::Nothing || op.residual.is_some() {
            variants.push(Variant { finish: Some(&finish), ..Variant::plain(call) });
        }
        let ours = |launcher: &Launcher| hopper::gelu(launcher, op);
        if op.float8.is_none() && hopper::has_gelu(&self.launcher, op) {
            variants.push(Variant { provider: Provider::Ours, finish: Some(&ours), ..Variant::plain(call) });
        }
        let out_of_place = op.residual.is_none_or(|residual| residual.address() != op.out.address());
        if !out_of_place {
            // The other variants would overwrite the matrix that they add.
            variants.truncate(1);
        }
        let add_bias = |launcher: &Launcher| epilogue::bias(launcher, op);
        if !self.library.has_epilogues() {
            variants.retain(|variant| variant.epilogue == Epilogue::Nothing && variant.call.addend.is_none());
            if op.residual.is_some() {
                variants = vec![Variant { finish: Some(&add_bias), ..Variant::plain(fused) }];
            }
        }
        enqueue(Variants { variants, repeatable: out_of_place })
    }

    /// GELU's derivative is cuBLASLt's epilogue or a pass over the product, and the bias gradient is a separate pass. Or one
    /// kernel of ours does all of it.
    fn linear_backward_input_variants(
        &self,
        op: &LinearBackwardInput,
        enqueue: &mut Enqueue,
    ) -> Result<(), GpuError> {
        let call = Call {
            size: [op.inputs, op.rows, op.outputs],
            transposed: [op.float8.is_some(), false],
            a: op.weight,
            b: op.dy,
            d: op.dx,
            addend: None,
            float8: Float8Call::new(op.float8, false),
        };
        let sum = |launcher: &Launcher| match op.dbias {
            Some(out) => {
                let sum = ColumnSum { x: op.dx, out, rows: op.rows, width: op.inputs };
                column_sum::column_sum(launcher, &sum)
            }
            None => Ok(()),
        };
        let out_of_place = op.gelu.is_none_or(|pre_activation| pre_activation.address() != op.dx.address());
        let repeatable = out_of_place && op.dbias.is_none_or(|dbias| !dbias.accumulate);
        let Some(pre_activation) = op.gelu else {
            let variants = vec![Variant { finish: Some(&sum), ..Variant::plain(call) }];
            return enqueue(Variants { variants, repeatable });
        };
        let finish = |launcher: &Launcher| {
            epilogue::gelu_derivative(launcher, pre_activation, op.dx)?;
            sum(launcher)
        };
        let fused = Variant {
            epilogue: Epilogue::GeluDerivative,
            pre_activation: Some(pre_activation),
            finish: Some(&sum),
            ..Variant::plain(call)
        };
        let mut variants = vec![fused, Variant { finish: Some(&finish), ..Variant::plain(call) }];
        let ours = |launcher: &Launcher| hopper::gelu_derivative(launcher, op, pre_activation);
        if op.float8.is_none() && hopper::has_gelu_derivative(&self.launcher, op, pre_activation) {
            variants.push(Variant { provider: Provider::Ours, finish: Some(&ours), ..Variant::plain(call) });
        }
        if !out_of_place {
            variants.truncate(1);
        }
        if !self.library.has_epilogues() {
            variants.retain(|variant| variant.epilogue == Epilogue::Nothing);
        }
        enqueue(Variants { variants, repeatable })
    }

    /// Enqueues one variant of an operation: the fastest if products are tuned, else the first that is available.
    ///
    /// Tuning may run a repeatable operation with every candidate; or `trial`, if that is given, which is the same
    /// operation on fewer rows. Other operations of the same kind reuse that choice; before it exists, they run the first
    /// candidate.
    fn run(&self, whole: Variants, trial: Option<Variants>) -> Result<(), GpuError> {
        let Variants { mut variants, repeatable } = whole;
        variants.retain(Variant::is_aligned);
        if variants.is_empty() {
            let library = self.library.name();
            let why = format!(
                "{library} has no product in place with this epilogue, or its bias and pre-activation are not at \
                 multiples of 16 bytes"
            );
            return Err(GpuError::Unsupported(why));
        }
        let keys = variants.iter().map(Variant::key).collect::<Result<Vec<_>, _>>()?;
        self.stream.add_hash_to_digest(&keys);
        let PreparedProducts { products, cache } = &mut *self.prepared.borrow_mut();
        let Product { description, candidates } = match products.entry(keys) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let prepared = self.prepare(unknown.key(), &variants, cache.as_ref())?;
                unknown.insert(prepared)
            }
        };
        let run = |choice: Choice| self.run_choice(description, &variants, choice);
        if repeatable && candidates.len() > 1 {
            let begun = Instant::now();
            if let Some(notice) = self.progress.borrow_mut().begin() {
                self.notices.notify(notice);
            }
            let on_fewer_rows = trial.and_then(|trial| self.fastest_on_trial(candidates, trial).ok());
            let fastest = match on_fewer_rows {
                Some(choice) => choice,
                None => tune::fastest(&self.stream, candidates, self.in_bursts.get(), run)?,
            };
            *candidates = vec![fastest];
            if let Some(cache) = cache.as_mut().filter(|_| !self.in_bursts.get()) {
                cache.put(&variants[0].key()?.to_string(), fastest);
            }
            self.progress.borrow_mut().end(begun.elapsed());
        }
        run(candidates[0])
    }

    /// The fastest of the candidates on fewer rows. Fails if none of them can run there.
    fn fastest_on_trial(&self, candidates: &[Choice], trial: Variants) -> Result<Choice, GpuError> {
        let Variants { mut variants, .. } = trial;
        variants.retain(Variant::is_aligned);
        let describe = |variant: &Variant| Ok((variant.key()?, variant.epilogue_addresses()));
        let keys = variants.iter().map(describe).collect::<Result<Vec<_>, GpuError>>()?;
        let small =
            Product::new(&*self.library, &keys, self.workspace.bytes, None, false)?.ok_or_else(|| {
                GpuError::Unsupported(format!("{} has no product {}", self.library.name(), keys[0].0))
            })?;
        tune::fastest(&self.stream, candidates, self.in_bursts.get(), |choice| {
            self.run_choice(&small.description, &variants, choice)
        })
    }

    fn run_choice(
        &self,
        description: &[Option<Box<dyn ProductDescription>>],
        variants: &[Variant],
        choice: Choice,
    ) -> Result<(), GpuError> {
        let (description, variant) = (&description[choice.variant], &variants[choice.variant]);
        self.run_variant(description.as_deref(), variant, &choice.algorithm)
    }

    fn prepare(
        &self,
        keys: &[Key],
        variants: &[Variant],
        cache: Option<&TuningCache>,
    ) -> Result<Product, GpuError> {
        self.stream.mark_not_repeatable();
        let tune = self.tuning.get();
        let cached = cache.filter(|_| tune).and_then(|cache| cache.get(&keys[0].to_string()));
        let variants: Vec<(Key, EpilogueAddresses)> =
            keys.iter().copied().zip(variants.iter().map(Variant::epilogue_addresses)).collect();
        Product::new(&*self.library, &variants, self.workspace.bytes, cached, tune)?.ok_or_else(|| {
            GpuError::Unsupported(format!("{} has no product {}", self.library.name(), keys[0]))
        })
    }

    fn run_variant(
        &self,
        description: Option<&dyn ProductDescription>,
        variant: &Variant,
        algorithm: &Algorithm,
    ) -> Result<(), GpuError> {
        if let Some(description) = description {
            let (epilogue_addresses, at) = (variant.epilogue_addresses(), variant.addresses());
            let rows = variant.call.size[0];
            description.set_epilogue_addresses(variant.epilogue, epilogue_addresses, rows)?;
            let add = variant.call.addend.is_some();
            self.stream.add_to_digest([
                at.a,
                at.b,
                at.c,
                at.d,
                epilogue_addresses.bias,
                epilogue_addresses.pre_activation,
                add.into(),
            ]);
            self.stream.add_to_digest(epilogue_addresses.scales);
            self.stream.add_to_digest(algorithm.data);
            self.stream.launching(
                || variant.name(),
                || {
                    // SAFETY: the operation's views were checked against its shape, from which the key was made,
                    // and a rank's memory outlives what is enqueued on its stream.
                    unsafe { description.run(self.stream.queue(), algorithm, at, add, self.workspace) }
                },
            )?;
        }
        variant.finish.map_or(Ok(()), |finish| finish(&self.launcher))
    }
}

/// One variant: the plain product.
fn linear_backward_weight_variants(op: &LinearBackwardWeight, enqueue: &mut Enqueue) -> Result<(), GpuError> {
    let LinearBackwardWeight { dy, x, rows, inputs, outputs, dweight, float8, .. } = *op;
    let product = Variant::plain(Call {
        size: [inputs, outputs, rows],
        transposed: if float8.is_some() { [true, false] } else { [false, true] },
        a: x,
        b: dy,
        d: dweight.view,
        addend: dweight.accumulate.then_some(dweight.view),
        float8: Float8Call::new(float8, false),
    });
    enqueue(Variants { variants: vec![product], repeatable: !dweight.accumulate })
}

fn same_type(a: View, b: View) -> Result<DType, GpuError> {
    if a.dtype() == b.dtype() {
        return Ok(a.dtype());
    }
    Err(GpuError::Unsupported(format!("a product of {:?} and {:?}", a.dtype(), b.dtype())))
}

//! Matrix products: cuBLASLt's, with bias, residual and GELU in the same kernel where it can and that is faster than a
//! kernel of ours after it; and on Hopper, with GELU or its derivative, one of ours altogether.
//!
//! cuBLASLt's matrices are column-major, so a row-major matrix is seen as its transpose: `out = x · weightᵀ` becomes
//! `outᵀ = weight · xᵀ`, whose factors lie in memory as they are. Descriptions and algorithms are made once for
//! every kind of product.

mod epilogue;
mod hopper;
mod library;
mod product;
mod store;
#[cfg(test)]
mod tests;
mod tune;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::error::CudaError;
use super::kernels::Kernels;
use super::launcher::{Launcher, device_address};
use super::listener::Listener;
use super::stream::{DeviceRange, Stream};
use super::{activation, column_sum};
use crate::ops::{ColumnSum, Linear, LinearBackwardInput, LinearBackwardWeight};
use crate::{DType, Notice, View};
use library::{Addresses, Algorithm, Described, Handle};
use product::{Addend, Chosen, Epilogue, Extras, Key, Maker, Product};
use store::Store;

/// The products of one stream.
#[derive(Debug)]
pub(crate) struct Products {
    stream: Stream,
    workspace: DeviceRange,
    launcher: Launcher,
    tuning: Cell<bool>,
    in_bursts: Cell<bool>,
    listener: Listener,
    has_tried: Cell<bool>,
    state: RefCell<State>,
    handle: Handle,
}

#[derive(Debug)]
struct State {
    /// By the keys of all ways.
    products: HashMap<Vec<Key>, Product>,
    store: Option<Store>,
}

/// Matrices and what is computed with them; `m`, `n`, `k` as in [`Key`].
#[derive(Clone, Copy)]
struct Call<'a> {
    size: [usize; 3],
    transposed: [bool; 2],
    a: View<'a>,
    b: View<'a>,
    d: View<'a>,
    addend: Option<View<'a>>,
}

/// A kernel of ours that ends an operation.
type Finish<'a> = dyn Fn(&Launcher) -> Result<(), CudaError> + 'a;

/// One way to do an operation: cuBLASLt's product with an epilogue, and what a kernel of ours does after it; or a kernel of
/// ours alone.
struct Way<'a> {
    maker: Maker,
    call: Call<'a>,
    epilogue: Epilogue,
    bias: Option<View<'a>>,
    kept: Option<View<'a>>,
    finish: Option<&'a Finish<'a>>,
}

impl<'a> Way<'a> {
    /// A product without epilogue.
    fn plain(call: Call<'a>) -> Self {
        Way { maker: Maker::Library, call, epilogue: Epilogue::Nothing, bias: None, kept: None, finish: None }
    }

    fn extras(&self) -> Extras {
        let address = |view: Option<View>| view.map_or(0, device_address);
        Extras { bias: address(self.bias), kept: address(self.kept) }
    }

    /// The kept values must be aligned like the result; cuBLASLt does not look at their address itself.
    fn is_aligned(&self) -> bool {
        let Extras { bias, kept } = self.extras();
        (bias | kept).is_multiple_of(product::ALIGNMENT.into())
    }

    fn addresses(&self) -> Addresses {
        let Call { a, b, d, addend, .. } = self.call;
        let [a, b, c, d] = [a, b, addend.unwrap_or(d), d].map(device_address);
        Addresses { a, b, c, d }
    }

    /// What cuBLASLt does of it, for people: rows, columns, and what is summed over.
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

    fn key(&self) -> Result<Key, CudaError> {
        let [m, n, k] = self.call.size;
        for view in [self.bias, self.kept, self.call.addend].into_iter().flatten() {
            same_type(view, self.call.d)?;
        }
        let addend = match self.call.addend {
            Some(view) if view.address() != self.call.d.address() => Addend::Other,
            Some(_) | None => Addend::Nothing,
        };
        Ok(Key {
            maker: self.maker,
            m,
            n,
            k,
            transposed: self.call.transposed,
            input: same_type(self.call.a, self.call.b)?,
            output: self.call.d.dtype(),
            epilogue: self.epilogue,
            addend,
            alignments: product::alignments(self.addresses()),
        })
    }
}

impl Products {
    /// Products on a stream, which shares `workspace` with everything else that is enqueued on it.
    ///
    /// They are not tuned: each runs the algorithm that cuBLASLt thinks best, the same in every run.
    pub(crate) fn new(
        stream: &Stream,
        kernels: &Kernels,
        workspace: DeviceRange,
        listener: &Listener,
    ) -> Result<Self, CudaError> {
        let handle = Handle::new()?;
        let store = Store::open(&stream.context().name()?, library::version());
        Ok(Products {
            handle,
            stream: stream.clone(),
            workspace,
            launcher: Launcher::new(stream, kernels.clone(), workspace),
            tuning: Cell::new(false),
            in_bursts: Cell::new(false),
            listener: listener.clone(),
            has_tried: Cell::new(false),
            state: RefCell::new(State { products: HashMap::new(), store }),
        })
    }

    /// Whether to look for the fastest algorithms, on disk and by trying them when a product is first met. Results then
    /// depend, in their last bits, on how fast the candidates were.
    pub(crate) fn tune(&self, tuning: bool) {
        if self.tuning.replace(tuning) != tuning {
            self.state.borrow_mut().products.clear();
        }
    }

    /// From now on products that are tuned are tried in bursts alone. Such choices are not kept: work that lasts would take
    /// them for its own.
    pub(crate) fn tune_in_bursts(&self) {
        self.in_bursts.set(true);
    }

    /// Forgets the choices of earlier runs, and keeps none for later ones.
    pub(crate) fn forget_kept(&self) {
        self.state.borrow_mut().store = None;
    }

    /// See [`Linear`]. What follows the product can be cuBLASLt's epilogue, or for GELU a pass from the kept values
    /// to their GELU, or a pass over the plain product; or product and GELU are one kernel of ours. All but the third round
    /// at the same places.
    pub(crate) fn linear(&self, op: &Linear) -> Result<(), CudaError> {
        let call = Call {
            size: [op.outputs, op.rows, op.inputs],
            transposed: [true, false],
            a: op.weight,
            b: op.x,
            d: op.out,
            addend: None,
        };
        let epilogue = match (op.bias, op.gelu) {
            (None, None) => Epilogue::Nothing,
            (Some(_), None) => Epilogue::Bias,
            (None, Some(_)) => Epilogue::Gelu,
            (Some(_), Some(_)) => Epilogue::BiasGelu,
        };
        let fused = Call { addend: op.residual, ..call };
        let mut ways = vec![Way { epilogue, bias: op.bias, kept: op.gelu, ..Way::plain(fused) }];
        let activate = |launcher: &Launcher| match op.gelu {
            Some(kept) => activation::gelu(launcher, kept, op.out),
            None => Ok(()),
        };
        if let Some(kept) = op.gelu {
            let epilogue = if op.bias.is_some() { Epilogue::Bias } else { Epilogue::Nothing };
            let call = Call { d: kept, ..call };
            ways.push(Way { epilogue, bias: op.bias, finish: Some(&activate), ..Way::plain(call) });
        }
        let finish = |launcher: &Launcher| epilogue::finish(launcher, op);
        if epilogue != Epilogue::Nothing || op.residual.is_some() {
            ways.push(Way { finish: Some(&finish), ..Way::plain(call) });
        }
        let ours = |launcher: &Launcher| hopper::gelu(launcher, op);
        if hopper::has_gelu(&self.launcher, op) {
            ways.push(Way { maker: Maker::Ours, finish: Some(&ours), ..Way::plain(call) });
        }
        let apart = op.residual.is_none_or(|residual| residual.address() != op.out.address());
        if !apart {
            // The others would overwrite what they add.
            ways.truncate(1);
        }
        self.run(ways, apart)
    }

    /// See [`LinearBackwardInput`]. GELU's derivative is cuBLASLt's epilogue, or a pass over the product, and the
    /// bias's gradient a pass of its own; or all of it is one kernel of ours.
    pub(crate) fn linear_backward_input(&self, op: &LinearBackwardInput) -> Result<(), CudaError> {
        let call = Call {
            size: [op.inputs, op.rows, op.outputs],
            transposed: [false, false],
            a: op.weight,
            b: op.dy,
            d: op.dx,
            addend: None,
        };
        let sum = |launcher: &Launcher| match op.dbias {
            Some(out) => {
                let sum = ColumnSum { x: op.dx, out, rows: op.rows, width: op.inputs };
                column_sum::column_sum(launcher, &sum)
            }
            None => Ok(()),
        };
        let apart = op.gelu.is_none_or(|kept| kept.address() != op.dx.address());
        let repeatable = apart && op.dbias.is_none_or(|dbias| !dbias.accumulate);
        let Some(kept) = op.gelu else {
            return self.run(vec![Way { finish: Some(&sum), ..Way::plain(call) }], repeatable);
        };
        let finish = |launcher: &Launcher| {
            epilogue::gelu_derivative(launcher, kept, op.dx)?;
            sum(launcher)
        };
        let fused = Way {
            epilogue: Epilogue::GeluDerivative,
            kept: Some(kept),
            finish: Some(&sum),
            ..Way::plain(call)
        };
        let mut ways = vec![fused, Way { finish: Some(&finish), ..Way::plain(call) }];
        let ours = |launcher: &Launcher| hopper::gelu_derivative(launcher, op, kept);
        if hopper::has_gelu_derivative(&self.launcher, op, kept) {
            ways.push(Way { maker: Maker::Ours, finish: Some(&ours), ..Way::plain(call) });
        }
        if !apart {
            ways.truncate(1);
        }
        self.run(ways, repeatable)
    }

    /// See [`LinearBackwardWeight`]. The bias's gradient is a kernel of its own: cuBLASLt's epilogue for it cannot
    /// add to what is there.
    pub(crate) fn linear_backward_weight(&self, op: &LinearBackwardWeight) -> Result<(), CudaError> {
        let LinearBackwardWeight { dy, rows, outputs, dweight, .. } = *op;
        if let Some(out) = op.dbias {
            column_sum::column_sum(&self.launcher, &ColumnSum { x: dy, out, rows, width: outputs })?;
        }
        let product = Way::plain(Call {
            size: [op.inputs, outputs, rows],
            transposed: [false, true],
            a: op.x,
            b: dy,
            d: dweight.view,
            addend: dweight.accumulate.then_some(dweight.view),
        });
        self.run(vec![product], !dweight.accumulate)
    }

    /// Enqueues an operation in one of its ways: the fastest if products are tuned, else the first that there is.
    ///
    /// One that is `repeatable`, since it adds to nothing that is there and overwrites nothing that it reads, is done by all
    /// candidates to find the fastest. The others of its kind share what was found, and before that run the first
    /// candidate.
    fn run(&self, mut ways: Vec<Way>, repeatable: bool) -> Result<(), CudaError> {
        ways.retain(Way::is_aligned);
        if ways.is_empty() {
            let why = "a product in place whose bias or kept values are not at multiples of 16 bytes";
            return Err(CudaError::Unsupported(why.to_owned()));
        }
        let keys = ways.iter().map(Way::key).collect::<Result<Vec<_>, _>>()?;
        self.stream.note_all_of(&keys);
        let State { products, store } = &mut *self.state.borrow_mut();
        let Product { described, candidates } = match products.entry(keys) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let prepared = self.prepare(unknown.key(), &ways, store.as_ref())?;
                unknown.insert(prepared)
            }
        };
        let run = |chosen: Chosen| {
            self.run_way(described[chosen.way].as_ref(), &ways[chosen.way], &chosen.algorithm)
        };
        if repeatable && candidates.len() > 1 {
            if !self.has_tried.replace(true) {
                self.listener.tell(Notice::Trying);
            }
            let in_bursts = self.in_bursts.get();
            let fastest = tune::fastest(&self.stream, candidates, in_bursts, run)?;
            *candidates = vec![fastest];
            if let Some(store) = store.as_mut().filter(|_| !in_bursts) {
                store.put(&ways[0].key()?.to_string(), fastest);
            }
        }
        run(candidates[0])
    }

    fn prepare(&self, keys: &[Key], ways: &[Way], store: Option<&Store>) -> Result<Product, CudaError> {
        self.stream.novel();
        let tune = self.tuning.get();
        let stored = store.filter(|_| tune).and_then(|store| store.get(&keys[0].to_string()));
        let ways: Vec<(Key, Extras)> = keys.iter().copied().zip(ways.iter().map(Way::extras)).collect();
        Product::new(&self.handle, &ways, self.workspace.bytes, stored, tune)?
            .ok_or_else(|| CudaError::Unsupported(format!("cuBLASLt has no product {}", keys[0])))
    }

    fn run_way(
        &self,
        described: Option<&Described>,
        way: &Way,
        algorithm: &Algorithm,
    ) -> Result<(), CudaError> {
        if let Some(described) = described {
            let (extras, at) = (way.extras(), way.addresses());
            described.operation.set_extras(way.epilogue, extras, way.call.size[0])?;
            let add = way.call.addend.is_some();
            self.stream.note([at.a, at.b, at.c, at.d, extras.bias, extras.kept, add.into()]);
            self.stream.note(algorithm.data);
            self.stream.launching(
                || way.name(),
                || {
                    // SAFETY: the operation's views were checked against its shape, from which the key was made,
                    // and a rank's memory outlives what is enqueued on its stream.
                    unsafe { described.run(&self.handle, &self.stream, algorithm, at, add, self.workspace) }
                },
            )?;
        }
        way.finish.map_or(Ok(()), |finish| finish(&self.launcher))
    }
}

fn same_type(a: View, b: View) -> Result<DType, CudaError> {
    if a.dtype() == b.dtype() {
        return Ok(a.dtype());
    }
    Err(CudaError::Unsupported(format!("a product of {:?} and {:?}", a.dtype(), b.dtype())))
}

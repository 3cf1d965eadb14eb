//! Matrix products through cuBLASLt, with bias and GELU in the same kernel where cuBLASLt can.
//!
//! cuBLASLt's matrices are column-major, so a row-major matrix is seen as its transpose: `out = x · weightᵀ` becomes
//! `outᵀ = weight · xᵀ`, whose factors lie in memory as they are. Descriptions and algorithms are made once for
//! every kind of product.

mod epilogue;
mod library;
mod product;
mod store;
mod tune;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::column_sum;
use super::error::CudaError;
use super::kernels::Kernels;
use super::launcher::Launcher;
use super::stream::{DeviceRange, Stream};
use crate::ops::{ColumnSum, Linear, LinearBackwardInput, LinearBackwardWeight};
use crate::{DType, View};
use library::{Addresses, Handle};
use product::{Choice, Epilogue, Extras, Key, Product};
use store::Store;

/// The products of one stream.
#[derive(Debug)]
pub(crate) struct Products {
    stream: Stream,
    workspace: DeviceRange,
    launcher: Launcher,
    tuning: Cell<bool>,
    state: RefCell<State>,
    handle: Handle,
}

#[derive(Debug)]
struct State {
    /// `None` where cuBLASLt has no algorithm.
    products: HashMap<Key, Option<Product>>,
    store: Option<Store>,
}

/// Three matrices and what is computed with them; `m`, `n`, `k` as in [`Key`].
struct Call<'a> {
    size: [usize; 3],
    transposed: [bool; 2],
    a: View<'a>,
    b: View<'a>,
    d: View<'a>,
    accumulate: bool,
}

impl Products {
    /// Products on a stream, which shares `workspace` with everything else that is enqueued on it.
    ///
    /// They are not tuned: each runs the algorithm that cuBLASLt thinks best, the same in every run.
    pub(crate) fn new(stream: &Stream, kernels: &Kernels, workspace: DeviceRange) -> Result<Self, CudaError> {
        let handle = Handle::new()?;
        let store = Store::open(&stream.context().name()?, library::version());
        Ok(Products {
            handle,
            stream: stream.clone(),
            workspace,
            launcher: Launcher::new(stream, kernels.clone(), workspace),
            tuning: Cell::new(false),
            state: RefCell::new(State { products: HashMap::new(), store }),
        })
    }

    /// Whether to look for the fastest algorithms, on disk and by trying them. Results then depend, in their last
    /// bits, on how fast the candidates were.
    pub(crate) fn tune(&self, tuning: bool) {
        if self.tuning.replace(tuning) != tuning {
            self.state.borrow_mut().products.clear();
        }
    }

    /// See [`Linear`].
    pub(crate) fn linear(&self, op: &Linear) -> Result<(), CudaError> {
        let call = Call {
            size: [op.outputs, op.rows, op.inputs],
            transposed: [true, false],
            a: op.weight,
            b: op.x,
            d: op.out,
            accumulate: false,
        };
        let epilogue = match (op.bias, op.gelu) {
            (None, None) => Epilogue::Nothing,
            (Some(_), None) => Epilogue::Bias,
            (None, Some(_)) => Epilogue::Gelu,
            (Some(_), Some(_)) => Epilogue::BiasGelu,
        };
        if !self.run(&call, epilogue, op.bias, op.gelu)? {
            self.run_plain(&call)?;
            epilogue::bias_gelu(&self.launcher, op)?;
        }
        Ok(())
    }

    /// See [`LinearBackwardInput`].
    pub(crate) fn linear_backward_input(&self, op: &LinearBackwardInput) -> Result<(), CudaError> {
        let call = Call {
            size: [op.inputs, op.rows, op.outputs],
            transposed: [false, false],
            a: op.weight,
            b: op.dy,
            d: op.dx,
            accumulate: false,
        };
        let epilogue = if op.gelu.is_some() { Epilogue::GeluDerivative } else { Epilogue::Nothing };
        if !self.run(&call, epilogue, None, op.gelu)? {
            self.run_plain(&call)?;
            epilogue::gelu_derivative(&self.launcher, op)?;
        }
        Ok(())
    }

    /// See [`LinearBackwardWeight`]. The bias's gradient is a kernel of its own: cuBLASLt's epilogue for it cannot
    /// add to what is there.
    pub(crate) fn linear_backward_weight(&self, op: &LinearBackwardWeight) -> Result<(), CudaError> {
        let LinearBackwardWeight { dy, rows, outputs, .. } = *op;
        if let Some(out) = op.dbias {
            column_sum::column_sum(&self.launcher, &ColumnSum { x: dy, out, rows, width: outputs })?;
        }
        self.run_plain(&Call {
            size: [op.inputs, outputs, rows],
            transposed: [false, true],
            a: op.x,
            b: dy,
            d: op.dweight.view,
            accumulate: op.dweight.accumulate,
        })
    }

    fn run_plain(&self, call: &Call) -> Result<(), CudaError> {
        if self.run(call, Epilogue::Nothing, None, None)? {
            return Ok(());
        }
        let (size, a, d) = (call.size, call.a.dtype(), call.d.dtype());
        Err(CudaError::Unsupported(format!("cuBLASLt has no product of {size:?} from {a:?} to {d:?}")))
    }

    /// Enqueues a product, or answers `false` if cuBLASLt has none with this epilogue.
    fn run(
        &self,
        call: &Call,
        epilogue: Epilogue,
        bias: Option<View>,
        kept: Option<View>,
    ) -> Result<bool, CudaError> {
        let [a, b, d] = [call.a, call.b, call.d].map(|view| view.address());
        let at = Addresses { a, b, d };
        let [m, n, k] = call.size;
        let key = Key {
            m,
            n,
            k,
            transposed: call.transposed,
            input: same_type(call.a, call.b)?,
            output: call.d.dtype(),
            epilogue,
            accumulate: call.accumulate,
            alignments: product::alignments(at),
        };
        let address = |view: Option<View>| view.map_or(0, |view| view.address());
        let extras = Extras { bias: address(bias), kept: address(kept) };
        // The kept values must be aligned like the result; cuBLASLt does not look at their address itself.
        if !(extras.bias | extras.kept).is_multiple_of(product::ALIGNMENT.into()) {
            return Ok(false);
        }
        let State { products, store } = &mut *self.state.borrow_mut();
        let product = match products.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(self.prepare(&key, extras, store.as_ref())?),
        };
        let Some(product) = product else {
            return Ok(false);
        };
        self.enqueue(product, &key, extras, at, store.as_mut())?;
        Ok(true)
    }

    fn prepare(
        &self,
        key: &Key,
        extras: Extras,
        store: Option<&Store>,
    ) -> Result<Option<Product>, CudaError> {
        let tune = self.tuning.get();
        let stored = store.filter(|_| tune).and_then(|store| store.get(&key.to_string()));
        Product::new(&self.handle, key, extras, self.workspace.bytes, stored, tune)
    }

    fn enqueue(
        &self,
        product: &mut Product,
        key: &Key,
        extras: Extras,
        at: Addresses,
        store: Option<&mut Store>,
    ) -> Result<(), CudaError> {
        product.set_extras(key, extras)?;
        if let Choice::Trial(trial) = &mut product.choice
            && let Some(fastest) = trial.verdict()?
        {
            product.choice = Choice::Made(fastest);
            if let Some(store) = store {
                store.put(&key.to_string(), fastest);
            }
        }
        let described = &product.described;
        // SAFETY: the operation's views were checked against its shape, from which the key was made, and a rank's
        // memory outlives what is enqueued on its stream.
        let run = |algorithm: &_| unsafe {
            described.run(&self.handle, &self.stream, algorithm, at, key.accumulate, self.workspace)
        };
        match &mut product.choice {
            Choice::Made(algorithm) => run(algorithm),
            Choice::Trial(trial) => trial.run(&self.stream, run),
        }
    }
}

fn same_type(a: View, b: View) -> Result<DType, CudaError> {
    if a.dtype() == b.dtype() {
        return Ok(a.dtype());
    }
    Err(CudaError::Unsupported(format!("a product of {:?} and {:?}", a.dtype(), b.dtype())))
}

//! GELU by the error function (arXiv 1606.08415): `x·Φ(x)`, with the normal distribution's `Φ(x) = ½(1 + erf(x/√2))`.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use super::access::Access;
use super::element::{Element, Real};
use super::parallel::Threads;
use crate::View;

/// `to = GELU(from)`.
pub fn forward<T: Element>(threads: Threads, from: View, to: View) {
    let access = Access::new();
    let (from, to) = (access.read::<T>(from), access.write::<T>(to));
    threads.each(to.len(), 8, (from, to), |_, (from, to)| {
        for (to, &from) in to.iter_mut().zip(from) {
            let x = from.widen();
            *to = T::narrow(x * share(x));
        }
    });
}

/// `d = d ∘ GELU'(from)`.
pub fn backward<T: Element>(threads: Threads, from: View, d: View) {
    let access = Access::new();
    let (from, d) = (access.read::<T>(from), access.write::<T>(d));
    threads.each(d.len(), 16, (from, d), |_, (from, d)| {
        for (d, &from) in d.iter_mut().zip(from) {
            *d = T::narrow(d.widen() * derivative(from.widen()));
        }
    });
}

/// `Φ(x)`.
fn share<A: Real>(x: A) -> A {
    A::from_f64(0.5) * (A::ONE + (x * A::from_f64(FRAC_1_SQRT_2)).erf())
}

/// `Φ(x) + x·φ(x)`.
fn derivative<A: Real>(x: A) -> A {
    let density = A::from_f64(0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2) * (A::from_f64(-0.5) * x * x).exp();
    share(x) + x * density
}

#[cfg(test)]
mod tests {
    use crate::cpu::testing::{TestBackend, assert_close, assert_gradient, dot, random};
    use crate::{Backend, DType};

    #[test]
    fn known_values_and_their_derivative() {
        let backend = TestBackend::new(1);
        let forward = |x: &[f64]| {
            let to = backend.blank(x.len(), DType::F64);
            backend.cpu.exact_gelu(backend.buffer(x, DType::F64).view(), to.view());
            backend.values(to.view())
        };
        // x·Φ(x), with Φ from a table of the normal distribution.
        let expected = [-0.158_655_253_931_457_05, 0.0, 0.841_344_746_068_542_9, 1.954_499_736_103_641_6];
        assert_close(&forward(&[-1.0, 0.0, 1.0, 2.0]), &expected, 1e-15);

        let (x, d) = (random(40, 1), random(40, 2));
        let dx = backend.buffer(&d, DType::F64);
        let d = backend.values(dx.view());
        backend.cpu.exact_gelu_backward(backend.buffer(&x, DType::F64).view(), dx.view());
        assert_gradient(&x, &backend.values(dx.view()), |x| dot(&forward(x), &d));
    }
}

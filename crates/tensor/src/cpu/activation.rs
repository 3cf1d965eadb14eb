//! GELU in its tanh form, and gated linear units: SwiGLU and GeGLU.
//!
//! `½(1 + tanh u) = σ(2u)`, so both are the input times a logistic function, and loops over `exp` vectorise.

use super::access::Access;
use super::element::{Element, Real};
use super::parallel::{Rows, Threads};
use crate::View;
use crate::ops::{GateFunction, Gated, GatedBackward};

/// `2·√(2/π)`.
const SLOPE: f64 = 1.595_769_121_605_730_8;
const CUBIC: f64 = 0.044_715;

#[inline]
fn logistic<A: Real>(x: A) -> A {
    A::ONE / (A::ONE + (-x).exp())
}

/// `x · σ(2u)` with `2u = 2√(2/π) (x + 0.044715 x³)`.
#[inline]
pub fn gelu<A: Real>(x: A) -> A {
    let (slope, cubic) = (A::from_f64(SLOPE), A::from_f64(SLOPE * CUBIC));
    x * logistic(x * (x * x).mul_add(cubic, slope))
}

/// The derivative of [`gelu`].
#[inline]
pub fn gelu_derivative<A: Real>(x: A) -> A {
    let (slope, cubic) = (A::from_f64(SLOPE), A::from_f64(SLOPE * CUBIC));
    let square = x * x;
    let s = logistic(x * square.mul_add(cubic, slope));
    let inner = square.mul_add(A::from_f64(3.0 * SLOPE * CUBIC), slope);
    s + x * s * (A::ONE - s) * inner
}

/// `to = GELU(from)`.
pub fn gelu_forward<T: Element>(threads: Threads, from: View, to: View) {
    let access = Access::new();
    let (from, to) = (access.read::<T>(from), access.write::<T>(to));
    threads.each(to.len(), 4, (from, to), |_, (from, to)| {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = T::narrow(gelu(from.widen()));
        }
    });
}

/// `x · σ(x)`.
#[inline]
fn silu<A: Real>(x: A) -> A {
    x * logistic(x)
}

/// See [`Gated`].
pub fn gated<T: Element>(threads: Threads, op: &Gated) {
    match op.gate {
        GateFunction::Silu => gated_by::<T>(threads, op, silu),
        GateFunction::Gelu => gated_by::<T>(threads, op, gelu),
    }
}

fn gated_by<T: Element>(
    threads: Threads,
    op: &Gated,
    function: impl Fn(T::Accumulator) -> T::Accumulator + Sync,
) {
    let access = Access::new();
    let (x, out, width) = (access.read::<T>(op.x), access.write::<T>(op.out), op.width);
    threads.each(op.rows, 4 * width, (Rows(x, 2 * width), Rows(out, width)), |_, (x, out)| {
        for (x, out) in x.0.chunks_exact(2 * width).zip(out.0.chunks_exact_mut(width)) {
            let (gate, up) = x.split_at(width);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = T::narrow(function(gate.widen()) * up.widen());
            }
        }
    });
}

/// See [`GatedBackward`].
pub fn gated_backward<T: Element>(threads: Threads, op: &GatedBackward) {
    match op.gate {
        GateFunction::Silu => gated_backward_by::<T>(threads, op, |gate, up, d| {
            let s = logistic(gate);
            [d * up * s * (T::Accumulator::ONE + gate * (T::Accumulator::ONE - s)), d * gate * s]
        }),
        GateFunction::Gelu => {
            gated_backward_by::<T>(threads, op, |gate, up, d| {
                [d * up * gelu_derivative(gate), d * gelu(gate)]
            });
        }
    }
}

/// `gradients` computes those of gate and up from gate, up and the gradient of the output.
fn gated_backward_by<T: Element>(
    threads: Threads,
    op: &GatedBackward,
    gradients: impl Fn(T::Accumulator, T::Accumulator, T::Accumulator) -> [T::Accumulator; 2] + Sync,
) {
    let access = Access::new();
    let dout = access.read::<T>(op.dout);
    let (x, dx) = access.in_place::<T>(op.x, op.dx);
    let width = op.width;
    let parts = (Rows(dout, width), x.map(|x| Rows(x, 2 * width)), Rows(dx, 2 * width));
    threads.each(op.rows, 4 * width, parts, |rows, (dout, x, dx)| {
        for row in 0..rows.len() {
            let dx = &mut dx.0[2 * row * width..][..2 * width];
            if let Some(x) = &x {
                dx.copy_from_slice(&x.0[2 * row * width..][..2 * width]);
            }
            // `dx` holds `x`.
            let (gate, up) = dx.split_at_mut(width);
            for ((gate, up), &dout) in gate.iter_mut().zip(up).zip(&dout.0[row * width..][..width]) {
                let [dgate, dup] = gradients(gate.widen(), up.widen(), dout.widen());
                (*gate, *up) = (T::narrow(dgate), T::narrow(dup));
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, assert_close, assert_gradient, dot, random};
    use crate::{Backend, DType};

    #[test]
    fn gelu_is_the_tanh_form_and_has_its_derivative() {
        for x in (-80..=80).map(|i| f64::from(i) * 0.1) {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            assert!((gelu(x) - 0.5 * x * (1.0 + u.tanh())).abs() < 1e-14);
            assert!((f64::from(gelu(x as f32)) - gelu(f64::from(x as f32))).abs() < 1e-6);
            assert_gradient(&[x], &[gelu_derivative(x)], |x| gelu(x[0]));
        }
    }

    #[test]
    fn gelu_of_a_buffer() {
        let (backend, x) = (TestBackend::new(1), random(50, 1));
        let out = backend.blank(50, DType::F64);
        backend.cpu.gelu(backend.buffer(&x, DType::F64).view(), out.view());
        assert_eq!(backend.values(out.view()), x.iter().map(|&x| gelu(x)).collect::<Vec<_>>());
    }

    #[test]
    fn gated_units_are_the_definition_and_backward_their_derivative_also_in_place() {
        for gate in [GateFunction::Silu, GateFunction::Gelu] {
            check_gated(gate);
        }
    }

    fn check_gated(unit: GateFunction) {
        let (backend, rows, width) = (TestBackend::new(1), 2, 9);
        let (x, dout) = (random(2 * rows * width, 1), random(rows * width, 2));
        let forward = |x: &[f64]| {
            let out = backend.blank(rows * width, DType::F64);
            let x = backend.buffer(x, DType::F64);
            backend.cpu.gated(Gated { x: x.view(), out: out.view(), gate: unit, rows, width });
            backend.values(out.view())
        };
        let expected: Vec<f64> = (0..rows * width)
            .map(|i| {
                let gate = x[i / width * 2 * width + i % width];
                let value = match unit {
                    GateFunction::Silu => gate / (1.0 + (-gate).exp()),
                    GateFunction::Gelu => gelu(gate),
                };
                value * x[i / width * 2 * width + width + i % width]
            })
            .collect();
        assert_close(&forward(&x), &expected, 1e-14);

        let (input, dx) = (backend.buffer(&x, DType::F64), backend.blank(x.len(), DType::F64));
        for dx in [dx.view(), input.view()] {
            let dout = backend.buffer(&dout, DType::F64);
            backend.cpu.gated_backward(GatedBackward {
                dout: dout.view(),
                x: input.view(),
                dx,
                gate: unit,
                rows,
                width,
            });
            let dout = backend.values(dout.view());
            assert_gradient(&x, &backend.values(dx), |x| dot(&forward(x), &dout));
        }
    }
}

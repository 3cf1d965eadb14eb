//! How results of two backends are compared.

use std::rc::Rc;

use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Backend, Buffer, DType};

use crate::test_backend::TestBackend;

/// The results of an operation beside those of the CPU.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// The largest relative error of a result, in L2.
    pub error: f64,
    /// The result that has it.
    pub result: usize,
    /// Whether the device gave the same bits a second time.
    pub repeats: bool,
}

/// Runs an operation on the CPU, and twice on a device.
pub fn compare(device: &dyn Backend, dtype: DType, body: &dyn Fn(&TestBackend) -> Vec<Buffer>) -> Comparison {
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let run = |device: &dyn Backend| -> Vec<Vec<f32>> {
        let backend = TestBackend { device, dtype };
        body(&backend).iter().map(|buffer| backend.values(buffer)).collect()
    };
    let (expected, ours, again) = (run(&cpu), run(device), run(device));
    let bits = |results: &[Vec<f32>]| -> Vec<u32> { results.iter().flatten().map(|x| x.to_bits()).collect() };
    let errors = ours.iter().zip(&expected).map(|(ours, expected)| distance(ours, expected));
    let (result, error) = errors.enumerate().fold((0, 0.0), |worst: (usize, f64), one| {
        // A NaN is no small error.
        if one.1 > worst.1 || one.1.is_nan() { one } else { worst }
    });
    Comparison { error, result, repeats: bits(&ours) == bits(&again) }
}

/// How far results in a type may be from the CPU's, relative to it, in L2.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-5,
    }
}

/// `‖a − b‖ / ‖b‖`. Numbers that are not finite are left out if they are equal on both sides; otherwise the distance is infinite.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "results of different lengths");
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        if !(a.is_finite() && b.is_finite()) {
            if a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) {
                continue;
            }
            return f64::INFINITY;
        }
        difference += f64::from(a - b).powi(2);
        norm += f64::from(b).powi(2);
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_relative_and_notice_what_is_not_finite() {
        assert!((distance(&[3.0, 4.0], &[3.0, 5.0]) - 1.0 / 34.0_f64.sqrt()).abs() < 1e-12);
        assert!(distance(&[f32::NAN, 1.0], &[f32::NAN, 1.0]) < 1e-12);
        assert!(distance(&[f32::NAN, 1.0], &[2.0, 1.0]).is_infinite());
        assert!(distance(&[1.0], &[0.0]).is_infinite());
    }
}

//! Blockwise quantisation to small integers.

use super::access::Access;
use super::element::{Element, Real};
use super::parallel::{Rows, Threads};
use crate::ops::{Bits, LEAST, Quantize, Restore};

/// See [`Quantize`].
pub fn quantize<T: Element>(threads: Threads, op: &Quantize) {
    let access = Access::new();
    let (x, codes) = (access.read::<T>(op.x), access.write_tokens(op.codes));
    let scales = access.write::<f32>(op.scales);
    let (block, bits) = (op.block, op.bits);
    let words = block / bits.per_word();
    let parts = (Rows(x, block), Rows(codes, words), scales);
    threads.each(op.scales.len(), block, parts, |_, (x, codes, scales)| {
        for ((x, codes), scale) in x.0.chunks(block).zip(codes.0.chunks_mut(words)).zip(scales) {
            let inverse;
            (*scale, inverse) = scale_and_inverse(x, bits);
            for (x, word) in x.chunks(bits.per_word()).zip(codes) {
                *word = pack(x.iter().map(|&x| (to_f32(x) * inverse).round_ties_even() as i32), bits);
            }
        }
    });
}

/// See [`Restore`].
pub fn restore<T: Element>(threads: Threads, op: &Restore) {
    let access = Access::new();
    let (codes, scales) = (access.tokens(op.codes), access.read::<f32>(op.scales));
    let out = access.write::<T>(op.out);
    let (block, bits, accumulate) = (op.block, op.bits, op.accumulate);
    let words = block / bits.per_word();
    let parts = (Rows(codes, words), scales, Rows(out, block));
    threads.each(op.scales.len(), block, parts, |_, (codes, scales, out)| {
        for ((codes, &scale), out) in codes.0.chunks(words).zip(scales).zip(out.0.chunks_mut(block)) {
            for (&word, out) in codes.iter().zip(out.chunks_mut(bits.per_word())) {
                for (out, code) in out.iter_mut().zip(unpack(word, bits)) {
                    let before = if accumulate { to_f32(*out) } else { 0.0 };
                    *out = T::narrow(T::Accumulator::from_f64((code as f32 * scale + before).into()));
                }
            }
        }
    });
}

fn to_f32<T: Element>(x: T) -> f32 {
    x.widen().to_f64() as f32
}

/// The scale of a block, and the factor for its numbers.
fn scale_and_inverse<T: Element>(x: &[T], bits: Bits) -> (f32, f32) {
    let largest = f32::from(bits.largest());
    // As integers, the bits of numbers that are not finite are larger than those of all others.
    let most = f32::from_bits(x.iter().map(|&x| to_f32(x).abs().to_bits()).max().unwrap_or(0));
    if !most.is_finite() {
        (f32::NAN, 0.0)
    } else if most < LEAST {
        (0.0, 0.0)
    } else {
        (most / largest, largest / most)
    }
}

/// The integers of a word, the first in the lowest bits.
fn pack(codes: impl Iterator<Item = i32>, bits: Bits) -> u32 {
    let mask = (1 << bits.count()) - 1;
    codes.enumerate().fold(0, |word, (i, code)| word | (code as u32 & mask) << (i * bits.count()))
}

fn unpack(word: u32, bits: Bits) -> impl Iterator<Item = i32> {
    let count = bits.count();
    (0..bits.per_word()).map(move |i| (word << (32 - count * (i + 1))) as i32 >> (32 - count))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{TestBackend, random};
    use super::*;
    use crate::{Backend, DType};

    /// The numbers after quantisation and restoring, added to `before` if given, and the scales.
    fn there_and_back(
        backend: &TestBackend,
        numbers: &[f64],
        dtype: DType,
        block: usize,
        bits: Bits,
        before: Option<f64>,
    ) -> (Vec<f64>, Vec<f64>) {
        let x = backend.buffer(numbers, dtype);
        let codes = backend.tokens(&vec![u32::MAX; numbers.len() / bits.per_word()]);
        let scales = backend.blank(numbers.len().div_ceil(block), DType::F32);
        let out = backend.buffer(&vec![before.unwrap_or(-7.5); numbers.len()], dtype);
        let (codes, scales, accumulate) = (codes.view(), scales.view(), before.is_some());
        backend.cpu.quantize(Quantize { x: x.view(), codes, scales, block, bits });
        backend.cpu.restore(Restore { codes, scales, out: out.view(), accumulate, block, bits });
        (backend.values(out.view()), backend.values(scales))
    }

    #[test]
    fn restored_numbers_are_within_half_a_step() {
        let (len, block) = (1000, 64);
        for bits in [Bits::Four, Bits::Eight] {
            let numbers: Vec<f64> = random(len, 3).iter().map(|&x| f64::from(x as f32)).collect();
            let backend = TestBackend::new(1);
            let (found, scales) = there_and_back(&backend, &numbers, DType::F32, block, bits, None);
            let (added, _) = there_and_back(&backend, &numbers, DType::F32, block, bits, Some(0.5));
            for ((i, x), (found, added)) in numbers.iter().enumerate().zip(found.iter().zip(added)) {
                let of_block = &numbers[i / block * block..len.min((i / block + 1) * block)];
                let most = of_block.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
                let scale = scales[i / block];
                assert!(
                    (scale * f64::from(bits.largest()) / most - 1.0).abs() < 1e-6,
                    "{bits:?} {i}: {scale}"
                );
                assert!((found - x).abs() <= scale * 0.5001, "{bits:?} {i}: {x} came back as {found}");
                assert!(
                    (found / scale - (found / scale).round()).abs() < 1e-4,
                    "{bits:?} {i}: between steps"
                );
                assert!((added - found - 0.5).abs() < 1e-6, "{bits:?} {i}: {added} is not {found} more");
            }
        }
    }

    #[test]
    fn ties_go_to_the_even_integer_and_signs_do_not_matter() {
        let numbers = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0];
        let (found, _) = there_and_back(&TestBackend::new(1), &numbers, DType::F32, 8, Bits::Eight, None);
        assert_eq!(found, [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, -127.0]);
    }

    #[test]
    fn blocks_of_nothing_are_zeros_and_what_is_not_finite_stays_in_its_block() {
        let backend = TestBackend::new(1);
        for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut numbers = vec![1.0; 32];
            numbers[..8].fill(0.0);
            numbers[8..16].fill(1e-38);
            numbers[19] = odd;
            let (found, scales) = there_and_back(&backend, &numbers, DType::F32, 8, Bits::Eight, None);
            assert_eq!((&found[..16], &scales[..2]), (&[0.0; 16][..], &[0.0; 2][..]));
            assert!(found[16..24].iter().all(|x| x.is_nan()) && scales[2].is_nan(), "{odd}");
            assert!(found[24..].iter().all(|x| (x - 1.0).abs() < 1e-6), "{odd}");
        }
    }

    #[test]
    fn the_same_for_all_threads_and_rounded_to_the_type_once() {
        let numbers = random(5000, 7);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            TestBackend::same_for_all_threads(|backend| {
                let (mut found, scales) =
                    there_and_back(backend, &numbers, dtype, 48, Bits::Four, Some(0.25));
                found.extend(scales);
                found
            });
        }
        let (found, scales) =
            there_and_back(&TestBackend::new(1), &numbers, DType::BF16, 48, Bits::Eight, None);
        for (i, found) in found.iter().enumerate() {
            let (x, scale) = (f64::from(bf16::from_f64(numbers[i])), scales[i / 48]);
            let step = (found / scale).round() as f32;
            assert_eq!(bf16::from_f64(*found), bf16::from_f32(step * scale as f32), "{i}");
            assert!((x / scale - f64::from(step)).abs() < 0.5001, "{i}: {x} came back as {found}");
        }
    }

    #[test]
    fn words_hold_integers_of_both_signs() {
        for bits in [Bits::Four, Bits::Eight] {
            let largest = i32::from(bits.largest());
            let codes: Vec<i32> = [0, 1, -1, largest, -largest, 3, -5, 2][..bits.per_word()].to_vec();
            assert_eq!(unpack(pack(codes.iter().copied(), bits), bits).collect::<Vec<_>>(), codes);
        }
        assert_eq!(pack([1, -1, 2, 0].into_iter(), Bits::Eight), 0x0002_ff01);
        assert_eq!(pack([1, -1, 2, 0, 0, 0, 0, 7].into_iter(), Bits::Four), 0x7000_02f1);
    }
}

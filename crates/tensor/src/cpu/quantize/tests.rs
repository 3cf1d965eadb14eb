//! Quantised bytes against the definition, and error bounds.

use half::{bf16, f16};
use proptest::prelude::*;

use super::super::testing::{TestBackend, added, fresh, random};
use super::*;
use crate::{Backend, Buffer, Category, DType};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Some slices of numbers and how they are quantised.
#[derive(Clone, Debug)]
struct Case {
    numbers: Vec<f64>,
    dtype: DType,
    slices: usize,
    format: BlockFormat,
}

impl Case {
    /// One slice.
    fn plain(numbers: &[f64], bits: Bits, block: usize) -> Self {
        let format = BlockFormat { bits, block };
        Case { numbers: numbers.to_vec(), dtype: DType::F32, slices: 1, format }
    }

    fn elements(&self) -> usize {
        self.numbers.len() / self.slices
    }

    fn x(&self, backend: &TestBackend) -> Buffer {
        backend.buffer(&self.numbers, self.dtype)
    }

    fn quantized(&self, backend: &TestBackend) -> Buffer {
        self.quantize(backend, &self.x(backend))
    }

    fn quantize(&self, backend: &TestBackend, x: &Buffer) -> Buffer {
        let out = bytes(backend, self.slices * self.format.slice_bytes(self.elements()));
        let (slices, format) = (self.slices, self.format);
        backend.cpu.quantize(Quantize { x: x.view(), out: out.view(), slices, format });
        out
    }

    /// The numbers of `parts` buffers of codes, summed.
    fn dequantized(&self, backend: &TestBackend, codes: &Buffer, parts: usize) -> Vec<f64> {
        let out = backend.blank(self.numbers.len(), self.dtype);
        let (slices, format) = (self.slices, self.format);
        backend.cpu.dequantize(Dequantize { codes: codes.view(), out: fresh(&out), parts, slices, format });
        backend.values(out.view())
    }

    /// The bytes by the definition, one number after the other.
    fn expected(&self, backend: &TestBackend) -> Vec<u8> {
        let (elements, BlockFormat { bits, block }) = (self.elements(), self.format);
        let numbers: Vec<f32> =
            backend.values(self.x(backend).view()).into_iter().map(|x| x as f32).collect();
        let slice = |slice: usize| {
            let numbers = &numbers[slice * elements..][..elements];
            let largest = f32::from(bits.largest());
            let (mut codes, mut scales) = (Vec::new(), Vec::new());
            for block in numbers.chunks(block) {
                let most = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                let finite = block.iter().all(|x| x.is_finite());
                let scale = if most < MIN_BLOCK_MAXIMUM { 0.0 } else { most / largest };
                scales.extend(if finite { scale } else { f32::NAN }.to_ne_bytes());
                let factor = if scale == 0.0 { 0.0 } else { largest / most };
                // A product of two fp32 numbers is exact in f64.
                let code = |x: f32| (f64::from(x) * f64::from(factor)).round_ties_even() as i8;
                codes.extend(block.iter().map(|&x| if finite { code(x) } else { 0 }));
            }
            let mut bytes: Vec<u8> = match bits {
                Bits::Eight => codes.iter().map(|&code| code as u8).collect(),
                Bits::Four => codes
                    .chunks(2)
                    .map(|pair| pair[0] as u8 & 15 | (pair.get(1).copied().unwrap_or(0) as u8) << 4)
                    .collect(),
            };
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes.extend(scales);
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            bytes
        };
        (0..self.slices).flat_map(slice).collect()
    }
}

/// Bytes that no kernel should leave.
fn bytes(backend: &TestBackend, len: usize) -> Buffer {
    let buffer = backend.cpu.allocate(len, DType::U8, Category::Communication);
    backend.cpu.upload_bytes(&vec![0xa5; len], buffer.view());
    buffer
}

fn read(backend: &TestBackend, buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    backend.cpu.download(buffer.view(), &mut bytes);
    bytes
}

/// Odd and short slices, numbers of very different magnitudes, many zeros, and sometimes one that is not finite.
fn cases() -> impl Strategy<Value = Case> {
    let number = prop_oneof![
        3 => (-1.0..1.0_f64, -14..5).prop_map(|(x, power)| x * 2.0_f64.powi(power)),
        1 => Just(0.0),
    ];
    let odd = prop_oneof![9 => Just(None), 1 => prop_oneof![
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::NEG_INFINITY),
    ]
    .prop_map(Some)];
    let shape = (1_usize..10, 1_usize..300, 0_usize..3, any::<bool>(), 0_usize..3);
    (shape, odd).prop_flat_map(move |((slices, elements, block, four, dtype), odd)| {
        let bits = if four { Bits::Four } else { Bits::Eight };
        let format = BlockFormat { bits, block: [32, 64, 128][block] };
        let len = slices * elements;
        (prop::collection::vec(number.clone(), len), 0..len).prop_map(move |(mut numbers, place)| {
            if let Some(odd) = odd {
                numbers[place] = odd;
            }
            Case { numbers, dtype: TYPES[dtype], slices, format }
        })
    })
}

proptest! {
    #[test]
    fn bytes_are_those_of_the_definition(case in cases()) {
        let backend = TestBackend::new(1);
        prop_assert_eq!(read(&backend, &case.quantized(&backend)), case.expected(&backend));
    }

    /// `code · scale` is within half a step, plus three roundings of `x · inverse · scale` and one to the type of `out`.
    #[test]
    fn errors_are_at_most_half_a_step(case in cases()) {
        let backend = TestBackend::new(1);
        let before = backend.values(case.x(&backend).view());
        let after = case.dequantized(&backend, &case.quantized(&backend), 1);
        let ulp = match case.dtype {
            DType::F16 => 2.0_f64.powi(-11),
            DType::BF16 => 2.0_f64.powi(-8),
            _ => 0.0,
        };
        for (before, after) in before.chunks(case.elements()).zip(after.chunks(case.elements())) {
            for (before, after) in before.chunks(case.format.block).zip(after.chunks(case.format.block)) {
                let finite = before.iter().all(|x| x.is_finite());
                let most = before.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
                let scale = most / f64::from(case.format.bits.largest());
                let bound = scale / 2.0 + most * (2.0_f64.powi(-22) + ulp);
                for (x, y) in before.iter().zip(after) {
                    if finite {
                        prop_assert!((x - y).abs() <= bound, "{} came back as {}, {}", x, y, bound);
                    } else {
                        prop_assert!(y.is_nan(), "{} in a block that is not finite", y);
                    }
                }
            }
        }
    }

    /// Every number is `code · scale`, rounded to fp32 and then to its type, even if both are tiny.
    #[test]
    fn numbers_are_codes_times_scales(case in cases(), tiny in any::<bool>()) {
        let backend = TestBackend::new(1);
        let factor = if tiny { f64::from(MIN_BLOCK_MAXIMUM) / 8.0 } else { 1.0 };
        let numbers = case.numbers.iter().map(|x| x * factor).collect();
        let case = Case { numbers, ..case };
        let (elements, BlockFormat { bits, block }) = (case.elements(), case.format);
        let codes = case.quantized(&backend);
        let bytes = read(&backend, &codes);
        let found = case.dequantized(&backend, &codes, 1);
        for (i, found) in found.into_iter().enumerate() {
            let (slice, i) = (&bytes[i / elements * case.format.slice_bytes(elements)..], i % elements);
            let code = match bits {
                Bits::Eight => slice[i] as i8,
                Bits::Four => (slice[i / 2] >> (4 * (i % 2)) << 4) as i8 >> 4,
            };
            let scale = slice[case.format.code_bytes(elements) + 4 * (i / block)..].first_chunk();
            let product = f32::from(code) * f32::from_ne_bytes(*scale.expect("a scale"));
            let expected = match case.dtype {
                DType::BF16 => bf16::from_f32(product).to_f64(),
                DType::F16 => f16::from_f32(product).to_f64(),
                _ => f64::from(product),
            };
            let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
            prop_assert!(same, "{} instead of {}", found, expected);
        }
    }

    /// What several ranks sent is summed in fp32 in their order, after what is there; and quantised again as if it had
    /// been stored in fp32.
    #[test]
    fn parts_are_summed_in_order(case in cases(), parts in 1_usize..5, accumulate in any::<bool>()) {
        let backend = TestBackend::new(1);
        let part = |shift: usize| {
            let mut numbers = case.numbers.clone();
            numbers.rotate_left(shift % case.numbers.len());
            Case { numbers, dtype: DType::F32, ..case.clone() }
        };
        let slice_bytes = case.format.slice_bytes(case.elements());
        let codes = bytes(&backend, parts * case.slices * slice_bytes);
        let mut sums = vec![if accumulate { 0.3_f32 } else { 0.0 }; case.numbers.len()];
        for index in 0..parts {
            let quantized = part(17 * index).quantized(&backend);
            let place = index * quantized.len()..(index + 1) * quantized.len();
            backend.cpu.upload_bytes(&read(&backend, &quantized), codes.slice(place));
            // A sum of one part by itself is exactly `code · scale`, so adding it rounds only once more.
            let own = part(17 * index).dequantized(&backend, &quantized, 1);
            for (sum, own) in sums.iter_mut().zip(own) {
                *sum += own as f32;
            }
        }
        let (slices, format, elements) = (case.slices, case.format, case.elements());
        let out = backend.buffer(&vec![if accumulate { f64::from(0.3_f32) } else { 9.0 }; sums.len()], DType::F32);
        let gradient = if accumulate { added(&out) } else { fresh(&out) };
        backend.cpu.dequantize(Dequantize { codes: codes.view(), out: gradient, parts, slices, format });
        for (sum, found) in sums.iter().zip(backend.values(out.view())) {
            let close = (f64::from(*sum) - found).abs() <= 1e-5 * f64::from(sum.abs()).max(1.0);
            prop_assert!(close || sum.is_nan() && found.is_nan(), "{} against {}", found, sum);
        }
        if !accumulate {
            let again = bytes(&backend, case.slices * slice_bytes);
            let op = Requantize { codes: codes.view(), out: again.view(), parts, slices, elements, format };
            backend.cpu.requantize(op);
            let whole = Case { dtype: DType::F32, ..case };
            let stored = whole.quantize(&backend, &out);
            prop_assert_eq!(read(&backend, &again), read(&backend, &stored));
        }
    }
}

#[test]
fn ties_go_to_the_even_integer_and_signs_do_not_matter() {
    let numbers = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0];
    let (case, backend) = (Case::plain(&numbers, Bits::Eight, 32), TestBackend::new(1));
    let found = case.dequantized(&backend, &case.quantized(&backend), 1);
    assert_eq!(found, [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, -127.0]);
}

#[test]
fn a_slice_is_codes_then_scales_then_padding() {
    let backend = TestBackend::new(1);
    let four = Case::plain(&[7.0, -7.0, 3.0, -1.0, 2.0], Bits::Four, 32);
    let mut expected = vec![0x97, 0xf3, 0x02, 0];
    expected.extend(1.0_f32.to_ne_bytes());
    expected.resize(16, 0);
    assert_eq!(read(&backend, &four.quantized(&backend)), expected);
    let eight = Case::plain(&[127.0, -127.0, 3.0, -1.0, 2.0], Bits::Eight, 32);
    let mut expected = vec![127, 129, 3, 255, 2, 0, 0, 0];
    expected.extend(1.0_f32.to_ne_bytes());
    expected.resize(16, 0);
    assert_eq!(read(&backend, &eight.quantized(&backend)), expected);
    let format = BlockFormat { bits: Bits::Four, block: 256 };
    assert_eq!(format.slice_bytes(4096), 2048 + 16 * 4, "whole blocks need no padding here");
}

#[test]
fn blocks_of_nothing_are_zeros_and_what_is_not_finite_stays_in_its_block() {
    let backend = TestBackend::new(1);
    for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut numbers = vec![1.0; 128];
        numbers[..32].fill(0.0);
        numbers[32..64].fill(1e-38);
        numbers[75] = odd;
        let case = Case::plain(&numbers, Bits::Eight, 32);
        let found = case.dequantized(&backend, &case.quantized(&backend), 1);
        assert_eq!(found[..64], [0.0; 64]);
        assert!(found[64..96].iter().all(|x| x.is_nan()), "{odd}");
        assert!(found[96..].iter().all(|x| (x - 1.0).abs() < 1e-6), "{odd}");
    }
}

#[test]
fn the_same_for_all_threads_and_rounded_to_the_type_once() {
    let numbers = random(6000, 7);
    for (dtype, bits) in TYPES.into_iter().flat_map(|dtype| [(dtype, Bits::Four), (dtype, Bits::Eight)]) {
        let plain = Case::plain(&numbers, bits, 64);
        let case = Case { dtype, slices: 6, ..plain };
        TestBackend::same_for_all_threads(|backend| {
            let codes = case.quantized(backend);
            let (slices, elements, format) = (2, case.elements(), case.format);
            let out = bytes(backend, slices * format.slice_bytes(elements));
            let sums =
                Requantize { codes: codes.view(), out: out.view(), parts: 3, slices, elements, format };
            backend.cpu.requantize(sums);
            let mut found = case.dequantized(backend, &codes, 1);
            found.extend([codes, out].iter().flat_map(|buffer| read(backend, buffer)).map(f64::from));
            found
        });
    }
    let backend = TestBackend::new(1);
    let (wide, narrow) = (Case::plain(&numbers, Bits::Eight, 64), Case::plain(&numbers, Bits::Eight, 64));
    let codes = wide.quantized(&backend);
    let narrow = Case { dtype: DType::BF16, ..narrow };
    let exact = wide.dequantized(&backend, &codes, 1);
    for (exact, rounded) in exact.iter().zip(narrow.dequantized(&backend, &codes, 1)) {
        assert_eq!(bf16::from_f64(rounded).to_bits(), bf16::from_f64(*exact).to_bits());
    }
}

#[test]
#[should_panic(expected = "power of two")]
fn blocks_are_powers_of_two() {
    Case::plain(&[0.0; 96], Bits::Four, 96).quantized(&TestBackend::new(1));
}

//! The product against its definition, and the same bits for every kernel, tile position and number of threads.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};

use half::{bf16, f16};

use super::block::DEPTH;
use super::kernel::InstructionSet;
use super::*;
use crate::cpu::element::Real;

/// Numbers in [−½, ½), the same every time.
fn numbers<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1 << 24) as f64 - 0.5
    };
    (0..len).map(|_| T::narrow(T::Accumulator::from_f64(next()))).collect()
}

/// A product with its own operands, stored in any of the four orders.
#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    transposed: (bool, bool),
    accumulate: bool,
}

impl Case {
    fn operands<T: Element>(self) -> (Vec<T>, Vec<T>) {
        (numbers(self.m * self.k, 1), numbers(self.k * self.n, 2))
    }

    fn old<T: Element>(self) -> Vec<T> {
        numbers(self.m * self.n, 3)
    }

    fn operand<T>(data: &[T], rows: usize, columns: usize, transposed: bool) -> Operand<'_, T> {
        if transposed { Operand::new(data, rows).transposed() } else { Operand::new(data, columns) }
    }

    fn run<In, Out>(
        self,
        set: InstructionSet,
        threads: usize,
        epilogue: Option<Epilogue<In::Accumulator>>,
    ) -> Vec<Out>
    where
        In: Element,
        Out: Element<Accumulator = In::Accumulator>,
    {
        let Case { m, n, k, transposed, accumulate } = self;
        let (a, b) = self.operands::<In>();
        let mut out = self.old::<Out>();
        let mut scratch = vec![0; threads * SCRATCH_BYTES];
        let product = Product {
            m,
            n,
            k,
            a: Self::operand(&a, m, k, transposed.0),
            b: Self::operand(&b, k, n, transposed.1),
            out: Output::new(&mut out, n),
            accumulate,
        };
        run(set, product, epilogue, &mut scratch, threads);
        out
    }

    /// The definition, in f64.
    fn expected<In: Element, Out: Element>(self) -> Vec<f64> {
        let Case { m, n, k, transposed, accumulate } = self;
        let (a, b) = self.operands::<In>();
        let (a, b) = (Self::operand(&a, m, k, transposed.0), Self::operand(&b, k, n, transposed.1));
        let at = |x: &Operand<In>, i: usize, j: usize| {
            x.data[i * x.row_stride + j * x.column_stride].widen().to_f64()
        };
        let old = self.old::<Out>();
        (0..m * n)
            .map(|index| {
                let (i, j) = (index / n, index % n);
                let start = if accumulate { old[index].widen().to_f64() } else { 0.0 };
                (0..k).fold(start, |sum, p| sum + at(&a, i, p) * at(&b, p, j))
            })
            .collect()
    }

    fn check<In, Out>(self, precision: f64)
    where
        In: Element,
        Out: Element<Accumulator = In::Accumulator>,
    {
        let expected = self.expected::<In, Out>();
        for set in InstructionSet::available::<In::Accumulator>() {
            let out = self.run::<In, Out>(set, 1, None);
            for (index, (got, want)) in out.iter().zip(&expected).enumerate() {
                let error = (got.widen().to_f64() - want).abs();
                assert!(
                    error <= precision * (1.0 + want.abs()),
                    "{self:?} on {set:?} at {index}: off by {error:e}"
                );
            }
        }
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|value| value.widen().to_f64().to_bits()).collect()
}

fn in_pool<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads").install(run)
}

#[test]
fn products_match_the_definition_in_every_type_and_order() {
    let shapes = [
        (1, 1, 1),
        (8, 16, 16),
        (3, 5, 7),
        (4, 24, 8),
        (8, 32, 8),
        (17, 1, 300),
        (1, 70, 9),
        (37, 67, 31),
        (33, 40, DEPTH),
        (9, 33, DEPTH + 1),
        (40, 35, 2 * DEPTH + 12),
        (0, 4, 4),
    ];
    for (m, n, k) in shapes {
        for (left, right, accumulate) in
            [0, 1, 2, 3, 4, 5, 6, 7].map(|x| (x & 1 != 0, x & 2 != 0, x & 4 != 0))
        {
            let case = Case { m, n, k, transposed: (left, right), accumulate };
            case.check::<f32, f32>(3e-6);
            case.check::<f64, f64>(1e-14);
            case.check::<bf16, bf16>(4e-3);
            case.check::<bf16, f32>(3e-6);
            case.check::<f16, f16>(6e-4);
            case.check::<f32, bf16>(4e-3);
        }
    }
}

#[test]
fn blocks_of_rows_and_columns_match_the_definition() {
    // More columns than a block of `b` holds. With 16-bit output, more rows than sums fit into scratch.
    Case { m: 9, n: 700, k: 300, transposed: (false, true), accumulate: true }.check::<f32, f32>(3e-6);
    Case { m: 600, n: 530, k: DEPTH + 3, transposed: (true, false), accumulate: true }
        .check::<bf16, bf16>(4e-3);
}

#[test]
fn bits_are_the_same_on_every_instruction_set_and_number_of_threads() {
    fn check<In: Element, Out: Element<Accumulator = In::Accumulator> + Debug>(case: Case) {
        let reference = bits(&case.run::<In, Out>(InstructionSet::Portable, 1, None));
        for set in InstructionSet::available::<In::Accumulator>() {
            for threads in [1, 2, 3, 5] {
                let out = in_pool(threads, || case.run::<In, Out>(set, threads, None));
                assert!(bits(&out) == reference, "{case:?} on {set:?} with {threads} threads");
            }
        }
    }
    let case = Case { m: 75, n: 133, k: 2 * DEPTH + 20, transposed: (false, true), accumulate: true };
    assert!(case.m * case.n * case.k >= 5 << 19, "enough work for five threads");
    check::<f32, f32>(case);
    check::<bf16, bf16>(case);
    check::<f64, f64>(Case { transposed: (true, false), ..case });
}

#[test]
fn bits_do_not_depend_on_the_position() {
    let Case { m, n, k, .. } =
        Case { m: 30, n: 61, k: DEPTH + 5, transposed: (false, false), accumulate: false };
    let (a, b) = (numbers::<f32>(m * k, 1), numbers::<f32>(k * n, 2));
    let multiply = |m, n, a, b| {
        let mut out = vec![0.0_f32; m * n];
        let product = Product { m, n, k, a, b, out: Output::new(&mut out, n), accumulate: false };
        gemm(product, None, &mut vec![0; SCRATCH_BYTES], 1);
        out
    };
    let whole = multiply(m, n, Operand::new(&a, k), Operand::new(&b, n));
    for (row, column) in [(0, 0), (7, 31), (8, 32), (29, 60)] {
        let alone = multiply(1, 1, Operand::new(&a[row * k..], k), Operand::new(&b[column..], n));
        assert_eq!(alone[0].to_bits(), whole[row * n + column].to_bits(), "at ({row}, {column})");
    }
}

#[test]
fn narrow_outputs_are_rounded_once() {
    let case = Case { m: 21, n: 50, k: 4 * DEPTH, transposed: (false, true), accumulate: false };
    for set in InstructionSet::available::<f32>() {
        let wide = case.run::<bf16, f32>(set, 1, None);
        let narrow = case.run::<bf16, bf16>(set, 1, None);
        let rounded: Vec<bf16> = wide.into_iter().map(bf16::from_f32).collect();
        assert_eq!(bits(&narrow), bits(&rounded));
    }
}

#[test]
fn epilogues_see_every_finished_sum_once_at_its_place() {
    fn check<In: Element<Accumulator = f32>, Out: Element<Accumulator = f32>>(case: Case) {
        let plain = case.run::<In, f32>(InstructionSet::best::<f32>(), 1, None);
        let second: Vec<AtomicU32> = plain.iter().map(|_| AtomicU32::new(f32::NAN.to_bits())).collect();
        // A bias by column and a factor by row; the sums before them are stored elsewhere.
        let epilogue = |row: usize, first: usize, sums: &mut [f32]| {
            for (column, sum) in (first..).zip(sums) {
                let seen = second[row * case.n + column].swap(sum.to_bits(), Ordering::Relaxed);
                assert!(f32::from_bits(seen).is_nan(), "({row}, {column}) came twice");
                *sum = (*sum + column as f32) * row as f32;
            }
        };
        let out = in_pool(3, || case.run::<In, Out>(InstructionSet::best::<f32>(), 3, Some(&epilogue)));
        for (index, &sum) in plain.iter().enumerate() {
            let (row, column) = (index / case.n, index % case.n);
            assert_eq!(second[index].load(Ordering::Relaxed), sum.to_bits());
            let want = Out::narrow((sum + column as f32) * row as f32);
            assert_eq!(out[index].widen().to_bits(), want.widen().to_bits());
        }
    }
    for k in [40, 2 * DEPTH + 1] {
        let case = Case { m: 90, n: 450, k, transposed: (false, true), accumulate: false };
        assert!(case.m * case.n * case.k >= 3 << 19, "enough work for three threads");
        check::<f32, f32>(case);
        check::<bf16, bf16>(case);
        check::<f32, f32>(Case { accumulate: true, ..case });
    }
}

#[test]
fn strided_outputs_keep_what_lies_between_rows() {
    let (m, n, k, stride) = (19, 40, 12, 45);
    let (a, b) = (numbers::<f32>(m * k, 1), numbers::<f32>(k * n, 2));
    let mut packed = vec![0.0_f32; m * n];
    let mut strided = vec![7.0_f32; (m - 1) * stride + n];
    // Scratch may start at any address.
    let mut scratch = vec![0; SCRATCH_BYTES + 1];
    for (out, row_stride) in [(&mut packed, n), (&mut strided, stride)] {
        let (a, b) = (Operand::new(&a, k), Operand::new(&b, n));
        let product = Product { m, n, k, a, b, out: Output::new(out, row_stride), accumulate: false };
        gemm(product, None, &mut scratch[1..], 1);
    }
    for (row, line) in strided.chunks(stride).enumerate() {
        assert_eq!(line[..n], packed[row * n..][..n]);
        assert!(line[n..].iter().all(|x| x.to_bits() == 7.0_f32.to_bits()));
    }
}

#[test]
fn without_depth_the_result_is_zero_or_what_was_there() {
    let case = Case { m: 9, n: 33, k: 0, transposed: (false, false), accumulate: false };
    assert!(case.run::<f32, f32>(InstructionSet::best::<f32>(), 1, None).iter().all(|&x| x == 0.0));
    let kept = Case { accumulate: true, ..case };
    assert_eq!(kept.run::<bf16, bf16>(InstructionSet::best::<f32>(), 1, None), kept.old::<bf16>());
}

#[test]
#[should_panic(expected = "an operand is smaller than 4 × 4 × 4")]
fn an_operand_that_is_too_small_is_refused() {
    let (a, b, mut out) = ([0.0_f32; 15], [0.0_f32; 16], [0.0_f32; 16]);
    let (a, b) = (Operand::new(&a, 4), Operand::new(&b, 4));
    let product = Product { m: 4, n: 4, k: 4, a, b, out: Output::new(&mut out, 4), accumulate: false };
    gemm(product, None, &mut vec![0; SCRATCH_BYTES], 1);
}

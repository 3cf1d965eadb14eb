//! Runs the same numbers through a kernel and through the CPU backend.

use std::ops::RangeInclusive;
use std::path::Path;
use std::rc::Rc;

use kintsugi_gfx90a::{Argument, CodeObject, Compiler, Grid, Machine};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Backend, Buffer, Category, DType};
use kintsugi_testing::{Need, cases, skip};

/// Number formats of training.
pub const COMPUTE: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Elements that a thread moves at once (`PACK` of `common.cuh`).
pub const PACK: usize = 8;

/// Threads of a wave.
pub const WAVE: usize = 64;

/// Columns and groups of rows of a block that sums columns (`LANES` and `GROUPS` of `common.cuh`).
pub const LANES: usize = 32;
pub const GROUPS: usize = 8;

/// Threads that share the parts of a column in `sum_partials`.
pub const PART_GROUPS: usize = 32;

/// Random cases beside those that a test names.
pub fn random_cases() -> usize {
    cases(4, 40)
}

/// A code object of a kernel file. `None` if it cannot be compiled here, with a note.
pub fn kernels(file: &str) -> Option<CodeObject> {
    defined_kernels(file, &[])
}

/// The same with definitions.
pub fn defined_kernels(file: &str, definitions: &[String]) -> Option<CodeObject> {
    compiler().map(|compiler| compiler.kernel_file(file, definitions).expect("the file compiles"))
}

/// AMD's compiler. `None` without it, with a note.
pub fn compiler() -> Option<Compiler> {
    match Compiler::find(Path::new(env!("CARGO_TARGET_TMPDIR"))) {
        Ok(compiler) => Some(compiler),
        Err(missing) => {
            skip(Need::AmdTools, missing);
            None
        }
    }
}

/// The CPU backend beside an interpreter.
pub struct Pair {
    pub cpu: CpuBackend,
    pub machine: Machine,
    code: CodeObject,
}

/// The same numbers on both sides.
pub struct Both {
    pub cpu: Buffer,
    pub address: u64,
}

impl Pair {
    pub fn new(code: CodeObject, seed: u64) -> Self {
        Pair { cpu: CpuBackend::new(Rc::new(Heap::default()), 1), machine: Machine::new(seed), code }
    }

    /// Numbers rounded to a format.
    pub fn numbers(&mut self, name: &str, values: &[f32], dtype: DType) -> Both {
        let buffer = self.cpu.allocate(values.len(), dtype, Category::Activations);
        self.cpu.upload(values, buffer.view());
        self.same(name, buffer)
    }

    /// Random numbers around zero, below two in magnitude.
    pub fn random(&mut self, name: &str, len: usize, dtype: DType, seed: u64) -> Both {
        self.numbers(name, &random(len, seed), dtype)
    }

    /// Numbers that no kernel should leave there.
    pub fn blank(&mut self, name: &str, len: usize, dtype: DType) -> Both {
        self.numbers(name, &vec![-7.5; len], dtype)
    }

    pub fn tokens(&mut self, name: &str, tokens: &[u32]) -> Both {
        let buffer = self.cpu.allocate(tokens.len(), DType::U32, Category::Activations);
        self.cpu.upload_tokens(tokens, buffer.view());
        self.same(name, buffer)
    }

    /// A copy of a buffer of the CPU backend.
    pub fn same(&mut self, name: &str, buffer: Buffer) -> Both {
        let mut bytes = vec![0; buffer.len() * buffer.dtype().bytes()];
        self.cpu.download(buffer.view(), &mut bytes);
        let address = self.machine.buffer(name, bytes);
        Both { cpu: buffer, address }
    }

    /// Scratch memory that the CPU backend does not need.
    pub fn scratch(&mut self, bytes: usize) -> u64 {
        self.machine.buffer("the scratch", vec![0xff; bytes])
    }

    pub fn launch(&mut self, kernel: &str, grid: Grid, arguments: &[Argument]) {
        if let Err(error) = self.machine.launch(&self.code, kernel, grid, arguments) {
            panic!("{error}");
        }
    }

    /// What the interpreter left in a buffer, as the CPU backend reads it.
    pub fn read(&self, both: &Both) -> Vec<f32> {
        let (len, dtype) = (both.cpu.len(), both.cpu.dtype());
        let copy = self.cpu.allocate(len, dtype, Category::Activations);
        self.cpu.upload_bytes(&self.machine.read(both.address, len * dtype.bytes()), copy.view());
        self.cpu.read(copy.view())
    }

    /// Expects both sides to agree within the rounding of the format.
    pub fn agree(&self, both: &Both, what: &str) {
        self.agree_within(both, what, tolerance(both.cpu.dtype()));
    }

    pub fn agree_within(&self, both: &Both, what: &str, tolerance: f64) {
        let error = distance(&self.read(both), &self.cpu.read(both.cpu.view()));
        assert!(error <= tolerance, "{what}: relative error {error}");
    }
}

/// The relative errors of a result in L2. Few numbers in 16 bits are rounded to another neighbour.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 5e-4,
        DType::F16 => 1e-4,
        _ => 5e-7,
    }
}

/// The suffix of a format in kernel names.
pub fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        other => panic!("no kernels for {other:?}"),
    }
}

/// An address as an argument.
pub fn pointer(both: &Both) -> Argument {
    both.address.into()
}

pub const NULL: u64 = 0;

/// A size as the kernels' `long long`.
pub fn size(value: usize) -> Argument {
    (value as u64).into()
}

/// `‖a − b‖ / ‖b‖`. Numbers that are not finite must be equal on both sides and are left out.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        if !(a.is_finite() && b.is_finite()) {
            assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "element {i}: {a} against {b}");
            continue;
        }
        difference += f64::from(a - b).powi(2);
        norm += f64::from(b).powi(2);
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// Random sizes.
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491)
    }

    /// A number in a range.
    pub fn size(&mut self, range: RangeInclusive<usize>) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        range.start() + (self.0 >> 33) as usize % (range.end() - range.start() + 1)
    }

    /// Rows and a width. Every second width is a multiple of [`PACK`].
    pub fn matrix(&mut self, rows: usize, width: usize) -> (usize, usize) {
        let (rows, width) = (self.size(1..=rows), self.size(1..=width));
        (rows, if self.size(0..=1) == 0 { width } else { width.next_multiple_of(PACK) })
    }
}

/// Random numbers around zero, below two in magnitude.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next() + next()).collect()
}

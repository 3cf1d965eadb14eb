//! The passes behind products: bytes of memory, and cycles of vector instructions, for each element that they write.

use std::error::Error;

use kintsugi_gfx90a::{Argument, Compiler, Grid, Machine};

use crate::units::{self, BANDWIDTH, CLOCK, SIMDS, STREAMING, UNITS};

const ROWS: usize = 64;
const WIDTH: usize = 2048;
const THREADS: usize = 256;

/// Operations of GELU and of a bias, as the planner counts them (`crates/tensor/src/paper/cost.rs`).
const OPERATIONS: f64 = 9.0;

/// The epilogue whose rate the planner takes for all of them.
const GELU: &str = "bias, GELU";

/// One pass in bf16.
struct Pass {
    name: &'static str,
    file: &'static str,
    kernel: &'static str,
    /// Elements of each tensor, and whether the kernel takes it; null if not.
    tensors: &'static [Option<usize>],
    /// Which tensors are read and written, in elements for each element of the result.
    moved: f64,
    /// Blocks, and what follows the tensors.
    grid: usize,
    sizes: &'static [usize],
}

const ALL: usize = ROWS * WIDTH;
const FLAT: usize = ALL / 8 / THREADS / 4;

const PASSES: [Pass; 6] = [
    Pass {
        name: "bias",
        file: "epilogue",
        kernel: "bias_gelu_bf16",
        tensors: &[Some(ALL), Some(WIDTH), None],
        moved: 2.0,
        grid: FLAT,
        sizes: &[ALL, WIDTH],
    },
    Pass {
        name: GELU,
        file: "epilogue",
        kernel: "bias_gelu_bf16",
        tensors: &[Some(ALL), Some(WIDTH), Some(ALL)],
        moved: 3.0,
        grid: FLAT,
        sizes: &[ALL, WIDTH],
    },
    Pass {
        name: "GELU's derivative",
        file: "epilogue",
        kernel: "gelu_derivative_bf16",
        tensors: &[Some(ALL), Some(ALL)],
        moved: 3.0,
        grid: FLAT,
        sizes: &[ALL],
    },
    Pass {
        name: "residual, bias",
        file: "elementwise",
        kernel: "residual_bf16",
        tensors: &[Some(ALL), Some(ALL), None, None, None, Some(WIDTH), None, None, None, Some(ALL)],
        moved: 3.0,
        grid: FLAT,
        sizes: &[ALL, WIDTH],
    },
    Pass {
        name: "SwiGLU",
        file: "activation",
        kernel: "swiglu_bf16",
        tensors: &[Some(2 * ALL), Some(ALL)],
        moved: 3.0,
        grid: ROWS,
        sizes: &[WIDTH],
    },
    Pass {
        name: "SwiGLU's backward",
        file: "activation",
        kernel: "swiglu_backward_bf16",
        tensors: &[Some(ALL), Some(2 * ALL), Some(2 * ALL)],
        moved: 5.0,
        grid: ROWS,
        sizes: &[WIDTH],
    },
];

/// What a pass takes for an element.
pub struct Cost {
    name: &'static str,
    bytes: f64,
    /// Of a SIMD, for 64 elements.
    cycles: f64,
}

impl Cost {
    /// Seconds on a GCD by memory, and by the instructions of all SIMDs, whose waves have 64 lanes.
    fn seconds(&self) -> [f64; 2] {
        [self.bytes / (BANDWIDTH * STREAMING), self.cycles / 64.0 / (UNITS * SIMDS * CLOCK * 1e9)]
    }
}

/// Runs all passes.
pub fn measure(compiler: &Compiler) -> Result<Vec<Cost>, Box<dyn Error>> {
    let cost = |pass: &Pass| {
        let code = compiler.kernel_file(pass.file, &[])?;
        let mut machine = Machine::with_profile(1);
        let mut arguments = Vec::new();
        for elements in pass.tensors {
            let address = elements.map(|elements| machine.buffer("a tensor", vec![0; 2 * elements]));
            arguments.push(Argument::from(address.unwrap_or(0)));
        }
        arguments.extend(pass.sizes.iter().map(|&size| Argument::from(size as u64)));
        arguments.push(true.into());
        machine.launch(&code, pass.kernel, Grid::new(pass.grid, THREADS), &arguments)?;
        let [_, vector] = units::cycles(&machine.take_profile().executed);
        Ok(Cost { name: pass.name, bytes: 2.0 * pass.moved, cycles: 64.0 * vector / ALL as f64 })
    };
    PASSES.iter().map(cost).collect()
}

/// Bytes, cycles and the time that follows.
pub fn table(costs: &[Cost]) -> String {
    let rows = costs.iter().map(|cost| {
        let [memory, instructions] = cost.seconds().map(|seconds| seconds * 1e12);
        let Cost { name, bytes, cycles } = cost;
        format!("| {name} | {bytes:.0} | {cycles:.0} | {memory:.1} | {instructions:.1} |\n")
    });
    let head = "| pass | bytes an element | SIMD cycles for 64 | ps by memory | ps by instructions |\n|---|---|---|---|---|\n";
    format!("{head}{}", rows.collect::<String>())
}

/// The planner's rate.
pub fn profile(costs: &[Cost]) -> String {
    let gelu = costs.iter().find(|cost| cost.name == GELU).expect("it is one of the passes");
    let seconds = gelu.seconds().into_iter().fold(0.0, f64::max);
    format!("epilogue = {:.2}e12\n", OPERATIONS / seconds / 1e12)
}

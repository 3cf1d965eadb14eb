//! Counts what attention on the matrix cores executes on gfx90a, and prints what follows for its speed as a table.
//!
//! The kernels run in the interpreter, on one head of a causal sequence. Cycles are those that an instruction occupies its
//! unit, by AMD's documents: 64 for a matrix instruction of 32 × 32 × 8, 4 for a vector instruction of 64 lanes, 16 if it is
//! transcendental or multiplies 32-bit integers. Memory, waits and the start of workgroups are not counted. Rates have 4
//! FLOPs forward and 10 backward for each visible score and number of a head, for a whole GCD of MI250X. The first is that of
//! vector and matrix instructions that never run side by side, the second that of instructions that always do.
//!
//! `cargo run --release -p kintsugi-gfx90a --example attention-cycles`

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use kintsugi_gfx90a::{Argument, CodeObject, Compiler, Grid, Machine, Resources};

/// Queries and keys. Long enough for most tiles to be whole.
const SEQUENCE: usize = 2048;
const THREADS: usize = 256;
const BLOCK: usize = 128;

/// Registers of a SIMD lane, bytes of LDS, clock in GHz and compute units of a GCD of MI250X.
const REGISTERS: usize = 512;
const LDS: usize = 64 << 10;
const CLOCK: f64 = 1.7;
const UNITS: f64 = 110.0;
const SIMDS: f64 = 4.0;

/// Cycles of the units of a SIMD, and of the LDS unit that four SIMDs share.
struct Cycles {
    matrix: f64,
    vector: f64,
    lds: f64,
    without_conflicts: f64,
}

/// Files and their kernels.
const KERNELS: [(&str, &str); 3] = [
    ("mfma_attention_forward", "mfma_attention_forward"),
    ("mfma_attention_backward", "mfma_attention_dkeys_dvalues"),
    ("mfma_attention_backward", "mfma_attention_dqueries"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::temp_dir().join("kintsugi-gfx90a");
    let compiler = Compiler::find(Path::new(&folder))?;
    println!(
        "| head | kernel | registers | LDS, bytes | waves of a SIMD | matrix share | LDS conflicts | LDS busy |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut rates = Vec::new();
    for head_dim in [64, 80, 88, 96, 128] {
        let [mut forward, mut backward] = [[0.0; 2]; 2];
        for (file, kernel) in KERNELS {
            let definitions = [
                format!("HEAD_DIM={head_dim}"),
                "ELEMENT=bf16".to_owned(),
                format!("LAUNCH_THREADS={THREADS}"),
            ];
            let code = compiler.kernel_file(file, &definitions)?;
            let cycles = cycles(&code, kernel, head_dim)?;
            println!("{}", row(head_dim, kernel, code.resources(kernel)?, &cycles));
            let of_pass = if file == kernel { &mut forward } else { &mut backward };
            for (sum, cycles) in of_pass.iter_mut().zip(cycles.bounds()) {
                *sum += cycles;
            }
        }
        let [forward, backward] = [(forward, 4.0), (backward, 10.0)].map(|(cycles, flops)| {
            let flops = flops * head_dim as f64 * (SEQUENCE * (SEQUENCE + 1) / 2) as f64;
            cycles.map(|cycles| flops / cycles * UNITS * CLOCK / 1e3)
        });
        let to = |[slow, fast]: [f64; 2]| format!("{slow:.0} to {fast:.0}");
        rates.push(format!("| {head_dim} | {} | {} |", to(forward), to(backward)));
    }
    println!("\n| head | forward, TFLOP/s | backward, TFLOP/s |\n|---|---|---|\n{}", rates.join("\n"));
    Ok(())
}

/// Runs the kernel on one head of zeros: what it executes does not depend on the numbers, but for maxima that rise.
fn cycles(code: &CodeObject, kernel: &str, head_dim: usize) -> Result<Cycles, Box<dyn Error>> {
    let mut machine = Machine::with_profile(1);
    let mut tensor = |name: &str, bytes: usize| Argument::from(machine.buffer(name, vec![0; bytes]));
    let [qkv, dqkv] = ["qkv", "dqkv"].map(|name| tensor(name, SEQUENCE * 3 * head_dim * 2));
    let out = tensor("out", SEQUENCE * head_dim * 2);
    let [log_sums, dots] = ["log-sum-exps", "dots"].map(|name| tensor(name, SEQUENCE * 4));
    let mut arguments = if kernel.ends_with("forward") {
        vec![qkv, out, log_sums]
    } else {
        vec![qkv, out, log_sums, dots, dqkv]
    };
    arguments.extend([SEQUENCE, 1, 1].map(|size| Argument::from(size as u32)));
    arguments.push(1.0_f32.into());
    machine.launch(code, kernel, Grid::new(SEQUENCE / BLOCK, THREADS), &arguments)?;
    let profile = machine.take_profile();
    let [matrix, vector] = unit_cycles(&profile.executed);
    Ok(Cycles {
        matrix,
        vector,
        lds: profile.lds.taken as f64,
        without_conflicts: profile.lds.without_conflicts as f64,
    })
}

/// Cycles of matrix and of vector instructions.
fn unit_cycles(executed: &BTreeMap<String, u64>) -> [f64; 2] {
    let mut cycles = [0, 0];
    for (mnemonic, count) in executed.iter().filter(|(mnemonic, _)| mnemonic.starts_with("v_")) {
        let transcendental =
            ["v_exp", "v_log", "v_rcp", "v_sqrt", "v_mul_lo_u32", "v_mul_hi", "v_mad_i64", "v_mad_u64"];
        if mnemonic.starts_with("v_mfma_f32_32x32x8") {
            cycles[0] += 64 * count;
        } else if transcendental.iter().any(|name| mnemonic.starts_with(name)) {
            cycles[1] += 16 * count;
        } else {
            cycles[1] += 4 * count;
        }
    }
    cycles.map(|cycles| cycles as f64)
}

impl Cycles {
    /// Cycles of a compute unit: if vector and matrix instructions never run side by side, and if they always do.
    fn bounds(&self) -> [f64; 2] {
        [self.matrix + self.vector, self.matrix.max(self.vector)].map(|cycles| (cycles / SIMDS).max(self.lds))
    }
}

fn row(head_dim: usize, kernel: &str, resources: Resources, cycles: &Cycles) -> String {
    let by_registers = REGISTERS / resources.registers.next_multiple_of(8);
    let [sum, _] = cycles.bounds();
    format!(
        "| {head_dim} | {} | {} | {} | {} | {:.2} | {:.0} % | {:.2} |",
        kernel.trim_start_matches("mfma_attention_"),
        resources.registers,
        resources.lds,
        by_registers.min(LDS / resources.lds),
        cycles.matrix / (cycles.matrix + cycles.vector),
        100.0 * (cycles.lds / cycles.without_conflicts - 1.0),
        cycles.lds / sum,
    )
}

//! Attention, on one head of a causal sequence. Rates have 4 FLOPs forward and 10 backward for each visible score and number
//! of a head, for a whole GCD.

use std::error::Error;

use kintsugi_gfx90a::{Argument, CodeObject, Compiler, Grid, Machine, Resources};

use crate::units::{self, CLOCK, LDS, REGISTERS, SIMDS, UNITS};

/// Queries and keys. Long enough for most tiles to be whole.
const SEQUENCE: usize = 2048;
const THREADS: usize = 256;
const BLOCK: usize = 128;

const HEAD_DIMS: [usize; 5] = [64, 80, 88, 96, 128];

/// The share of the lower bound that an estimate assumes for waits, barriers and the start of workgroups. With it, heads of
/// 128 are within the rates that ROCm's flash attention was published with: 48 to 88 TFLOP/s forward, 43 to 62 backward.
const REACHED: f64 = 0.6;

/// Files and their kernels.
const KERNELS: [(&str, &str); 3] = [
    ("mfma_attention_forward", "mfma_attention_forward"),
    ("mfma_attention_backward", "mfma_attention_dkeys_dvalues"),
    ("mfma_attention_backward", "mfma_attention_dqueries"),
];

/// What one width of heads takes.
pub struct Head {
    dim: usize,
    /// In the order of [`KERNELS`].
    kernels: [(Resources, Cycles); 3],
}

/// Cycles of the units of a SIMD, and of the LDS unit that four SIMDs share.
struct Cycles {
    matrix: f64,
    vector: f64,
    lds: f64,
    without_conflicts: f64,
}

/// Runs all kernels.
pub fn measure(compiler: &Compiler) -> Result<Vec<Head>, Box<dyn Error>> {
    HEAD_DIMS.into_iter().map(|dim| Head::measure(compiler, dim)).collect()
}

/// What the kernels need, and bounds on their speed.
pub fn tables(heads: &[Head]) -> String {
    let kernels = "| head | kernel | registers | LDS, bytes | waves of a SIMD | matrix share | LDS conflicts | LDS busy |\n\
                   |---|---|---|---|---|---|---|---|\n";
    let rates = "\n| head | forward, TFLOP/s | backward, TFLOP/s |\n|---|---|---|\n";
    let rows = heads.iter().flat_map(Head::rows);
    let bounds = heads.iter().map(|head| {
        let [forward, backward] =
            head.rates().map(|[slow, fast]| format!("{:.0} to {:.0}", slow / 1e12, fast / 1e12));
        format!("| {} | {forward} | {backward} |\n", head.dim)
    });
    format!("{kernels}{}{rates}{}", rows.collect::<String>(), bounds.collect::<String>())
}

/// The planner's rates.
pub fn profile(heads: &[Head]) -> String {
    let points = heads.iter().map(|head| {
        let [forward, backward] = head.rates().map(|[slow, _]| REACHED * slow / 1e12);
        let dim = head.dim;
        format!("  {{ head_dim = {dim}, sequence = {SEQUENCE}, forward = {forward:.0}e12, backward = {backward:.0}e12 }},\n")
    });
    format!("attention = [\n{}]\n", points.collect::<String>())
}

impl Head {
    fn measure(compiler: &Compiler, dim: usize) -> Result<Self, Box<dyn Error>> {
        let definitions =
            [format!("HEAD_DIM={dim}"), "ELEMENT=bf16".to_owned(), format!("LAUNCH_THREADS={THREADS}")];
        let run = |(file, kernel): (&str, &str)| -> Result<(Resources, Cycles), Box<dyn Error>> {
            let code = compiler.kernel_file(file, &definitions)?;
            Ok((code.resources(kernel)?, cycles(&code, kernel, dim)?))
        };
        let [forward, keys, queries] = KERNELS;
        Ok(Head { dim, kernels: [run(forward)?, run(keys)?, run(queries)?] })
    }

    fn rows(&self) -> Vec<String> {
        let row = |((_, kernel), (resources, cycles)): ((&str, &str), &(Resources, Cycles))| {
            let by_registers = REGISTERS / resources.registers.next_multiple_of(8);
            let [sum, _] = cycles.bounds();
            format!(
                "| {} | {} | {} | {} | {} | {:.2} | {:.0} % | {:.2} |\n",
                self.dim,
                kernel.trim_start_matches("mfma_attention_"),
                resources.registers,
                resources.lds,
                by_registers.min(LDS / resources.lds),
                cycles.matrix / (cycles.matrix + cycles.vector),
                100.0 * (cycles.lds / cycles.without_conflicts - 1.0),
                cycles.lds / sum,
            )
        };
        KERNELS.into_iter().zip(&self.kernels).map(row).collect()
    }

    /// FLOP/s forward and backward, for both of [`Cycles::bounds`].
    fn rates(&self) -> [[f64; 2]; 2] {
        let [forward, keys, queries] = self.kernels.each_ref().map(|(_, cycles)| cycles.bounds());
        let backward = [0, 1].map(|bound| keys[bound] + queries[bound]);
        [(forward, 4.0), (backward, 10.0)].map(|(cycles, flops)| {
            let flops = flops * self.dim as f64 * (SEQUENCE * (SEQUENCE + 1) / 2) as f64;
            cycles.map(|cycles| flops / cycles * UNITS * CLOCK * 1e9)
        })
    }
}

impl Cycles {
    /// Cycles of a compute unit: if vector and matrix instructions never run side by side, and if they always do.
    fn bounds(&self) -> [f64; 2] {
        [self.matrix + self.vector, self.matrix.max(self.vector)].map(|cycles| (cycles / SIMDS).max(self.lds))
    }
}

/// Runs the kernel on one head of zeros: what it executes does not depend on the numbers, but for maxima that rise.
fn cycles(code: &CodeObject, kernel: &str, dim: usize) -> Result<Cycles, Box<dyn Error>> {
    let mut machine = Machine::with_profile(1);
    let mut tensor = |name: &str, bytes: usize| Argument::from(machine.buffer(name, vec![0; bytes]));
    let [qkv, dqkv] = ["qkv", "dqkv"].map(|name| tensor(name, SEQUENCE * 3 * dim * 2));
    let out = tensor("out", SEQUENCE * dim * 2);
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
    let [matrix, vector] = units::cycles(&profile.executed);
    Ok(Cycles {
        matrix,
        vector,
        lds: profile.lds.taken as f64,
        without_conflicts: profile.lds.without_conflicts as f64,
    })
}

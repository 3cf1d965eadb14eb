//! A GCD of MI250X, and the cycles that instructions occupy its units.
//!
//! Cycles are those of AMD's documents: 64 for a matrix instruction of 32 × 32 × 8, 4 for a vector instruction of 64 lanes,
//! 16 if it is transcendental or multiplies 32-bit integers.

use std::collections::BTreeMap;

/// Registers of a SIMD lane, bytes of LDS, clock in GHz, compute units, SIMDs of a unit, and bytes/s of memory.
pub const REGISTERS: usize = 512;
pub const LDS: usize = 64 << 10;
pub const CLOCK: f64 = 1.7;
pub const UNITS: f64 = 110.0;
pub const SIMDS: f64 = 4.0;
pub const BANDWIDTH: f64 = 1.6e12;

/// The share of the bandwidth that passes over memory usually reach.
pub const STREAMING: f64 = 0.8;

const SLOW: [&str; 8] =
    ["v_exp", "v_log", "v_rcp", "v_sqrt", "v_mul_lo_u32", "v_mul_hi", "v_mad_i64", "v_mad_u64"];

/// Cycles of matrix and of vector instructions.
pub fn cycles(executed: &BTreeMap<String, u64>) -> [f64; 2] {
    let mut cycles = [0, 0];
    for (mnemonic, count) in executed.iter().filter(|(mnemonic, _)| mnemonic.starts_with("v_")) {
        if mnemonic.starts_with("v_mfma_f32_32x32x8") {
            cycles[0] += 64 * count;
        } else if SLOW.iter().any(|name| mnemonic.starts_with(name)) {
            cycles[1] += 16 * count;
        } else {
            cycles[1] += 4 * count;
        }
    }
    cycles.map(|cycles| cycles as f64)
}

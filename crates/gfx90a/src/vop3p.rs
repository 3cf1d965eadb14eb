//! VOP3P: two operations in one instruction, on the halves of registers or on pairs of registers, and operations that mix
//! fp16 with fp32.
//!
//! `op_sel` says which part of every source the low result uses, and `op_sel_hi` which part the high result uses.

use crate::assembly::Line;
use crate::operand::{Operand, Source, Type, source};
use crate::vop::operation::{half, to_half};
use crate::vop::vector_register;
use crate::wave::{LANES, Lanes, Wave};

/// A packed instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    run: Run,
    to: u16,
    sources: [Source; 3],
    count: usize,
    /// For the low and the high result, a bit for every source.
    select: [u32; 2],
    negate: [u32; 2],
}

#[derive(Clone, Copy, Debug)]
enum Run {
    /// Halves of registers.
    Half(fn(u32, u32, u32) -> u32),
    /// Registers of pairs.
    Single(fn(f32, f32, f32) -> f32),
    /// Each result is one source: the low one of the first, the high one of the second.
    Move,
    /// `a · b + c` in fp32 from sources that are fp16 where `op_sel_hi` has a bit. The result is fp32, or the low or high
    /// half of the destination.
    Mix(MixResult),
    /// Products of halves, added to a number in fp32. Subnormal halves are taken for zero.
    Dot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MixResult {
    Single,
    Low,
    High,
}

fn run_of(name: &str) -> Option<(Run, usize)> {
    Some(match name {
        "v_pk_fma_f32" => (Run::Single(f32::mul_add), 3),
        "v_pk_mul_f32" => (Run::Single(|a, b, _| a * b), 2),
        "v_pk_add_f32" => (Run::Single(|a, b, _| a + b), 2),
        "v_pk_mov_b32" => (Run::Move, 2),
        "v_fma_mix_f32" => (Run::Mix(MixResult::Single), 3),
        "v_fma_mixlo_f16" => (Run::Mix(MixResult::Low), 3),
        "v_fma_mixhi_f16" => (Run::Mix(MixResult::High), 3),
        "v_dot2_f32_f16" => (Run::Dot, 3),
        "v_pk_add_f16" => (Run::Half(|a, b, _| to_half(half(a) + half(b))), 2),
        "v_pk_mul_f16" => (Run::Half(|a, b, _| to_half(half(a) * half(b))), 2),
        "v_pk_min_f16" => (Run::Half(|a, b, _| to_half(half(a).min(half(b)))), 2),
        "v_pk_max_f16" => (Run::Half(|a, b, _| to_half(half(a).max(half(b)))), 2),
        "v_pk_fma_f16" => (
            Run::Half(|a, b, c| {
                to_half((f64::from(half(a)) * f64::from(half(b)) + f64::from(half(c))) as f32)
            }),
            3,
        ),
        "v_pk_add_u16" | "v_pk_add_i16" => (Run::Half(|a, b, _| a.wrapping_add(b) & 0xffff), 2),
        "v_pk_sub_u16" | "v_pk_sub_i16" => (Run::Half(|a, b, _| a.wrapping_sub(b) & 0xffff), 2),
        "v_pk_mul_lo_u16" => (Run::Half(|a, b, _| a.wrapping_mul(b) & 0xffff), 2),
        "v_pk_mad_u16" => (Run::Half(|a, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff), 3),
        "v_pk_min_u16" => (Run::Half(|a, b, _| a.min(b)), 2),
        "v_pk_max_u16" => (Run::Half(|a, b, _| a.max(b)), 2),
        "v_pk_min_i16" => (Run::Half(|a, b, _| u32::from((a as i16).min(b as i16) as u16)), 2),
        "v_pk_max_i16" => (Run::Half(|a, b, _| u32::from((a as i16).max(b as i16) as u16)), 2),
        "v_pk_lshlrev_b16" => (Run::Half(|a, b, _| b << (a & 15) & 0xffff), 2),
        "v_pk_lshrrev_b16" => (Run::Half(|a, b, _| b >> (a & 15)), 2),
        "v_pk_ashrrev_i16" => (Run::Half(|a, b, _| (i32::from(b as i16) >> (a & 15)) as u32 & 0xffff), 2),
        _ => return None,
    })
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Packed> {
    let (run, count) = run_of(&line.mnemonic)?;
    let to = vector_register(line.operands.first()?)?;
    if line.operands.len() != 1 + count {
        return None;
    }
    let none = Source { operand: Operand::Constant(0), negate: false, absolute: false, sign_extend: false };
    let mut sources = [none; 3];
    let of = if matches!(run, Run::Half(_)) { Type::F16 } else { Type::F32 };
    for (to, text) in sources.iter_mut().zip(&line.operands[1..]) {
        *to = source(text, of)?;
    }
    // By default the low result uses low parts and the high result high parts; a mix uses fp32.
    let high = if matches!(run, Run::Mix(_)) { 0 } else { 7 };
    let select = [line.bits("op_sel").unwrap_or(0), line.bits("op_sel_hi").unwrap_or(high)];
    let negate = [line.bits("neg_lo").unwrap_or(0), line.bits("neg_hi").unwrap_or(0)];
    if line.has("clamp") {
        return None;
    }
    Some(Packed { run, to, sources, count, select, negate })
}

impl Packed {
    /// Executes the instruction.
    pub(crate) fn run(&self, wave: &mut Wave) {
        match self.run {
            Run::Single(run) => self.run_singles(run, wave),
            Run::Move => {
                let low = self.single(wave, 0, self.select[0] & 1);
                let high = self.single(wave, 1, self.select[0] >> 1 & 1);
                wave.write(self.to, &low);
                wave.write(self.to + 1, &high);
            }
            Run::Half(run) => {
                let [low, high] = [0, 1].map(|part| {
                    let [a, b, c] = [0, 1, 2].map(|i| self.half(wave, i, part));
                    let mut values = [0; LANES];
                    for (lane, value) in values.iter_mut().enumerate() {
                        *value = run(a[lane], b[lane], c[lane]);
                    }
                    values
                });
                let mut both = low;
                both.iter_mut().zip(&high).for_each(|(low, high)| *low |= high << 16);
                wave.write(self.to, &both);
            }
            Run::Mix(result) => self.mix(result, wave),
            Run::Dot => self.dot(wave),
        }
    }

    /// A register of a source, the first or the second of its pair. A constant has only one.
    fn single(&self, wave: &Wave, index: usize, part: u32) -> Lanes {
        let operand = match self.sources[index].operand {
            Operand::Scalar(first) => Operand::Scalar(first + part as u8),
            Operand::Vector(first) => Operand::Vector(first + part as u16),
            other => other,
        };
        let mut copy = [0; LANES];
        *wave.lanes(operand, &mut copy)
    }

    fn run_singles(&self, run: fn(f32, f32, f32) -> f32, wave: &mut Wave) {
        let [low, high] = [0, 1].map(|part| {
            let [a, b, c] = [0, 1, 2].map(|i| {
                if i >= self.count {
                    return [0.0; LANES];
                }
                let negated = self.negate[part] >> i & 1 == 1;
                let sign = if negated { 1 << 31 } else { 0 };
                self.single(wave, i, self.select[part] >> i & 1).map(|bits| f32::from_bits(bits ^ sign))
            });
            let mut values = [0; LANES];
            for (lane, value) in values.iter_mut().enumerate() {
                *value = run(a[lane], b[lane], c[lane]).to_bits();
            }
            values
        });
        wave.write(self.to, &low);
        wave.write(self.to + 1, &high);
    }

    /// The half of a source that the low or high result uses, in the low bits.
    fn half(&self, wave: &Wave, index: usize, part: usize) -> Lanes {
        let mut copy = [0; LANES];
        let values = *wave.lanes(self.sources[index].operand, &mut copy);
        let upper = self.select[part] >> index & 1 == 1;
        let sign = if self.negate[part] >> index & 1 == 1 { 1 << 15 } else { 0 };
        // An integer constant is sign-extended, a float constant is in the low half; both are read as they are.
        values.map(|value| (if upper { value >> 16 } else { value & 0xffff }) ^ sign)
    }

    fn mix(&self, result: MixResult, wave: &mut Wave) {
        let [a, b, c] = [0, 1, 2].map(|i| {
            let mut copy = [0; LANES];
            let values = *wave.lanes(self.sources[i].operand, &mut copy);
            let (is_half, upper) = (self.select[1] >> i & 1 == 1, self.select[0] >> i & 1 == 1);
            values.map(|bits| {
                let value = match (is_half, upper) {
                    (false, _) => f32::from_bits(bits),
                    (true, false) => half(bits & 0xffff),
                    (true, true) => half(bits >> 16),
                };
                let value = if self.sources[i].absolute { value.abs() } else { value };
                if self.sources[i].negate { -value } else { value }
            })
        });
        let before = wave.vector[usize::from(self.to)];
        let mut values = [0; LANES];
        for (lane, value) in values.iter_mut().enumerate() {
            let fused = a[lane].mul_add(b[lane], c[lane]);
            *value = match result {
                MixResult::Single => fused.to_bits(),
                MixResult::Low => to_half(fused) | before[lane] & 0xffff_0000,
                MixResult::High => to_half(fused) << 16 | before[lane] & 0xffff,
            };
        }
        wave.write(self.to, &values);
    }

    fn dot(&self, wave: &mut Wave) {
        let halves = [0, 1].map(|i| [0, 1].map(|part| self.half(wave, i, part)));
        let sum = self.single(wave, 2, 0);
        let mut values = [0; LANES];
        for (lane, value) in values.iter_mut().enumerate() {
            let product = |part: usize| flushed(halves[0][part][lane]) * flushed(halves[1][part][lane]);
            *value = (product(0) + product(1) + f32::from_bits(sum[lane])).to_bits();
        }
        wave.write(self.to, &values);
    }
}

/// A number in fp16, or zero if it is subnormal.
fn flushed(bits: u32) -> f32 {
    if bits & 0x7c00 == 0 { 0.0 } else { half(bits) }
}

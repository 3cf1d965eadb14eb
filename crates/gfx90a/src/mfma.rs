//! MFMA: products of small matrices by a whole wave, `D = A·B + C`, whatever EXEC is.
//!
//! `v_mfma_f32_MxNxKtype` multiplies `A [M, K]` by `B [K, N]`, for as many blocks as fill the wave. A lane holds some
//! numbers of a row of A and of a column of B, and numbers of one column of D:
//!
//! - A: row `lane % M`; the lane's group `lane / M` is the block, or if there is one block its part of the inner dim.
//! - B: column `lane % N`, and the same groups.
//! - D: column `lane % N`. Rows come in fours, register by register; lanes `N`, `2N`, … later hold the next four.
//!
//! On MI200, subnormal numbers in bf16 and fp16, and subnormal results of products of them, are taken for zero. MI300 calls
//! the instructions `MxNxK_type`; it keeps subnormal numbers, which this does not follow.

use crate::assembly::Line;
use crate::operand::{Operand, Type, operand};
use crate::vop::{flush, vector_register};
use crate::wave::{LANES, Lanes, Wave};

/// A matrix instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mfma {
    to: u16,
    a: u16,
    b: u16,
    c: Operand,
    tile: Tile,
}

/// Numbers of A or B, at most: four in every lane.
const MAX_NUMBERS: usize = 4 * LANES;

/// The shape of one instruction. Tiles are square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    side: usize,
    inner: usize,
    blocks: usize,
    element: Element,
    /// Numbers of a row of A that a lane holds.
    per_lane: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    F32,
    F16,
    BF16,
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Mfma> {
    let tile = tile(line.mnemonic.strip_prefix("v_mfma_f32_")?)?;
    // These exchange blocks and groups of lanes.
    if ["cbsz", "abid", "blgp"].iter().any(|name| line.number(name).unwrap_or(0) != 0) {
        return None;
    }
    let register = |index: usize| vector_register(line.operands.get(index)?);
    let c = operand(line.operands.get(3)?, Type::F32)?;
    Some(Mfma { to: register(0)?, a: register(1)?, b: register(2)?, c, tile })
}

/// The shape by its name: `32x32x8bf16_1k`.
fn tile(name: &str) -> Option<Tile> {
    let mut parts = name.splitn(3, 'x');
    let side: usize = parts.next()?.parse().ok()?;
    if parts.next()?.parse() != Ok(side) {
        return None;
    }
    let rest = &parts.next()?.replace('_', "");
    let digits = rest.find(|character: char| !character.is_ascii_digit())?;
    let inner: usize = rest[..digits].parse().ok()?;
    let (element, per_lane) = match &rest[digits..] {
        "f32" => (Element::F32, 1),
        "f16" => (Element::F16, 4),
        "bf161k" => (Element::BF16, 4),
        // MI300 has only the four numbers of MI200's `_1k`.
        "bf16" if name.contains("_bf16") => (Element::BF16, 4),
        "bf16" => (Element::BF16, 2),
        _ => return None,
    };
    let groups = LANES / side;
    let blocks = if inner == per_lane { groups } else { 1 };
    let is_known = matches!(side, 4 | 16 | 32) && (blocks > 1 || inner == per_lane * groups);
    is_known.then_some(Tile { side, inner, blocks, element, per_lane })
}

impl Tile {
    /// The numbers that every lane holds of A or B, by block: `[block][place in the inner dim][row or column]`.
    fn unpack(&self, registers: &[Lanes]) -> [f32; MAX_NUMBERS] {
        let mut numbers = [0.0; MAX_NUMBERS];
        for lane in 0..LANES {
            let (line, group) = (lane % self.side, lane / self.side);
            let (block, first) = if self.blocks > 1 { (group, 0) } else { (0, group * self.per_lane) };
            for i in 0..self.per_lane {
                numbers[(block * self.inner + first + i) * self.side + line] =
                    self.element.of(registers, lane, i);
            }
        }
        numbers
    }

    /// The block, row and column of D that a lane holds in a register.
    fn place(&self, lane: usize, register: usize) -> (usize, usize, usize) {
        let column = lane % self.side;
        if self.side == 4 {
            return (lane / 4, register, column);
        }
        let registers_per_block = self.side * self.side / LANES;
        let (block, register) = (register / registers_per_block, register % registers_per_block);
        // The groups of lanes share every `4 · groups` rows, four by four.
        let groups = LANES / self.side;
        (block, register / 4 * 4 * groups + lane / self.side * 4 + register % 4, column)
    }

    /// Registers of D.
    fn results(&self) -> usize {
        self.blocks * self.side * self.side / LANES
    }

    fn flushes(&self) -> bool {
        self.element != Element::F32
    }
}

impl Element {
    /// Number `index` that a lane holds.
    fn of(self, registers: &[Lanes], lane: usize, index: usize) -> f32 {
        let half = |index: usize| registers[index / 2][lane] >> (16 * (index % 2)) & 0xffff;
        match self {
            Element::F32 => f32::from_bits(registers[index][lane]),
            Element::BF16 => flush(f32::from_bits(half(index) << 16)),
            Element::F16 if half(index) & 0x7c00 == 0 => 0.0,
            Element::F16 => half::f16::from_bits(half(index) as u16).to_f32(),
        }
    }

    fn bytes(self) -> usize {
        if self == Element::F32 { 4 } else { 2 }
    }
}

impl Mfma {
    /// Executes the instruction. Products are added one after the other in fp32; in which order the hardware adds is not
    /// documented.
    pub(crate) fn run(&self, wave: &mut Wave) {
        let tile = self.tile;
        let registers = tile.per_lane * tile.element.bytes() / 4;
        let [a, b] = [self.a, self.b].map(|first| {
            let first = usize::from(first);
            tile.unpack(&wave.vector[first..first + registers])
        });
        for register in 0..tile.results() {
            let start = match self.c {
                Operand::Vector(first) => wave.vector[usize::from(first) + register],
                uniform => [wave.uniform(uniform, false) as u32; LANES],
            };
            let number =
                |bits: u32| if tile.flushes() { flush(f32::from_bits(bits)) } else { f32::from_bits(bits) };
            let mut sums = start.map(number);
            // Adjacent lanes have the columns of one row.
            for (group, sums) in sums.chunks_exact_mut(tile.side).enumerate() {
                let (block, row, _) = tile.place(group * tile.side, register);
                let [a, b] = [&a, &b]
                    .map(|numbers| numbers.chunks_exact(tile.side).skip(block * tile.inner).take(tile.inner));
                for (a, b) in a.zip(b) {
                    for (sum, &b) in sums.iter_mut().zip(b) {
                        *sum = a[row].mul_add(b, *sum);
                    }
                }
            }
            wave.vector[usize::from(self.to) + register] = sums.map(|sum| number(sum.to_bits()).to_bits());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_the_result_is_in_one_place() {
        for name in [
            "32x32x8bf16_1k",
            "32x32x4bf16_1k",
            "16x16x16f16",
            "16x16x4f16",
            "4x4x4bf16_1k",
            "32x32x2f32",
            "32x32x1f32",
            "16x16x4f32",
            "16x16x1f32",
            "4x4x1f32",
            "32x32x4bf16",
            "16x16x8bf16",
            "16x16x2bf16",
            "32x32x8_bf16",
            "16x16x16_f16",
        ] {
            let tile = tile(name).unwrap_or_else(|| panic!("{name} is known"));
            let mut seen = vec![false; tile.blocks * tile.side * tile.side];
            for register in 0..tile.results() {
                for lane in 0..LANES {
                    let (block, row, column) = tile.place(lane, register);
                    let at = (block * tile.side + row) * tile.side + column;
                    assert!(!std::mem::replace(&mut seen[at], true), "{name}: {row}, {column} twice");
                }
            }
            assert!(seen.into_iter().all(|seen| seen), "{name}");
        }
        assert_eq!(tile("16x16x32f16"), None);
    }

    #[test]
    fn subnormal_halves_are_zero() {
        let register = [0x0001_3c00; LANES];
        assert_eq!([0, 1].map(|i| Element::F16.of(&[register], 0, i)), [1.0, 0.0]);
        assert_eq!(Element::BF16.of(&[[0x0000_007f; LANES]], 0, 0), 0.0);
    }
}

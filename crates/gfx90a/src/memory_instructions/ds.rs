//! DS: loads, stores and atomics in LDS, and exchanges between the lanes of a wave.

use super::access::{Atomic, Shape, atomic, shape, word};
use crate::assembly::Line;
use crate::error::Fault;
use crate::lds::Lds;
use crate::vop::vector_register;
use crate::wave::{LANES, Wave};

/// An instruction of the LDS unit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ds {
    /// One or two loads, each from the address and an offset of its own, to registers one after the other.
    Read {
        to: u16,
        address: u16,
        shape: Shape,
        offsets: Offsets,
    },
    Write {
        address: u16,
        data: [u16; 2],
        shape: Shape,
        offsets: Offsets,
    },
    Atomic {
        run: Atomic,
        to: Option<u16>,
        address: u16,
        data: u16,
        offset: u64,
    },
    /// `to[lane] = data[from[lane] / 4]`
    BackwardPermute {
        to: u16,
        from: u16,
        data: u16,
        offset: u64,
    },
    /// `to[at[lane] / 4] = data[lane]`
    Permute {
        to: u16,
        at: u16,
        data: u16,
        offset: u64,
    },
    Swizzle {
        to: u16,
        data: u16,
        pattern: u32,
    },
}

/// Offsets in bytes; the second only in instructions with two accesses.
type Offsets = (u64, Option<u64>);

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Ds> {
    let name = line.mnemonic.strip_prefix("ds_")?;
    let register = |index: usize| vector_register(line.operands.get(index)?);
    let offset = |name: &str| line.number(name).unwrap_or(0) as u64;
    let single = (offset("offset"), None);
    // Offsets of pairs count values, or 64 values.
    let pair = |shape: Shape, stride: u64| {
        let unit = (shape.bytes * shape.words) as u64 * stride;
        (offset("offset0") * unit, Some(offset("offset1") * unit))
    };
    let with_stride = |rest: &str| -> Option<(Shape, Offsets)> {
        let (kind, stride) = match rest.strip_prefix("st64_") {
            Some(kind) => (kind, 64),
            None => (rest.strip_prefix('_')?, 1),
        };
        let shape = shape(kind)?;
        Some((shape, pair(shape, stride)))
    };
    if let Some(rest) = name.strip_prefix("read2") {
        let (shape, offsets) = with_stride(rest)?;
        return Some(Ds::Read { to: register(0)?, address: register(1)?, shape, offsets });
    }
    if let Some(rest) = name.strip_prefix("write2") {
        let (shape, offsets) = with_stride(rest)?;
        return Some(Ds::Write { address: register(0)?, data: [register(1)?, register(2)?], shape, offsets });
    }
    if let Some(kind) = name.strip_prefix("read_") {
        return Some(Ds::Read {
            to: register(0)?,
            address: register(1)?,
            shape: shape(kind)?,
            offsets: single,
        });
    }
    if let Some(kind) = name.strip_prefix("write_") {
        let data = register(1)?;
        return Some(Ds::Write {
            address: register(0)?,
            data: [data; 2],
            shape: shape(kind)?,
            offsets: single,
        });
    }
    let offset = single.0;
    Some(match name {
        "bpermute_b32" => {
            Ds::BackwardPermute { to: register(0)?, from: register(1)?, data: register(2)?, offset }
        }
        "permute_b32" => Ds::Permute { to: register(0)?, at: register(1)?, data: register(2)?, offset },
        "swizzle_b32" => {
            Ds::Swizzle { to: register(0)?, data: register(1)?, pattern: swizzle_pattern(line)? }
        }
        _ => return decode_atomic(name, offset, &register),
    })
}

/// An atomic, whose name ends with the type: `add_u32`, `min_rtn_i32`, `add_f32`.
fn decode_atomic(name: &str, offset: u64, register: &dyn Fn(usize) -> Option<u16>) -> Option<Ds> {
    let (operation, of) = name.rsplit_once('_')?;
    let (operation, returns) = operation.strip_suffix("_rtn").map_or((operation, false), |rest| (rest, true));
    let run = match (operation, of) {
        ("min" | "max", "i32") => atomic(&format!("s{operation}"))?,
        ("min" | "max", "u32") => atomic(&format!("u{operation}"))?,
        ("add", "f32") => atomic("add_f32")?,
        ("wrxchg", "b32") => atomic("swap")?,
        ("add" | "sub" | "inc" | "dec", "u32") | ("and" | "or" | "xor", "b32") => atomic(operation)?,
        _ => return None,
    };
    let first = usize::from(returns);
    let to = if returns { Some(register(0)?) } else { None };
    Some(Ds::Atomic { run, to, address: register(first)?, data: register(first + 1)?, offset })
}

/// The pattern as the disassembler writes it, `swizzle(BITMASK_PERM,"00p11")` or as a number.
fn swizzle_pattern(line: &Line) -> Option<u32> {
    if let Some(number) = line.number("offset") {
        return Some(number as u32);
    }
    let text = line.modifier("offset")?.strip_prefix("swizzle(")?.strip_suffix(')')?;
    let (kind, rest) = text.split_once(',')?;
    let numbers: Vec<u32> = rest.split(',').filter_map(|number| number.trim().parse().ok()).collect();
    match (kind, numbers.as_slice()) {
        ("QUAD_PERM", &[a, b, c, d]) => Some(1 << 15 | a | b << 2 | c << 4 | d << 6),
        ("SWAP", &[group]) => Some(group << 10 | 0x1f),
        ("REVERSE", &[group]) => Some((group - 1) << 10 | 0x1f),
        ("BROADCAST", &[group, lane]) => Some(lane << 5 | (0x1f & !(group - 1))),
        ("BITMASK_PERM", _) => {
            // Five characters from the highest bit: a constant, p to keep the bit, i to invert it.
            let mut pattern = 0;
            for (i, character) in rest.trim().trim_matches('"').chars().enumerate() {
                let bit = 1 << (4 - i);
                pattern |= match character {
                    '0' => 0,
                    '1' => bit << 5,
                    'p' => bit,
                    'i' => bit | bit << 10,
                    _ => return None,
                };
            }
            Some(pattern)
        }
        _ => None,
    }
}

/// The lane that a lane reads from in a swizzle.
fn swizzled(pattern: u32, lane: usize) -> usize {
    if pattern >> 15 & 1 == 1 {
        return lane / 4 * 4 + (pattern >> (2 * (lane % 4)) & 3) as usize;
    }
    let [and, or, xor] = [0, 5, 10].map(|shift| (pattern >> shift & 31) as usize);
    lane & 32 | ((lane & 31 & and | or) ^ xor)
}

impl Ds {
    /// Bytes of the smallest piece of LDS that the instruction accesses. `None` if it accesses none.
    pub(crate) fn granule(&self) -> Option<usize> {
        match self {
            Ds::Read { shape, .. } | Ds::Write { shape, .. } => Some(shape.bytes),
            Ds::Atomic { .. } => Some(4),
            Ds::BackwardPermute { .. } | Ds::Permute { .. } | Ds::Swizzle { .. } => None,
        }
    }

    /// Executes the instruction.
    pub(crate) fn run(&self, wave: &mut Wave, lds: &mut Lds) -> Result<(), Fault> {
        match *self {
            Ds::Read { to, address, shape, offsets } => read(wave, lds, to, address, shape, offsets),
            Ds::Write { address, data, shape, offsets } => write(wave, lds, address, data, shape, offsets),
            Ds::Atomic { run, to, address, data, offset } => {
                for lane in wave.active() {
                    let at = u64::from(wave.vector[usize::from(address)][lane]) + offset;
                    let value = wave.vector[usize::from(data)][lane];
                    let old = lds.atomic(wave.index, lane, at, |old| run(old, value))?;
                    if let Some(to) = to {
                        wave.vector[usize::from(to)][lane] = old;
                    }
                }
                Ok(())
            }
            Ds::BackwardPermute { to, from, data, offset } => {
                let (exec, data) = (wave.exec(), wave.vector[usize::from(data)]);
                let places = wave.vector[usize::from(from)];
                // A lane that does not take part gives zero.
                let source = |lane: usize| (u64::from(places[lane]) + offset) as usize / 4 % LANES;
                let values = std::array::from_fn(|lane| {
                    let from = source(lane);
                    if exec >> from & 1 == 1 { data[from] } else { 0 }
                });
                wave.write(to, &values);
                Ok(())
            }
            Ds::Permute { to, at, data, offset } => {
                let (data, places) = (wave.vector[usize::from(data)], wave.vector[usize::from(at)]);
                let mut values = [0; LANES];
                for lane in wave.active() {
                    values[(u64::from(places[lane]) + offset) as usize / 4 % LANES] = data[lane];
                }
                wave.write(to, &values);
                Ok(())
            }
            Ds::Swizzle { to, data, pattern } => {
                let (exec, data) = (wave.exec(), wave.vector[usize::from(data)]);
                let values = std::array::from_fn(|lane| {
                    let from = swizzled(pattern, lane);
                    if exec >> from & 1 == 1 { data[from] } else { 0 }
                });
                wave.write(to, &values);
                Ok(())
            }
        }
    }
}

fn read(
    wave: &mut Wave,
    lds: &mut Lds,
    to: u16,
    address: u16,
    shape: Shape,
    offsets: Offsets,
) -> Result<(), Fault> {
    // The destination may be the address.
    let addresses = wave.vector[usize::from(address)];
    for offset in [Some(offsets.0), offsets.1].into_iter().flatten() {
        let places = wave.active().map(|lane| u64::from(addresses[lane]) + offset);
        lds.count_access(places, shape.bytes * shape.words);
    }
    for lane in wave.active() {
        let mut register = usize::from(to);
        for offset in [Some(offsets.0), offsets.1].into_iter().flatten() {
            let at = u64::from(addresses[lane]) + offset;
            for value in lds.read(wave.index, lane, at, shape.bytes * shape.words)?.chunks_exact(shape.bytes)
            {
                let to = &mut wave.vector[register][lane];
                *to = shape.loaded(word(value), *to);
                register += 1;
            }
        }
    }
    Ok(())
}

fn write(
    wave: &mut Wave,
    lds: &mut Lds,
    address: u16,
    data: [u16; 2],
    shape: Shape,
    offsets: Offsets,
) -> Result<(), Fault> {
    let accesses = [(Some(offsets.0), data[0]), (offsets.1, data[1])];
    for (offset, data) in accesses.into_iter().filter_map(|(offset, data)| Some((offset?, data))) {
        let addresses = &wave.vector[usize::from(address)];
        let places = wave.active().map(|lane| u64::from(addresses[lane]) + offset);
        lds.count_access(places, shape.bytes * shape.words);
        for word in 0..shape.words {
            let values = &wave.vector[usize::from(data) + word];
            let addresses = &wave.vector[usize::from(address)];
            let at = |lane: usize| u64::from(addresses[lane]) + offset + 4 * word as u64;
            for lane in wave.active() {
                lds.store(wave.index, lane, at(lane), shape.bytes, shape.stored(values[lane]))?;
            }
            // Which of two lanes wins is not defined.
            for lane in wave.active() {
                if !lds.holds(at(lane), shape.bytes, shape.stored(values[lane])) {
                    return Err(Fault::LanesDisagree { offset: at(lane) as usize });
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swizzles_within_32_lanes() {
        let swap = 1 << 10 | 0x1f;
        assert_eq!([0, 1, 33, 62].map(|lane| swizzled(swap, lane)), [1, 0, 32, 63]);
        let quad = 1 << 15 | 0b0001_1011;
        assert_eq!([0, 1, 6].map(|lane| swizzled(quad, lane)), [3, 2, 5]);
    }
}

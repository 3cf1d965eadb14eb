//! What memory instructions have in common: how much they move, into which part of a register, and what atomics compute.

/// How the values in memory and in registers correspond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Bytes of a value: 1, 2 or 4.
    pub(crate) bytes: usize,
    /// Values of 4 bytes, in as many registers.
    pub(crate) words: usize,
    sign_extend: bool,
    part: Part,
}

/// The part of a register that a value of 1 or 2 bytes has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    All,
    /// A half; the other half does not change.
    Low,
    High,
}

/// The shape by the last part of a mnemonic: `dwordx4`, `ushort`, `short_d16_hi`, or `b128`, `u16`, `b16_d16_hi`.
pub(crate) fn shape(name: &str) -> Option<Shape> {
    let (kind, part) = match (name.strip_suffix("_d16_hi"), name.strip_suffix("_d16")) {
        (Some(kind), _) => (kind, Part::High),
        (_, Some(kind)) => (kind, Part::Low),
        _ => (name, Part::All),
    };
    let (bytes, words, sign_extend) = match kind {
        "ubyte" | "byte" | "u8" | "b8" => (1, 1, false),
        "sbyte" | "i8" => (1, 1, true),
        "ushort" | "short" | "u16" | "b16" => (2, 1, false),
        "sshort" | "i16" => (2, 1, true),
        "dword" | "b32" => (4, 1, false),
        "dwordx2" | "b64" => (4, 2, false),
        "dwordx3" | "b96" => (4, 3, false),
        "dwordx4" | "b128" => (4, 4, false),
        _ => return None,
    };
    Some(Shape { bytes, words, sign_extend, part })
}

impl Shape {
    /// A register after a load of a value.
    pub(crate) fn loaded(self, value: u32, before: u32) -> u32 {
        let bits = 8 * self.bytes as u32;
        let value =
            if self.sign_extend { ((value << (32 - bits)) as i32 >> (32 - bits)) as u32 } else { value };
        match self.part {
            Part::All => value,
            Part::Low => value & 0xffff | before & 0xffff_0000,
            Part::High => value << 16 | before & 0xffff,
        }
    }

    /// The value that a store takes from a register.
    pub(crate) fn stored(self, register: u32) -> u32 {
        if self.part == Part::High { register >> 16 } else { register }
    }
}

/// A number of 1 to 4 bytes.
pub(crate) fn word(bytes: &[u8]) -> u32 {
    if let Ok(word) = bytes.try_into() {
        return u32::from_le_bytes(word);
    }
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

/// What an atomic on a word computes, from the old value and a register.
pub(crate) type Atomic = fn(u32, u32) -> u32;

/// The atomic of this name, as global memory's instructions spell it.
pub(crate) fn atomic(name: &str) -> Option<Atomic> {
    Some(match name {
        "swap" => |_, new| new,
        "add" => u32::wrapping_add,
        "sub" => u32::wrapping_sub,
        "smin" => |old, new| (old as i32).min(new as i32) as u32,
        "smax" => |old, new| (old as i32).max(new as i32) as u32,
        "umin" => u32::min,
        "umax" => u32::max,
        "and" => |old, new| old & new,
        "or" => |old, new| old | new,
        "xor" => |old, new| old ^ new,
        "inc" => |old, limit| if old >= limit { 0 } else { old + 1 },
        "dec" => |old, limit| if old == 0 || old > limit { limit } else { old - 1 },
        "add_f32" => |old, new| (f32::from_bits(old) + f32::from_bits(new)).to_bits(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_extend_or_fill_a_half() {
        let of = |name| shape(name).expect("a shape");
        assert_eq!(of("sbyte").loaded(0x80, 7), 0xffff_ff80);
        assert_eq!(of("short_d16_hi").loaded(0x1234, 0xaaaa_bbbb), 0x1234_bbbb);
        assert_eq!(of("short_d16").loaded(0x1234, 0xaaaa_bbbb), 0xaaaa_1234);
        assert_eq!(of("short_d16_hi").stored(0x1234_5678), 0x1234);
        assert_eq!((of("b128").words, shape("dwordx5")), (4, None));
    }
}

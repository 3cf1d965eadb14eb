//! SDWA: sources and the destination are bytes or halves of registers.

use crate::assembly::Line;

/// A part of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Select {
    Byte(u32),
    Word(u32),
    All,
}

/// What happens to the rest of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unused {
    Zero,
    SignExtend,
    Preserve,
}

/// The selections of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sdwa {
    pub(crate) sources: [Select; 2],
    to: Select,
    unused: Unused,
}

/// The modifiers of a line, if it has any of SDWA.
pub(crate) fn decode(line: &Line) -> Option<Sdwa> {
    let select = |name: &str| line.modifier(name).map_or(Some(Select::All), select);
    let unused = match line.modifier("dst_unused") {
        Some("UNUSED_SEXT") => Unused::SignExtend,
        Some("UNUSED_PRESERVE") => Unused::Preserve,
        _ => Unused::Zero,
    };
    line.modifier("src0_sel")?;
    Some(Sdwa { sources: [select("src0_sel")?, select("src1_sel")?], to: select("dst_sel")?, unused })
}

fn select(text: &str) -> Option<Select> {
    let index = |rest: &str| rest.parse().ok();
    match text {
        "DWORD" => Some(Select::All),
        _ => text
            .strip_prefix("BYTE_")
            .and_then(index)
            .map(Select::Byte)
            .or_else(|| text.strip_prefix("WORD_").and_then(index).map(Select::Word)),
    }
}

impl Select {
    /// The lowest bit and the number of bits.
    fn place(self) -> (u32, u32) {
        match self {
            Select::Byte(index) => (8 * index, 8),
            Select::Word(index) => (16 * index, 16),
            Select::All => (0, 32),
        }
    }

    /// The part of a register, extended to 32 bits.
    pub(crate) fn of(self, value: u32, sign_extend: bool) -> u32 {
        let (from, bits) = self.place();
        let high = value >> from << (32 - bits);
        if sign_extend { (high as i32 >> (32 - bits)) as u32 } else { high >> (32 - bits) }
    }
}

impl Sdwa {
    /// The destination after a result.
    pub(crate) fn put(&self, result: u32, before: u32) -> u32 {
        let (to, bits) = self.to.place();
        let part = Select::of(if bits == 8 { Select::Byte(0) } else { Select::Word(0) }, result, false);
        let part = if self.to == Select::All { result } else { part };
        let mask = ((u64::from(u32::MAX) >> (32 - bits)) as u32) << to;
        match self.unused {
            Unused::Zero => part << to,
            Unused::Preserve => part << to | before & !mask,
            Unused::SignExtend => (((result << (32 - bits)) as i32 >> (32 - bits)) as u32) << to,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_registers() {
        assert_eq!(Select::Word(1).of(0x8001_0002, false), 0x8001);
        assert_eq!(Select::Byte(3).of(0x8001_0002, true), 0xffff_ff80);
        let put = |to, unused| Sdwa { sources: [Select::All; 2], to, unused }.put(0x1234_5678, 0xaaaa_aaaa);
        assert_eq!(put(Select::Word(1), Unused::Zero), 0x5678_0000);
        assert_eq!(put(Select::Byte(1), Unused::Preserve), 0xaaaa_78aa);
        assert_eq!(put(Select::All, Unused::Zero), 0x1234_5678);
    }
}

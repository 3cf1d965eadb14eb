//! Operands of instructions: registers, constants, and the sign modifiers before them.

use half::f16;

use crate::assembly::number;

/// How an operation reads a source or writes its result: width, and what a written constant means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    B16,
    F16,
    B32,
    F32,
    B64,
    F64,
}

impl Type {
    /// Registers that hold a value.
    pub(crate) fn registers(self) -> u16 {
        if matches!(self, Type::B64 | Type::F64) { 2 } else { 1 }
    }

    pub(crate) fn is_wide(self) -> bool {
        self.registers() == 2
    }

    /// The sign bit, which `-x` flips and `|x|` clears.
    pub(crate) fn sign(self) -> u64 {
        match self {
            Type::B16 | Type::F16 => 1 << 15,
            Type::B32 | Type::F32 => 1 << 31,
            Type::B64 | Type::F64 => 1 << 63,
        }
    }
}

/// The scalar registers, numbered as in the instruction encodings. Pairs begin at even numbers.
pub(crate) mod scalar {
    pub(crate) const FLAT_SCRATCH: u8 = 102;
    pub(crate) const XNACK_MASK: u8 = 104;
    pub(crate) const VCC: u8 = 106;
    pub(crate) const TTMP: u8 = 108;
    pub(crate) const M0: u8 = 124;
    pub(crate) const EXEC: u8 = 126;
    pub(crate) const COUNT: usize = 128;
}

/// The first accumulation register in the file of vector registers.
pub(crate) const ACCUMULATORS: u16 = 256;

/// The upper halves of the addresses by which flat instructions reach LDS and scratch memory.
pub(crate) const SHARED_APERTURE: u32 = 0x7fff_0000;
pub(crate) const PRIVATE_APERTURE: u32 = 0x7ffe_0000;

/// Where a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// A scalar register, or the first of several.
    Scalar(u8),
    /// A vector register, or the first of several. Accumulation registers follow from [`ACCUMULATORS`] on.
    Vector(u16),
    Constant(u64),
    /// A condition as 0 or 1.
    Condition(Condition),
    /// `off`: no register.
    Off,
}

/// Conditions that instructions can read as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Scc,
    VccIsZero,
    ExecIsZero,
}

/// A source with its modifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) operand: Operand,
    pub(crate) negate: bool,
    pub(crate) absolute: bool,
    /// `sext(v0)` of SDWA instructions.
    pub(crate) sign_extend: bool,
}

/// Parses a source that is read as `of`.
pub(crate) fn source(text: &str, of: Type) -> Option<Source> {
    let wrapped = |text: &'_ str, name: &str| {
        text.strip_prefix(name).and_then(|rest| rest.strip_suffix(')')).map(str::to_owned)
    };
    if let Some(inner) = wrapped(text, "sext(") {
        return source(&inner, of).map(|source| Source { sign_extend: true, ..source });
    }
    if let Some(inner) = text.strip_prefix('|').and_then(|rest| rest.strip_suffix('|')) {
        return source(inner, of).map(|source| Source { absolute: true, ..source });
    }
    if let Some(operand) = operand(text, of) {
        return Some(Source { operand, negate: false, absolute: false, sign_extend: false });
    }
    let inner = text.strip_prefix('-').map(str::to_owned).or_else(|| wrapped(text, "neg("))?;
    source(&inner, of).map(|source| Source { negate: true, ..source })
}

/// Parses an operand without modifiers.
pub(crate) fn operand(text: &str, of: Type) -> Option<Operand> {
    let (scc, vccz, execz) = (Condition::Scc, Condition::VccIsZero, Condition::ExecIsZero);
    Some(match text {
        "off" => Operand::Off,
        "scc" | "src_scc" => Operand::Condition(scc),
        "vccz" | "src_vccz" => Operand::Condition(vccz),
        "execz" | "src_execz" => Operand::Condition(execz),
        // Read as a pair, an aperture is an address; read as one register, it is the upper half.
        "src_shared_base" => aperture(SHARED_APERTURE, of),
        "src_private_base" => aperture(PRIVATE_APERTURE, of),
        _ => match register(text) {
            Some(register) => register,
            None => Operand::Constant(constant(text, of)?),
        },
    })
}

fn aperture(upper: u32, of: Type) -> Operand {
    Operand::Constant(if of.is_wide() { u64::from(upper) << 32 } else { u64::from(upper) })
}

fn register(text: &str) -> Option<Operand> {
    use scalar::{EXEC, FLAT_SCRATCH, M0, TTMP, VCC, XNACK_MASK};
    let pair = |name: &str, first: u8| match text.strip_prefix(name)? {
        "" | "_lo" => Some(Operand::Scalar(first)),
        "_hi" => Some(Operand::Scalar(first + 1)),
        _ => None,
    };
    let pairs = [
        ("vcc", VCC),
        ("exec", EXEC),
        ("flat_scratch", FLAT_SCRATCH),
        ("xnack_mask", XNACK_MASK),
        ("m0", M0),
    ];
    if let Some(found) = pairs.iter().find_map(|&(name, first)| pair(name, first)) {
        return Some(found);
    }
    if let Some(index) = text.strip_prefix("ttmp").and_then(first_index) {
        return Some(Operand::Scalar(TTMP + u8::try_from(index).ok()?));
    }
    let index = first_index(text.get(1..)?)?;
    match text.as_bytes()[0] {
        b's' => Some(Operand::Scalar(u8::try_from(index).ok()?)),
        b'v' => Some(Operand::Vector(index)),
        b'a' => Some(Operand::Vector(ACCUMULATORS + index)),
        _ => None,
    }
}

/// `5` or `[5:6]`.
fn first_index(text: &str) -> Option<u16> {
    let range = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    range.map_or(text, |range| range.split_once(':').map_or(range, |(first, _)| first)).parse().ok()
}

/// The bits of a constant. Whole numbers are bits in every type; numbers with a point are floats of the type's width. A
/// literal (hexadecimal) for a double is its upper half.
fn constant(text: &str, of: Type) -> Option<u64> {
    if let Some(value) = number(text) {
        return Some(match of {
            Type::F64 if text.starts_with("0x") => (value as u64) << 32,
            Type::B64 | Type::F64 => value as u64,
            _ => u64::from(value as u32),
        });
    }
    let value: f64 = text.parse().ok().filter(|_| text.contains('.'))?;
    Some(match of {
        Type::B16 | Type::F16 => u64::from(f16::from_f64(value).to_bits()),
        Type::B32 | Type::F32 => u64::from((value as f32).to_bits()),
        Type::B64 | Type::F64 => value.to_bits(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_of_every_file() {
        let of = |text| operand(text, Type::B32);
        assert_eq!(of("s7"), Some(Operand::Scalar(7)));
        assert_eq!(of("v[12:15]"), Some(Operand::Vector(12)));
        assert_eq!(of("a[0:31]"), Some(Operand::Vector(256)));
        assert_eq!(of("vcc_hi"), Some(Operand::Scalar(107)));
        assert_eq!(of("exec"), Some(Operand::Scalar(126)));
        assert_eq!(of("src_shared_base"), Some(Operand::Constant(0x7fff_0000)));
        assert_eq!(of("nonsense"), None);
    }

    #[test]
    fn constants_follow_the_type() {
        let of = |text, kind| match operand(text, kind) {
            Some(Operand::Constant(value)) => value,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(of("1.0", Type::F32), 0x3f80_0000);
        assert_eq!(of("1.0", Type::F16), 0x3c00);
        assert_eq!(of("-4.0", Type::F64), (-4.0_f64).to_bits());
        assert_eq!(of("0x3ff00000", Type::F64), 1.0_f64.to_bits());
        assert_eq!(of("-1", Type::B64), u64::MAX);
        assert_eq!(of("-1", Type::F32), 0xffff_ffff);
    }

    #[test]
    fn modifiers_surround_a_source() {
        let parsed = source("-|v3|", Type::F32).expect("a source");
        assert!(parsed.negate && parsed.absolute && parsed.operand == Operand::Vector(3));
        assert!(source("sext(v1)", Type::B32).expect("a source").sign_extend);
        let constant = source("-1", Type::B32).expect("a constant");
        assert!(!constant.negate);
    }
}

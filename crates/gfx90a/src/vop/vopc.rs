//! VOPC: comparisons, which write a bit for every lane to a scalar pair.

use crate::operand::Type;
use crate::wave::{LANES, WideLanes};

/// A comparison: how it reads its sources, and the bits of the lanes for which it holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    pub(crate) sources: [Type; 2],
    pub(crate) run: fn(&WideLanes, &WideLanes) -> u64,
}

/// The bits of the lanes for which a comparison holds.
#[inline]
fn each(holds: impl Fn(usize) -> bool) -> u64 {
    (0..LANES).fold(0, |bits, lane| bits | u64::from(holds(lane)) << lane)
}

/// The comparisons of a type, whose values come from the bits by `$of`.
macro_rules! comparisons {
    ($name:expr, $of:expr) => {
        match $name {
            "f" => |_, _| 0,
            "lt" => |a, b| each(|i| $of(a[i]) < $of(b[i])),
            "eq" => |a, b| each(|i| $of(a[i]) == $of(b[i])),
            "le" => |a, b| each(|i| $of(a[i]) <= $of(b[i])),
            "gt" => |a, b| each(|i| $of(a[i]) > $of(b[i])),
            "ge" => |a, b| each(|i| $of(a[i]) >= $of(b[i])),
            "ne" | "lg" => |a, b| each(|i| $of(a[i]) < $of(b[i]) || $of(a[i]) > $of(b[i])),
            "t" | "tru" => |_, _| u64::MAX,
            // These hold for NaN, too.
            "nge" => |a, b| each(|i| !($of(a[i]) >= $of(b[i]))),
            "nlg" => |a, b| each(|i| !($of(a[i]) < $of(b[i]) || $of(a[i]) > $of(b[i]))),
            "ngt" => |a, b| each(|i| !($of(a[i]) > $of(b[i]))),
            "nle" => |a, b| each(|i| !($of(a[i]) <= $of(b[i]))),
            "neq" => |a, b| each(|i| $of(a[i]) != $of(b[i])),
            "nlt" => |a, b| each(|i| !($of(a[i]) < $of(b[i]))),
            "o" => |a, b| each(|i| $of(a[i]) == $of(a[i]) && $of(b[i]) == $of(b[i])),
            "u" => |a, b| each(|i| $of(a[i]) != $of(a[i]) || $of(b[i]) != $of(b[i])),
            _ => return None,
        }
    };
}

/// The comparison of this name, such as `v_cmp_lt_f32`; `v_cmpx_lt_f32` has the same.
#[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN is neither less nor greater")]
pub(crate) fn comparison(name: &str) -> Option<Comparison> {
    let rest = name.strip_prefix("v_cmp_").or_else(|| name.strip_prefix("v_cmpx_"))?;
    let (kind, of) = rest.rsplit_once('_')?;
    if kind == "class" {
        return class(of);
    }
    let (source, run): (Type, fn(&WideLanes, &WideLanes) -> u64) = match of {
        "f16" => (Type::F16, comparisons!(kind, |bits: u64| half::f16::from_bits(bits as u16).to_f32())),
        "f32" => (Type::F32, comparisons!(kind, |bits: u64| f32::from_bits(bits as u32))),
        "f64" => (Type::F64, comparisons!(kind, f64::from_bits)),
        "u16" => (Type::B16, comparisons!(kind, |bits: u64| bits as u16)),
        "i16" => (Type::B16, comparisons!(kind, |bits: u64| bits as i16)),
        "u32" => (Type::B32, comparisons!(kind, |bits: u64| bits as u32)),
        "i32" => (Type::B32, comparisons!(kind, |bits: u64| bits as i32)),
        "u64" => (Type::B64, comparisons!(kind, |bits: u64| bits)),
        "i64" => (Type::B64, comparisons!(kind, |bits: u64| bits as i64)),
        _ => return None,
    };
    Some(Comparison { sources: [source; 2], run })
}

/// Whether the number belongs to one of the classes whose bits are set in the second source.
fn class(of: &str) -> Option<Comparison> {
    let (source, run): (Type, fn(&WideLanes, &WideLanes) -> u64) = match of {
        "f16" => (Type::F16, |a, b| each(|i| b[i] >> class_of(a[i] & 0xffff, 10, 5) & 1 == 1)),
        "f32" => (Type::F32, |a, b| each(|i| b[i] >> class_of(a[i] & 0xffff_ffff, 23, 8) & 1 == 1)),
        "f64" => (Type::F64, |a, b| each(|i| b[i] >> class_of(a[i], 52, 11) & 1 == 1)),
        _ => return None,
    };
    Some(Comparison { sources: [source, Type::B32], run })
}

/// The class of a number: 0 signalling NaN, 1 quiet NaN, 2 −∞, 3 negative, 4 negative subnormal, 5 −0, then their
/// positive counterparts 6 to 9.
fn class_of(bits: u64, mantissa_bits: u32, exponent_bits: u32) -> u32 {
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    let negative = bits >> (mantissa_bits + exponent_bits) & 1 == 1;
    let largest = (1 << exponent_bits) - 1;
    // Distance from zero: 0 for zero, 3 for infinity.
    let size = match (exponent, mantissa) {
        (exponent, 0) if exponent == largest => 3,
        (exponent, _) if exponent == largest => return (mantissa >> (mantissa_bits - 1)) as u32,
        (0, 0) => 0,
        (0, _) => 1,
        _ => 2,
    };
    if negative { 5 - size } else { 6 + size }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(name: &str, a: u64, b: u64) -> bool {
        let comparison = comparison(name).expect("a comparison");
        let bits = (comparison.run)(&[a; LANES], &[b; LANES]);
        assert!(bits == 0 || bits == u64::MAX);
        bits != 0
    }

    #[test]
    fn comparisons_with_nan() {
        let (one, nan) = (u64::from(1.0_f32.to_bits()), u64::from(f32::NAN.to_bits()));
        assert!(holds("v_cmp_ngt_f32", one, nan) && !holds("v_cmp_le_f32", one, nan));
        assert!(
            holds("v_cmp_u_f32", nan, one)
                && holds("v_cmp_neq_f32", nan, nan)
                && !holds("v_cmp_lg_f32", nan, nan)
        );
        assert!(holds("v_cmp_lt_i32", 0xffff_ffff, 1) && !holds("v_cmp_lt_u32", 0xffff_ffff, 1));
    }

    #[test]
    fn classes_of_numbers() {
        let of = |value: f32| class_of(u64::from(value.to_bits()), 23, 8);
        let numbers = [f32::NEG_INFINITY, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, f32::INFINITY];
        assert_eq!(numbers.map(of), [2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!((of(f32::NAN), class_of(0x7fa0_0000, 23, 8)), (1, 0));
        assert!(holds("v_cmp_class_f64", f64::INFINITY.to_bits(), 0x204));
    }
}

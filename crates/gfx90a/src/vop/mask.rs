//! Vector instructions that read or write a bit for every lane in a scalar pair: comparisons, carries, selections, and the
//! parts of a division.

use super::operation::{each, each_wide};
use super::vopc::{Comparison, comparison};
use super::{base_name, sdwa, vector_register};
use crate::assembly::Line;
use crate::operand::{Operand, Source, Type, operand, scalar, source};
use crate::wave::{LANES, Lanes, Wave};

/// An instruction that reads or writes masks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Masked {
    Compare {
        comparison: Comparison,
        to: u8,
        sources: [Source; 2],
        sdwa: Option<sdwa::Sdwa>,
        sets_exec: bool,
    },
    /// `mask ? b : a`
    Select {
        to: u16,
        sources: [Source; 2],
        mask: Operand,
        sdwa: Option<sdwa::Sdwa>,
    },
    Carry {
        run: CarryRun,
        to: u16,
        carry_to: u8,
        sources: [Source; 2],
        carry: Option<Operand>,
    },
    /// A product of 32-bit numbers plus a 64-bit number.
    MultiplyAdd {
        signed: bool,
        to: u16,
        carry_to: u8,
        sources: [Source; 3],
    },
    /// Scales a numerator or a denominator so that the division neither overflows nor loses digits.
    DivideScale {
        of: Type,
        to: u16,
        scaled_to: u8,
        sources: [Source; 3],
    },
    /// The last step of a division, which undoes the scaling.
    DivideFma {
        of: Type,
        to: u16,
        sources: [Source; 3],
    },
}

/// The sum or difference of two numbers and a carry, and the new carry.
type CarryRun = fn(u32, u32, bool) -> (u32, bool);

fn add(a: u32, b: u32, carry: bool) -> (u32, bool) {
    let sum = u64::from(a) + u64::from(b) + u64::from(carry);
    (sum as u32, sum >> 32 != 0)
}

fn subtract(a: u32, b: u32, borrow: bool) -> (u32, bool) {
    let (difference, first) = a.overflowing_sub(b);
    let (difference, second) = difference.overflowing_sub(u32::from(borrow));
    (difference, first || second)
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Masked> {
    let name = base_name(&line.mnemonic);
    if line.mnemonic.ends_with("_dpp") || line.has("clamp") {
        return None;
    }
    let texts = &line.operands;
    let pair = |index: usize| match operand(texts.get(index)?, Type::B64)? {
        Operand::Scalar(first) => Some(first),
        _ => None,
    };
    let number = |index: usize, of: Type| source(texts.get(index)?, of);
    let sdwa = sdwa::decode(line);
    if let Some(comparison) = comparison(name) {
        let [a, b] = comparison.sources;
        let sources = [number(1, a)?, number(2, b)?];
        return Some(Masked::Compare {
            comparison,
            to: pair(0)?,
            sources,
            sdwa,
            sets_exec: name.starts_with("v_cmpx"),
        });
    }
    let to = vector_register(texts.first()?)?;
    let run: CarryRun = match name {
        "v_cndmask_b32" => {
            let mask = operand(texts.get(3)?, Type::B64)?;
            return Some(Masked::Select {
                to,
                sources: [number(1, Type::F32)?, number(2, Type::F32)?],
                mask,
                sdwa,
            });
        }
        "v_mad_u64_u32" | "v_mad_i64_i32" => {
            let sources = [number(2, Type::B32)?, number(3, Type::B32)?, number(4, Type::B64)?];
            return Some(Masked::MultiplyAdd {
                signed: name == "v_mad_i64_i32",
                to,
                carry_to: pair(1)?,
                sources,
            });
        }
        "v_div_scale_f32" | "v_div_scale_f64" => {
            let of = if name.ends_with("64") { Type::F64 } else { Type::F32 };
            let sources = [number(2, of)?, number(3, of)?, number(4, of)?];
            return Some(Masked::DivideScale { of, to, scaled_to: pair(1)?, sources });
        }
        "v_div_fmas_f32" | "v_div_fmas_f64" => {
            let of = if name.ends_with("64") { Type::F64 } else { Type::F32 };
            return Some(Masked::DivideFma {
                of,
                to,
                sources: [number(1, of)?, number(2, of)?, number(3, of)?],
            });
        }
        "v_add_co_u32" | "v_addc_co_u32" => add,
        "v_sub_co_u32" | "v_subb_co_u32" => subtract,
        "v_subrev_co_u32" | "v_subbrev_co_u32" => |a, b, borrow| subtract(b, a, borrow),
        _ => return None,
    };
    if sdwa.is_some() {
        return None;
    }
    let carry = match texts.get(4) {
        Some(text) => Some(operand(text, Type::B64)?),
        None => None,
    };
    Some(Masked::Carry {
        run,
        to,
        carry_to: pair(1)?,
        sources: [number(2, Type::B32)?, number(3, Type::B32)?],
        carry,
    })
}

impl Masked {
    /// Executes the instruction. A mask that is written has zeros for lanes that do not take part.
    pub(crate) fn run(&self, wave: &mut Wave) {
        let exec = wave.exec();
        match *self {
            Masked::Compare { comparison, to, sources, sdwa, sets_exec } => {
                let mut values = [0, 1].map(|i| wave.wide_lanes(plain(sources[i]), comparison.sources[i]));
                for (i, values) in values.iter_mut().enumerate() {
                    let Source { absolute, negate, sign_extend, .. } = sources[i];
                    let sign = comparison.sources[i].sign();
                    for value in values {
                        if let Some(sdwa) = sdwa {
                            *value = u64::from(sdwa.sources[i].of(*value as u32, sign_extend));
                        }
                        if absolute {
                            *value &= !sign;
                        }
                        if negate {
                            *value ^= sign;
                        }
                    }
                }
                let bits = (comparison.run)(&values[0], &values[1]) & exec;
                wave.set_pair(to, bits);
                if sets_exec {
                    wave.set_exec(bits);
                }
            }
            Masked::Select { to, sources, mask, sdwa } => {
                let mask = wave.uniform(mask, true);
                let values = [0, 1].map(|i| {
                    let signed = sources[i].sign_extend;
                    let select = sdwa.map_or(sdwa::Select::All, |sdwa| sdwa.sources[i]);
                    let values = wave.wide_lanes(plain(sources[i]), Type::F32);
                    let mut values: Lanes = values.map(|value| select.of(value as u32, signed));
                    super::apply_signs(&mut values, sources[i], Type::F32);
                    values
                });
                let mut result = each(|lane| values[(mask >> lane & 1) as usize][lane]);
                if let Some(sdwa) = sdwa {
                    let before = wave.vector[usize::from(to)];
                    result = each(|lane| sdwa.put(result[lane], before[lane]));
                }
                wave.write(to, &result);
            }
            Masked::Carry { run, to, carry_to, sources, carry } => {
                let carry = carry.map_or(0, |carry| wave.uniform(carry, true));
                let (mut a, mut b) = ([0; LANES], [0; LANES]);
                let (a, b) = (wave.lanes(sources[0].operand, &mut a), wave.lanes(sources[1].operand, &mut b));
                let (mut result, mut bits) = ([0; LANES], 0);
                for lane in 0..LANES {
                    let (value, carried) = run(a[lane], b[lane], carry >> lane & 1 == 1);
                    result[lane] = value;
                    bits |= u64::from(carried) << lane;
                }
                wave.write(to, &result);
                wave.set_pair(carry_to, bits & exec);
            }
            Masked::MultiplyAdd { signed, to, carry_to, sources } => {
                let of = [Type::B32, Type::B32, Type::B64];
                let [a, b, c] = [0, 1, 2].map(|i| wave.wide_lanes(sources[i], of[i]));
                let mut bits = 0;
                let mut result = [0; LANES];
                for lane in 0..LANES {
                    let (value, carried) = if signed {
                        let product = i64::from(a[lane] as i32) * i64::from(b[lane] as i32);
                        let (sum, overflow) = product.overflowing_add(c[lane] as i64);
                        (sum as u64, overflow)
                    } else {
                        (a[lane] * b[lane]).overflowing_add(c[lane])
                    };
                    result[lane] = value;
                    bits |= u64::from(carried) << lane;
                }
                wave.write_wide(to, &result);
                wave.set_pair(carry_to, bits & exec);
            }
            Masked::DivideScale { of, to, scaled_to, sources } => {
                divide_scale(wave, of, to, scaled_to, sources);
            }
            Masked::DivideFma { of, to, sources } => divide_fma(wave, of, to, sources),
        }
    }
}

/// The source without its signs, which come after a selection by SDWA.
fn plain(source: Source) -> Source {
    Source { negate: false, absolute: false, ..source }
}

fn divide_scale(wave: &mut Wave, of: Type, to: u16, scaled_to: u8, sources: [Source; 3]) {
    let [value, denominator, numerator] = sources.map(|source| wave.wide_lanes(source, of));
    let (mut result, mut bits) = ([0; LANES], 0);
    for lane in 0..LANES {
        let (scaled, flag) = if of == Type::F64 {
            let [s, d, n] = [value[lane], denominator[lane], numerator[lane]].map(f64::from_bits);
            let (scaled, flag) = scale_64(s, d, n);
            (scaled.to_bits(), flag)
        } else {
            let [s, d, n] =
                [value[lane], denominator[lane], numerator[lane]].map(|x| f32::from_bits(x as u32));
            let (scaled, flag) = scale_32(s, d, n);
            (u64::from(scaled.to_bits()), flag)
        };
        result[lane] = scaled;
        bits |= u64::from(flag) << lane;
    }
    if of == Type::F64 {
        wave.write_wide(to, &result);
    } else {
        wave.write(to, &result.map(|value| value as u32));
    }
    let exec = wave.exec();
    wave.set_pair(scaled_to, bits & exec);
}

/// The quotient's range, as `V_DIV_SCALE` sees it.
#[expect(clippy::struct_excessive_bools, reason = "independent properties of two numbers")]
struct Division {
    /// The difference of the exponents of numerator and denominator.
    exponents: i32,
    near_infinity: i32,
    tiny_numerator: bool,
    subnormal_denominator: bool,
    subnormal_reciprocal: bool,
    subnormal_quotient: bool,
}

/// Which number is scaled, and in which direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Nothing,
    Up,
    Down,
}

impl Division {
    /// How a value is scaled that is the numerator or the denominator, and whether the quotient is scaled back.
    fn scale(&self, is_numerator: bool, is_denominator: bool) -> (Scale, bool) {
        let only = |chosen: bool, scale: Scale| if chosen { scale } else { Scale::Nothing };
        if self.exponents >= self.near_infinity {
            (only(is_denominator, Scale::Up), true)
        } else if self.subnormal_denominator {
            (Scale::Up, false)
        } else if self.subnormal_reciprocal && self.subnormal_quotient {
            (only(is_denominator, Scale::Down), true)
        } else if self.subnormal_reciprocal {
            (Scale::Down, false)
        } else if self.subnormal_quotient {
            (only(is_numerator, Scale::Up), true)
        } else if self.tiny_numerator {
            (Scale::Up, false)
        } else {
            (Scale::Nothing, false)
        }
    }
}

/// `V_DIV_SCALE_F32`: the value, a denominator or a numerator, times `2^±64` where the quotient needs it, and whether the
/// quotient is scaled back.
fn scale_32(value: f32, denominator: f32, numerator: f32) -> (f32, bool) {
    if denominator == 0.0 || numerator == 0.0 {
        return (f32::NAN, false);
    }
    let exponent = |a: f32| (a.to_bits() >> 23 & 0xff) as i32;
    let division = Division {
        exponents: exponent(numerator) - exponent(denominator),
        near_infinity: 96,
        tiny_numerator: exponent(numerator) <= 23,
        subnormal_denominator: denominator.is_subnormal(),
        subnormal_reciprocal: (1.0 / denominator).is_subnormal(),
        subnormal_quotient: (numerator / denominator).is_subnormal(),
    };
    let is = |a: f32| a.to_bits() == value.to_bits();
    match division.scale(is(numerator), is(denominator)) {
        (Scale::Nothing, flag) => (value, flag),
        (Scale::Up, flag) => (value * 2.0_f32.powi(64), flag),
        (Scale::Down, flag) => (value * 2.0_f32.powi(-64), flag),
    }
}

/// The same in fp64, by `2^±128`.
fn scale_64(value: f64, denominator: f64, numerator: f64) -> (f64, bool) {
    if denominator == 0.0 || numerator == 0.0 {
        return (f64::NAN, false);
    }
    let exponent = |a: f64| (a.to_bits() >> 52 & 0x7ff) as i32;
    let division = Division {
        exponents: exponent(numerator) - exponent(denominator),
        near_infinity: 768,
        tiny_numerator: exponent(numerator) <= 53,
        subnormal_denominator: denominator.is_subnormal(),
        subnormal_reciprocal: (1.0 / denominator).is_subnormal(),
        subnormal_quotient: (numerator / denominator).is_subnormal(),
    };
    let is = |a: f64| a.to_bits() == value.to_bits();
    match division.scale(is(numerator), is(denominator)) {
        (Scale::Nothing, flag) => (value, flag),
        (Scale::Up, flag) => (value * 2.0_f64.powi(128), flag),
        (Scale::Down, flag) => (value * 2.0_f64.powi(-128), flag),
    }
}

/// A quotient that was scaled was too small if it is large, and too large if it is small.
fn divide_fma(wave: &mut Wave, of: Type, to: u16, sources: [Source; 3]) {
    let vcc = wave.pair(scalar::VCC);
    let [a, b, c] = sources.map(|source| wave.wide_lanes(source, of));
    let scaled = |lane: usize| vcc >> lane & 1 == 1;
    if of == Type::F64 {
        let result = each_wide(|lane| {
            let [a, b, c] = [a[lane], b[lane], c[lane]].map(f64::from_bits);
            let factor = if c.abs() >= 2.0 { 2.0_f64.powi(128) } else { 2.0_f64.powi(-128) };
            (a.mul_add(b, c) * if scaled(lane) { factor } else { 1.0 }).to_bits()
        });
        wave.write_wide(to, &result);
    } else {
        let result = each(|lane| {
            let [a, b, c] = [a[lane], b[lane], c[lane]].map(|bits| f32::from_bits(bits as u32));
            let factor = if c.abs() >= 2.0 { 2.0_f32.powi(64) } else { 2.0_f32.powi(-64) };
            (a.mul_add(b, c) * if scaled(lane) { factor } else { 1.0 }).to_bits()
        });
        wave.write(to, &result);
    }
}

//! SOP1, SOP2, SOPC and SOPK: arithmetic on scalar registers, and comparisons into SCC.

use crate::assembly::{Line, number};
use crate::operand::{Operand, Type, operand};
use crate::wave::Wave;

/// A scalar instruction. A source of 32 bits is extended by zeros, and a result of 32 bits is cut off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalar {
    run: Run,
    to: u8,
    wide: bool,
    sources: [Operand; 2],
    wide_sources: [bool; 2],
}

#[derive(Clone, Copy, Debug)]
enum Run {
    /// The result of two sources and SCC, which it may change.
    Result(fn(u64, u64, &mut bool) -> u64),
    /// A comparison into SCC.
    Compare(fn(u64, u64) -> bool),
    /// The result is EXEC before; EXEC becomes a combination of the source and itself.
    SaveExec(fn(u64, u64) -> u64),
}

/// Where the sources are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Destination and one or two sources; comparisons have no destination.
    Sources,
    /// A destination that is also the second source.
    Updates,
    /// A constant of 16 bits, extended by its sign, as the only source or after the destination, which is read.
    SignedConstant,
    UnsignedConstant,
}

struct Operation {
    run: Run,
    form: Form,
    wide: bool,
    wide_sources: [bool; 2],
}

impl Operation {
    /// A second source that is wider or narrower than the result.
    fn sources(self, first: bool, second: bool) -> Self {
        Operation { wide_sources: [first, second], ..self }
    }

    fn form(self, form: Form) -> Self {
        Operation { form, ..self }
    }
}

/// Sets SCC if the result is not zero.
fn not_zero(value: u64, scc: &mut bool) -> u64 {
    *scc = value != 0;
    value
}

/// The same for a result of 32 bits.
fn not_zero_32(value: u32, scc: &mut bool) -> u64 {
    not_zero(u64::from(value), scc)
}

fn narrow(run: fn(u64, u64, &mut bool) -> u64) -> Operation {
    Operation { run: Run::Result(run), form: Form::Sources, wide: false, wide_sources: [false; 2] }
}

fn wide(run: fn(u64, u64, &mut bool) -> u64) -> Operation {
    Operation { run: Run::Result(run), form: Form::Sources, wide: true, wide_sources: [true; 2] }
}

fn compare(run: fn(u64, u64) -> bool) -> Operation {
    Operation { run: Run::Compare(run), form: Form::Sources, wide: false, wide_sources: [false; 2] }
}

fn save_exec(run: fn(u64, u64) -> u64) -> Operation {
    Operation { run: Run::SaveExec(run), ..wide(|_, _, _| 0) }
}

/// A signed sum, and whether it does not fit.
fn signed((value, overflow): (i32, bool), scc: &mut bool) -> u64 {
    *scc = overflow;
    u64::from(value as u32)
}

fn operation(name: &str) -> Option<Operation> {
    arithmetic(name).or_else(|| logic(name)).or_else(|| bits(name)).or_else(|| comparison(name))
}

fn arithmetic(name: &str) -> Option<Operation> {
    Some(match name {
        "s_add_u32" => narrow(|a, b, scc| {
            *scc = a + b > u64::from(u32::MAX);
            a + b
        }),
        "s_addc_u32" => narrow(|a, b, scc| {
            let sum = a + b + u64::from(*scc);
            *scc = sum > u64::from(u32::MAX);
            sum
        }),
        "s_sub_u32" => narrow(|a, b, scc| {
            *scc = b > a;
            a.wrapping_sub(b)
        }),
        "s_subb_u32" => narrow(|a, b, scc| {
            let taken = b + u64::from(*scc);
            *scc = taken > a;
            a.wrapping_sub(taken)
        }),
        "s_add_i32" => narrow(|a, b, scc| signed((a as i32).overflowing_add(b as i32), scc)),
        "s_sub_i32" => narrow(|a, b, scc| signed((a as i32).overflowing_sub(b as i32), scc)),
        "s_addk_i32" => {
            narrow(|constant, old, scc| signed((old as i32).overflowing_add(constant as i32), scc))
                .form(Form::SignedConstant)
        }
        "s_mul_i32" => narrow(|a, b, _| a.wrapping_mul(b)),
        "s_mulk_i32" => narrow(|constant, old, _| constant.wrapping_mul(old)).form(Form::SignedConstant),
        "s_mul_hi_u32" => narrow(|a, b, _| (a * b) >> 32),
        "s_mul_hi_i32" => narrow(|a, b, _| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u64),
        "s_min_u32" => narrow(|a, b, scc| {
            *scc = a < b;
            a.min(b)
        }),
        "s_max_u32" => narrow(|a, b, scc| {
            *scc = a > b;
            a.max(b)
        }),
        "s_min_i32" => narrow(|a, b, scc| {
            *scc = (a as i32) < b as i32;
            if *scc { a } else { b }
        }),
        "s_max_i32" => narrow(|a, b, scc| {
            *scc = a as i32 > b as i32;
            if *scc { a } else { b }
        }),
        "s_abs_i32" => narrow(|a, _, scc| not_zero_32((a as i32).unsigned_abs(), scc)),
        "s_absdiff_i32" => {
            narrow(|a, b, scc| not_zero_32((a as i32).wrapping_sub(b as i32).unsigned_abs(), scc))
        }
        "s_lshl1_add_u32" => narrow(|a, b, scc| shifted_sum(a, 1, b, scc)),
        "s_lshl2_add_u32" => narrow(|a, b, scc| shifted_sum(a, 2, b, scc)),
        "s_lshl3_add_u32" => narrow(|a, b, scc| shifted_sum(a, 3, b, scc)),
        "s_lshl4_add_u32" => narrow(|a, b, scc| shifted_sum(a, 4, b, scc)),
        _ => return None,
    })
}

fn shifted_sum(a: u64, shift: u32, b: u64, scc: &mut bool) -> u64 {
    let sum = (a << shift) + b;
    *scc = sum > u64::from(u32::MAX);
    sum
}

fn logic(name: &str) -> Option<Operation> {
    let (operation, bits) = name.rsplit_once('_')?;
    let run: fn(u64, u64, &mut bool) -> u64 = match operation {
        "s_and" => |a, b, scc| not_zero(a & b, scc),
        "s_or" => |a, b, scc| not_zero(a | b, scc),
        "s_xor" => |a, b, scc| not_zero(a ^ b, scc),
        "s_andn2" => |a, b, scc| not_zero(a & !b, scc),
        _ => return other_logic(name),
    };
    match bits {
        "b32" => Some(narrow(run)),
        "b64" => Some(wide(run)),
        _ => None,
    }
}

fn other_logic(name: &str) -> Option<Operation> {
    Some(match name {
        "s_orn2_b32" => narrow(|a, b, scc| not_zero_32(a as u32 | !b as u32, scc)),
        "s_orn2_b64" => wide(|a, b, scc| not_zero(a | !b, scc)),
        "s_nand_b32" => narrow(|a, b, scc| not_zero_32(!(a & b) as u32, scc)),
        "s_nand_b64" => wide(|a, b, scc| not_zero(!(a & b), scc)),
        "s_nor_b32" => narrow(|a, b, scc| not_zero_32(!(a | b) as u32, scc)),
        "s_nor_b64" => wide(|a, b, scc| not_zero(!(a | b), scc)),
        "s_xnor_b32" => narrow(|a, b, scc| not_zero_32(!(a ^ b) as u32, scc)),
        "s_xnor_b64" => wide(|a, b, scc| not_zero(!(a ^ b), scc)),
        "s_not_b32" => narrow(|a, _, scc| not_zero_32(!a as u32, scc)),
        "s_not_b64" => wide(|a, _, scc| not_zero(!a, scc)),
        "s_and_saveexec_b64" => save_exec(|source, exec| source & exec),
        "s_or_saveexec_b64" => save_exec(|source, exec| source | exec),
        "s_xor_saveexec_b64" => save_exec(|source, exec| source ^ exec),
        "s_andn2_saveexec_b64" => save_exec(|source, exec| source & !exec),
        "s_andn1_saveexec_b64" => save_exec(|source, exec| !source & exec),
        "s_orn2_saveexec_b64" => save_exec(|source, exec| source | !exec),
        "s_orn1_saveexec_b64" => save_exec(|source, exec| !source | exec),
        _ => return None,
    })
}

fn bits(name: &str) -> Option<Operation> {
    Some(match name {
        "s_mov_b32" => narrow(|a, _, _| a),
        "s_mov_b64" => wide(|a, _, _| a),
        "s_movk_i32" => narrow(|constant, _, _| constant).form(Form::SignedConstant),
        "s_cmov_b32" => narrow(|a, old, scc| if *scc { a } else { old }).form(Form::Updates),
        "s_cmov_b64" => wide(|a, old, scc| if *scc { a } else { old }).form(Form::Updates),
        "s_cselect_b32" => narrow(|a, b, scc| if *scc { a } else { b }),
        "s_cselect_b64" => wide(|a, b, scc| if *scc { a } else { b }),
        "s_lshl_b32" => narrow(|a, b, scc| not_zero_32((a as u32) << (b & 31), scc)),
        "s_lshr_b32" => narrow(|a, b, scc| not_zero_32(a as u32 >> (b & 31), scc)),
        "s_ashr_i32" => narrow(|a, b, scc| not_zero_32((a as i32 >> (b & 31)) as u32, scc)),
        "s_lshl_b64" => wide(|a, b, scc| not_zero(a << (b & 63), scc)).sources(true, false),
        "s_lshr_b64" => wide(|a, b, scc| not_zero(a >> (b & 63), scc)).sources(true, false),
        "s_ashr_i64" => wide(|a, b, scc| not_zero((a as i64 >> (b & 63)) as u64, scc)).sources(true, false),
        "s_bfm_b32" => narrow(|a, b, _| ((1 << (a & 31)) - 1) << (b & 31)),
        "s_bfm_b64" => wide(|a, b, _| ((1 << (a & 63)) - 1) << (b & 63)).sources(false, false),
        "s_bfe_u32" => narrow(|a, b, scc| not_zero(field(a, b, 31), scc)),
        "s_bfe_u64" => wide(|a, b, scc| not_zero(field(a, b, 63), scc)).sources(true, false),
        "s_bfe_i32" => narrow(|a, b, scc| {
            let width = (b >> 16 & 127).min(32) as u32;
            let value = field(a, b, 31) as u32;
            let extended = if width == 0 { 0 } else { (value << (32 - width)) as i32 >> (32 - width) };
            not_zero_32(extended as u32, scc)
        }),
        "s_brev_b32" => narrow(|a, _, _| u64::from((a as u32).reverse_bits())),
        "s_brev_b64" => wide(|a, _, _| a.reverse_bits()),
        "s_bcnt1_i32_b32" => narrow(|a, _, scc| not_zero_32((a as u32).count_ones(), scc)),
        "s_bcnt1_i32_b64" => narrow(|a, _, scc| not_zero_32(a.count_ones(), scc)).sources(true, true),
        "s_ff1_i32_b32" => narrow(|a, _, _| if a == 0 { u64::MAX } else { u64::from(a.trailing_zeros()) }),
        "s_ff1_i32_b64" => narrow(|a, _, _| if a == 0 { u64::MAX } else { u64::from(a.trailing_zeros()) })
            .sources(true, true),
        "s_flbit_i32_b32" => {
            narrow(|a, _, _| if a == 0 { u64::MAX } else { u64::from((a as u32).leading_zeros()) })
        }
        "s_flbit_i32_b64" => {
            narrow(|a, _, _| if a == 0 { u64::MAX } else { u64::from(a.leading_zeros()) }).sources(true, true)
        }
        // The number of leading bits that equal the sign.
        "s_flbit_i32" => narrow(|a, _, _| {
            let value = a as i32;
            let folded = if value < 0 { !value } else { value };
            if folded == 0 { u64::MAX } else { u64::from(folded.leading_zeros()) }
        }),
        "s_sext_i32_i8" => narrow(|a, _, _| i64::from(a as i8) as u64),
        "s_sext_i32_i16" => narrow(|a, _, _| i64::from(a as i16) as u64),
        "s_bitset0_b32" => narrow(|a, old, _| old & !(1 << (a & 31))).form(Form::Updates),
        "s_bitset1_b32" => narrow(|a, old, _| old | 1 << (a & 31)).form(Form::Updates),
        "s_pack_ll_b32_b16" => narrow(|a, b, _| a & 0xffff | (b & 0xffff) << 16),
        "s_pack_lh_b32_b16" => narrow(|a, b, _| a & 0xffff | b & 0xffff_0000),
        "s_pack_hh_b32_b16" => narrow(|a, b, _| a >> 16 | b & 0xffff_0000),
        _ => return None,
    })
}

/// Bits of `a`, the lowest in the low bits of `b` and their number from bit 16 on.
fn field(a: u64, b: u64, offset_mask: u64) -> u64 {
    let (offset, width) = (b & offset_mask, b >> 16 & 127);
    (a >> offset) & if width >= 64 { u64::MAX } else { (1 << width) - 1 }
}

fn comparison(name: &str) -> Option<Operation> {
    let (rest, form) = match (name.strip_prefix("s_cmp_"), name.strip_prefix("s_cmpk_")) {
        (Some(rest), _) => (rest, Form::Sources),
        (_, Some(rest)) if rest.ends_with("u32") => (rest, Form::UnsignedConstant),
        (_, Some(rest)) => (rest, Form::SignedConstant),
        _ => return bit_comparison(name),
    };
    let run: fn(u64, u64) -> bool = match rest {
        "eq_i32" | "eq_u32" | "eq_u64" => |a, b| a == b,
        "lg_i32" | "lg_u32" | "lg_u64" => |a, b| a != b,
        "gt_u32" => |a, b| a > b,
        "ge_u32" => |a, b| a >= b,
        "lt_u32" => |a, b| a < b,
        "le_u32" => |a, b| a <= b,
        "gt_i32" => |a, b| a as i32 > b as i32,
        "ge_i32" => |a, b| a as i32 >= b as i32,
        "lt_i32" => |a, b| (a as i32) < b as i32,
        "le_i32" => |a, b| a as i32 <= b as i32,
        _ => return None,
    };
    let wide = rest.ends_with("64");
    Some(compare(run).form(form).sources(wide, wide))
}

fn bit_comparison(name: &str) -> Option<Operation> {
    Some(match name {
        "s_bitcmp0_b32" => compare(|a, b| a >> (b & 31) & 1 == 0),
        "s_bitcmp1_b32" => compare(|a, b| a >> (b & 31) & 1 == 1),
        "s_bitcmp0_b64" => compare(|a, b| a >> (b & 63) & 1 == 0).sources(true, false),
        "s_bitcmp1_b64" => compare(|a, b| a >> (b & 63) & 1 == 1).sources(true, false),
        _ => return None,
    })
}

/// Decodes a line. `None` if it is not one of these instructions.
pub(crate) fn decode(line: &Line) -> Option<Scalar> {
    let Operation { run, form, wide, wide_sources } = operation(&line.mnemonic)?;
    let of = |wide| if wide { Type::B64 } else { Type::B32 };
    let texts = &line.operands;
    let first = operand(texts.first()?, of(wide || wide_sources[0]))?;
    let compares = matches!(run, Run::Compare(_));
    let to = match first {
        Operand::Scalar(register) if !compares => register,
        _ if compares => 0,
        _ => return None,
    };
    let none = Operand::Off;
    let sources = match form {
        Form::Sources => {
            let skipped = usize::from(!compares);
            let parsed = |index: usize| match texts.get(skipped + index) {
                Some(text) => operand(text, of(wide_sources[index])),
                None => Some(none),
            };
            [parsed(0)?, parsed(1)?]
        }
        Form::Updates => [operand(texts.get(1)?, of(wide))?, first],
        Form::SignedConstant | Form::UnsignedConstant => {
            let bits = number(texts.get(1)?)?;
            let value =
                if form == Form::SignedConstant { bits as i16 as i32 as u32 } else { bits as u16 as u32 };
            let constant = Operand::Constant(u64::from(value));
            if compares { [first, constant] } else { [constant, first] }
        }
    };
    Some(Scalar { run, to, wide, sources, wide_sources })
}

impl Scalar {
    /// Executes the instruction.
    pub(crate) fn run(&self, wave: &mut Wave) {
        let [a, b] = [0, 1].map(|i| wave.uniform(self.sources[i], self.wide_sources[i]));
        let result = match self.run {
            Run::Compare(compare) => {
                wave.scc = compare(a, b);
                return;
            }
            Run::Result(run) => {
                let mut scc = wave.scc;
                let result = run(a, b, &mut scc);
                wave.scc = scc;
                result
            }
            Run::SaveExec(combine) => {
                let before = wave.exec();
                let after = combine(a, before);
                wave.set_exec(after);
                wave.scc = after != 0;
                before
            }
        };
        if self.wide {
            wave.set_pair(self.to, result);
        } else {
            wave.scalar[usize::from(self.to)] = result as u32;
        }
    }
}

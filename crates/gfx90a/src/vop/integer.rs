//! Arithmetic and logic on integers: VOP1, VOP2 and VOP3.

use super::operation::{Operation, Run, bits, each, each_wide, wide};
use crate::operand::Type::{B16, B32, B64};

/// The operation of this name, without `_e32` and the like.
pub(crate) fn operation(name: &str) -> Option<Operation> {
    moves(name).or_else(|| arithmetic(name)).or_else(|| logic(name)).or_else(|| short(name))
}

fn moves(name: &str) -> Option<Operation> {
    Some(match name {
        "v_mov_b32" | "v_accvgpr_read_b32" | "v_accvgpr_write_b32" | "v_accvgpr_mov_b32" => {
            bits!(B32; |a: B32| a)
        }
        "v_mov_b64" => wide!(B64; |a: B64| a),
        "v_not_b32" => bits!(B32; |a: B32| !a),
        "v_bfrev_b32" => bits!(B32; |a: B32| a.reverse_bits()),
        "v_ffbh_u32" => bits!(B32; |a: B32| if a == 0 { u32::MAX } else { a.leading_zeros() }),
        "v_ffbl_b32" => bits!(B32; |a: B32| if a == 0 { u32::MAX } else { a.trailing_zeros() }),
        "v_ffbh_i32" => bits!(B32; |a: B32| {
            let folded = if (a as i32) < 0 { !a } else { a };
            if folded == 0 { u32::MAX } else { folded.leading_zeros() }
        }),
        // The number of bits before the lane in a mask of the lanes, added to the second source.
        "v_mbcnt_lo_u32_b32" => Operation::new(
            &[B32, B32],
            B32,
            Run::Narrow(|mask, sum, _| {
                each(|i| sum[i] + (mask[i] & if i < 32 { (1 << i) - 1 } else { u32::MAX }).count_ones())
            }),
        ),
        "v_mbcnt_hi_u32_b32" => Operation::new(
            &[B32, B32],
            B32,
            Run::Narrow(|mask, sum, _| {
                each(|i| sum[i] + (mask[i] & if i < 32 { 0 } else { (1 << (i - 32)) - 1 }).count_ones())
            }),
        ),
        _ => return None,
    })
}

fn arithmetic(name: &str) -> Option<Operation> {
    Some(match name {
        "v_add_u32" | "v_add_i32" => bits!(B32; |a: B32, b: B32| a.wrapping_add(b)),
        "v_sub_u32" | "v_sub_i32" => bits!(B32; |a: B32, b: B32| a.wrapping_sub(b)),
        "v_subrev_u32" => bits!(B32; |a: B32, b: B32| b.wrapping_sub(a)),
        "v_add3_u32" => bits!(B32; |a: B32, b: B32, c: B32| a.wrapping_add(b).wrapping_add(c)),
        "v_add_lshl_u32" => bits!(B32; |a: B32, b: B32, c: B32| a.wrapping_add(b) << (c & 31)),
        "v_lshl_add_u32" => bits!(B32; |a: B32, b: B32, c: B32| (a << (b & 31)).wrapping_add(c)),
        "v_lshl_add_u64" => wide!(B64; |a: B64, b: B32, c: B64| (a << (b & 7)).wrapping_add(c)),
        "v_xad_u32" => bits!(B32; |a: B32, b: B32, c: B32| (a ^ b).wrapping_add(c)),
        "v_sad_u32" => bits!(B32; |a: B32, b: B32, c: B32| a.abs_diff(b).wrapping_add(c)),
        "v_mul_lo_u32" | "v_mul_lo_i32" => bits!(B32; |a: B32, b: B32| a.wrapping_mul(b)),
        "v_mul_hi_u32" => bits!(B32; |a: B32, b: B32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "v_mul_hi_i32" => {
            bits!(B32; |a: B32, b: B32| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32)
        }
        "v_mul_u32_u24" => bits!(B32; |a: B32, b: B32| low_24(a).wrapping_mul(low_24(b))),
        "v_mul_i32_i24" => bits!(B32; |a: B32, b: B32| signed_24(a).wrapping_mul(signed_24(b)) as u32),
        "v_mul_hi_u32_u24" => {
            bits!(B32; |a: B32, b: B32| ((u64::from(low_24(a)) * u64::from(low_24(b))) >> 32) as u32)
        }
        "v_mad_u32_u24" => {
            bits!(B32; |a: B32, b: B32, c: B32| low_24(a).wrapping_mul(low_24(b)).wrapping_add(c))
        }
        "v_mad_i32_i24" => {
            bits!(B32; |a: B32, b: B32, c: B32| (signed_24(a).wrapping_mul(signed_24(b)) as u32).wrapping_add(c))
        }
        "v_min_u32" => bits!(B32; |a: B32, b: B32| a.min(b)),
        "v_max_u32" => bits!(B32; |a: B32, b: B32| a.max(b)),
        "v_min_i32" => bits!(B32; |a: B32, b: B32| (a as i32).min(b as i32) as u32),
        "v_max_i32" => bits!(B32; |a: B32, b: B32| (a as i32).max(b as i32) as u32),
        "v_min3_u32" => bits!(B32; |a: B32, b: B32, c: B32| a.min(b).min(c)),
        "v_max3_u32" => bits!(B32; |a: B32, b: B32, c: B32| a.max(b).max(c)),
        "v_med3_u32" => bits!(B32; |a: B32, b: B32, c: B32| a.max(b).min(a.min(b).max(c))),
        "v_min3_i32" => bits!(B32; |a: B32, b: B32, c: B32| (a as i32).min(b as i32).min(c as i32) as u32),
        "v_max3_i32" => bits!(B32; |a: B32, b: B32, c: B32| (a as i32).max(b as i32).max(c as i32) as u32),
        "v_med3_i32" => bits!(B32; |a: B32, b: B32, c: B32| {
            let (a, b, c) = (a as i32, b as i32, c as i32);
            a.max(b).min(a.min(b).max(c)) as u32
        }),
        _ => return None,
    })
}

fn low_24(a: u32) -> u32 {
    a & 0xff_ffff
}

fn signed_24(a: u32) -> i32 {
    (a << 8) as i32 >> 8
}

fn logic(name: &str) -> Option<Operation> {
    Some(match name {
        "v_and_b32" => bits!(B32; |a: B32, b: B32| a & b),
        "v_or_b32" => bits!(B32; |a: B32, b: B32| a | b),
        "v_xor_b32" => bits!(B32; |a: B32, b: B32| a ^ b),
        "v_xnor_b32" => bits!(B32; |a: B32, b: B32| !(a ^ b)),
        "v_or3_b32" => bits!(B32; |a: B32, b: B32, c: B32| a | b | c),
        "v_and_or_b32" => bits!(B32; |a: B32, b: B32, c: B32| a & b | c),
        "v_lshl_or_b32" => bits!(B32; |a: B32, b: B32, c: B32| a << (b & 31) | c),
        "v_bfi_b32" => bits!(B32; |a: B32, b: B32, c: B32| a & b | !a & c),
        "v_bfm_b32" => bits!(B32; |a: B32, b: B32| ((1 << (a & 31)) - 1) << (b & 31)),
        "v_bfe_u32" => bits!(B32; |a: B32, b: B32, c: B32| (a >> (b & 31)) & ((1 << (c & 31)) - 1)),
        "v_bfe_i32" => bits!(B32; |a: B32, b: B32, c: B32| {
            let width = c & 31;
            let field = (a >> (b & 31)) & ((1 << width) - 1);
            if width == 0 { 0 } else { ((field << (32 - width)) as i32 >> (32 - width)) as u32 }
        }),
        "v_lshlrev_b32" => bits!(B32; |a: B32, b: B32| b << (a & 31)),
        "v_lshrrev_b32" => bits!(B32; |a: B32, b: B32| b >> (a & 31)),
        "v_ashrrev_i32" => bits!(B32; |a: B32, b: B32| (b as i32 >> (a & 31)) as u32),
        "v_lshlrev_b64" => wide!(B64; |a: B32, b: B64| b << (a & 63)),
        "v_lshrrev_b64" => wide!(B64; |a: B32, b: B64| b >> (a & 63)),
        "v_ashrrev_i64" => wide!(B64; |a: B32, b: B64| (b as i64 >> (a & 63)) as u64),
        "v_alignbit_b32" => bits!(B32; |a: B32, b: B32, c: B32| (joined(a, b) >> (c & 31)) as u32),
        "v_alignbyte_b32" => bits!(B32; |a: B32, b: B32, c: B32| (joined(a, b) >> (8 * (c & 3))) as u32),
        "v_perm_b32" => bits!(B32; |a: B32, b: B32, c: B32| permute(joined(a, b), c)),
        "v_bcnt_u32_b32" => bits!(B32; |a: B32, b: B32| a.count_ones().wrapping_add(b)),
        _ => return None,
    })
}

fn joined(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Four bytes, each selected from eight by a byte of `selectors`; other selectors give signs, zeros and ones.
fn permute(bytes: u64, selectors: u32) -> u32 {
    let byte = |selector: u8| -> u8 {
        let sign = |bit: u32| if bytes >> bit & 1 == 1 { 0xff } else { 0 };
        match selector {
            0..=7 => (bytes >> (8 * selector)) as u8,
            8 => sign(15),
            9 => sign(31),
            10 => sign(47),
            11 => sign(63),
            12 => 0,
            13.. => 0xff,
        }
    };
    u32::from_le_bytes(selectors.to_le_bytes().map(byte))
}

/// Operations on 16 bits, which set the upper half to zero.
fn short(name: &str) -> Option<Operation> {
    Some(match name {
        "v_add_u16" => bits!(B16; |a: B16, b: B16| a.wrapping_add(b) & 0xffff),
        "v_sub_u16" => bits!(B16; |a: B16, b: B16| a.wrapping_sub(b) & 0xffff),
        "v_subrev_u16" => bits!(B16; |a: B16, b: B16| b.wrapping_sub(a) & 0xffff),
        "v_mad_legacy_u16" => {
            bits!(B16; |a: B16, b: B16, c: B16| a.wrapping_mul(b).wrapping_add(c) & 0xffff)
        }
        "v_mul_lo_u16" => bits!(B16; |a: B16, b: B16| a.wrapping_mul(b) & 0xffff),
        "v_lshlrev_b16" => bits!(B16; |a: B16, b: B16| b << (a & 15) & 0xffff),
        "v_lshrrev_b16" => bits!(B16; |a: B16, b: B16| (b & 0xffff) >> (a & 15)),
        "v_ashrrev_i16" => bits!(B16; |a: B16, b: B16| (i32::from(b as i16) >> (a & 15)) as u32 & 0xffff),
        "v_min_u16" => bits!(B16; |a: B16, b: B16| (a & 0xffff).min(b & 0xffff)),
        "v_max_u16" => bits!(B16; |a: B16, b: B16| (a & 0xffff).max(b & 0xffff)),
        "v_min_i16" => bits!(B16; |a: B16, b: B16| u32::from((a as i16).min(b as i16) as u16)),
        "v_max_i16" => bits!(B16; |a: B16, b: B16| u32::from((a as i16).max(b as i16) as u16)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_selected_from_two_registers() {
        assert_eq!(permute(0x0706_0504_0302_0100, 0x0401_0703), 0x0401_0703);
        assert_eq!(permute(0x8006_0504_0302_0100, 0x0d0c_0b00), 0xff00_ff00);
    }

    #[test]
    fn numbers_of_24_bits() {
        assert_eq!((low_24(0xff12_3456), signed_24(0x0080_0000)), (0x12_3456, -0x80_0000));
    }
}

//! Conversions between number formats: VOP1 and VOP3.

use super::operation::{Operation, Run, bits, each, each_wide, half, to_half, wide};
use crate::operand::Type::{B16, B32, F16, F32, F64};

/// The operation of this name, without `_e32` and the like.
pub(crate) fn operation(name: &str) -> Option<Operation> {
    Some(match name {
        "v_cvt_f32_i32" => bits!(F32; |a: B32| (a as i32 as f32).to_bits()),
        "v_cvt_f32_u32" => bits!(F32; |a: B32| (a as f32).to_bits()),
        // Toward zero, with NaN to zero and the largest number instead of one that does not fit.
        "v_cvt_i32_f32" => bits!(B32; |a: F32| f32::from_bits(a) as i32 as u32),
        "v_cvt_u32_f32" => bits!(B32; |a: F32| f32::from_bits(a) as u32),
        "v_cvt_rpi_i32_f32" => bits!(B32; |a: F32| (f32::from_bits(a) + 0.5).floor() as i32 as u32),
        "v_cvt_flr_i32_f32" => bits!(B32; |a: F32| f32::from_bits(a).floor() as i32 as u32),
        "v_cvt_f32_ubyte0" => bits!(F32; |a: B32| byte(a, 0)),
        "v_cvt_f32_ubyte1" => bits!(F32; |a: B32| byte(a, 1)),
        "v_cvt_f32_ubyte2" => bits!(F32; |a: B32| byte(a, 2)),
        "v_cvt_f32_ubyte3" => bits!(F32; |a: B32| byte(a, 3)),
        "v_cvt_f16_f32" => bits!(F16; |a: F32| to_half(f32::from_bits(a))),
        "v_cvt_f32_f16" => bits!(F32; |a: F16| half(a).to_bits()),
        "v_cvt_f16_u16" => bits!(F16; |a: B16| to_half(f32::from(a as u16))),
        "v_cvt_f16_i16" => bits!(F16; |a: B16| to_half(f32::from(a as i16))),
        "v_cvt_u16_f16" => bits!(B16; |a: F16| u32::from(half(a) as u16)),
        "v_cvt_i16_f16" => bits!(B16; |a: F16| u32::from(half(a) as i16 as u16)),
        "v_cvt_pkrtz_f16_f32" => bits!(B32; |a: F32, b: F32| toward_zero(a) | toward_zero(b) << 16),
        "v_cvt_f64_f32" => wide!(F64; |a: F32| f64::from(f32::from_bits(a as u32)).to_bits()),
        "v_cvt_f32_f64" => wide!(F32; |a: F64| u64::from((f64::from_bits(a) as f32).to_bits())),
        "v_cvt_f64_i32" => wide!(F64; |a: B32| f64::from(a as i32).to_bits()),
        "v_cvt_f64_u32" => wide!(F64; |a: B32| f64::from(a as u32).to_bits()),
        "v_cvt_i32_f64" => wide!(B32; |a: F64| u64::from(f64::from_bits(a) as i32 as u32)),
        "v_cvt_u32_f64" => wide!(B32; |a: F64| u64::from(f64::from_bits(a) as u32)),
        _ => return None,
    })
}

fn byte(word: u32, index: u32) -> u32 {
    ((word >> (8 * index) & 0xff) as f32).to_bits()
}

/// A number in fp16, rounded toward zero.
fn toward_zero(bits: u32) -> u32 {
    let value = f32::from_bits(bits);
    let nearest = to_half(value);
    let is_larger = half(nearest).abs() > value.abs();
    // Numbers of one sign are in the order of their bits.
    if is_larger { nearest - 1 } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_toward_zero() {
        assert_eq!(toward_zero(1.0_f32.to_bits()), 0x3c00);
        assert_eq!(toward_zero(1.0009_f32.to_bits()), 0x3c00);
        assert_eq!(toward_zero((-65519.0_f32).to_bits()), 0xfbff);
    }
}

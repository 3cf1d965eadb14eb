//! Arithmetic on floating-point numbers: VOP1, VOP2 and VOP3.
//!
//! Fused operations round once. The transcendental functions of the hardware are accurate to about one unit in the last
//! place; here they are computed in fp64 and rounded. Those in fp32 take subnormal numbers for zero and return zero
//! instead of them, as the hardware does.

use super::operation::{Operation, Run, bits, each, each_wide, f16s, f32s, f64s, half, to_half, wide};
use super::trig_preop;
use crate::operand::Type::{B32, F16, F32, F64};

/// The operation of this name, without `_e32` and the like.
pub(crate) fn operation(name: &str) -> Option<Operation> {
    single(name).or_else(|| transcendental(name)).or_else(|| double(name)).or_else(|| half_precision(name))
}

fn single(name: &str) -> Option<Operation> {
    Some(match name {
        "v_add_f32" => f32s!(|a, b| a + b),
        "v_sub_f32" => f32s!(|a, b| a - b),
        "v_subrev_f32" => f32s!(|a, b| b - a),
        "v_mul_f32" => f32s!(|a, b| a * b),
        "v_mul_legacy_f32" => f32s!(|a, b| if a == 0.0 || b == 0.0 { 0.0 } else { a * b }),
        "v_fma_f32" | "v_fmaak_f32" => f32s!(|a, b, c| a.mul_add(b, c)),
        "v_fmac_f32" => f32s!(|a, b, c| a.mul_add(b, c)).accumulating(),
        "v_fmamk_f32" => f32s!(|a, k, c| a.mul_add(k, c)),
        // Rounded twice, and without subnormal numbers whatever the mode.
        "v_mad_f32" | "v_madak_f32" => f32s!(|a, b, c| flush(flush(flush(a) * flush(b)) + flush(c))),
        "v_mac_f32" => f32s!(|a, b, c| flush(flush(flush(a) * flush(b)) + flush(c))).accumulating(),
        "v_madmk_f32" => f32s!(|a, k, c| flush(flush(flush(a) * flush(k)) + flush(c))),
        "v_min_f32" => f32s!(|a, b| a.min(b)),
        "v_max_f32" => f32s!(|a, b| a.max(b)),
        "v_min3_f32" => f32s!(|a, b, c| a.min(b).min(c)),
        "v_max3_f32" => f32s!(|a, b, c| a.max(b).max(c)),
        "v_med3_f32" => f32s!(|a, b, c| a.max(b).min(a.min(b).max(c))),
        "v_trunc_f32" => f32s!(|a| a.trunc()),
        "v_ceil_f32" => f32s!(|a| a.ceil()),
        "v_floor_f32" => f32s!(|a| a.floor()),
        "v_rndne_f32" => f32s!(|a| a.round_ties_even()),
        "v_fract_f32" => f32s!(|a| (a - a.floor()).min(1.0 - f32::EPSILON / 2.0)),
        "v_ldexp_f32" => bits!(F32; |a: F32, b: B32| {
            ((f64::from(f32::from_bits(a)) * power_of_two(b as i32)) as f32).to_bits()
        }),
        "v_frexp_mant_f32" => f32s!(|a| frexp(f64::from(a)).0 as f32),
        "v_frexp_exp_i32_f32" => bits!(B32; |a: F32| frexp(f64::from(f32::from_bits(a))).1 as u32),
        "v_div_fixup_f32" => f32s!(|q, d, n| div_fixup(f64::from(q), f64::from(d), f64::from(n)) as f32),
        _ => return None,
    })
}

fn transcendental(name: &str) -> Option<Operation> {
    Some(match name {
        "v_exp_f32" => f32s!(|a| flush(f64::from(flush(a)).exp2() as f32)),
        "v_log_f32" => f32s!(|a| flush(f64::from(flush(a)).log2() as f32)),
        "v_rcp_f32" | "v_rcp_iflag_f32" => f32s!(|a| flush(1.0 / flush(a))),
        "v_rsq_f32" => f32s!(|a| flush((1.0 / f64::from(flush(a)).sqrt()) as f32)),
        "v_sqrt_f32" => f32s!(|a| flush(flush(a).sqrt())),
        // The angle is in turns.
        "v_sin_f32" => f32s!(|a| (f64::from(a).fract() * std::f64::consts::TAU).sin() as f32),
        "v_cos_f32" => f32s!(|a| (f64::from(a).fract() * std::f64::consts::TAU).cos() as f32),
        _ => return None,
    })
}

fn double(name: &str) -> Option<Operation> {
    Some(match name {
        "v_add_f64" => f64s!(|a, b| a + b),
        "v_mul_f64" => f64s!(|a, b| a * b),
        "v_fma_f64" => f64s!(|a, b, c| a.mul_add(b, c)),
        "v_fmac_f64" => f64s!(|a, b, c| a.mul_add(b, c)).accumulating(),
        "v_min_f64" => f64s!(|a, b| a.min(b)),
        "v_max_f64" => f64s!(|a, b| a.max(b)),
        "v_trunc_f64" => f64s!(|a| a.trunc()),
        "v_ceil_f64" => f64s!(|a| a.ceil()),
        "v_floor_f64" => f64s!(|a| a.floor()),
        "v_rndne_f64" => f64s!(|a| a.round_ties_even()),
        "v_fract_f64" => f64s!(|a| (a - a.floor()).min(1.0 - f64::EPSILON / 2.0)),
        // The hardware's are good to half of the digits; what follows them refines by Newton's method.
        "v_rcp_f64" => f64s!(|a| 1.0 / a),
        "v_rsq_f64" => f64s!(|a| 1.0 / a.sqrt()),
        "v_sqrt_f64" => f64s!(|a| a.sqrt()),
        "v_ldexp_f64" => wide!(F64; |a: F64, b: B32| ldexp(f64::from_bits(a), b as i32).to_bits()),
        "v_frexp_mant_f64" => f64s!(|a| frexp(a).0),
        "v_frexp_exp_i32_f64" => wide!(B32; |a: F64| u64::from(frexp(f64::from_bits(a)).1 as u32)),
        "v_div_fixup_f64" => f64s!(|q, d, n| div_fixup(q, d, n)),
        "v_trig_preop_f64" => {
            wide!(F64; |a: F64, b: B32| trig_preop::segment(f64::from_bits(a), b as u32).to_bits())
        }
        _ => return None,
    })
}

fn half_precision(name: &str) -> Option<Operation> {
    Some(match name {
        "v_add_f16" => f16s!(|a, b| a + b),
        "v_sub_f16" => f16s!(|a, b| a - b),
        "v_subrev_f16" => f16s!(|a, b| b - a),
        "v_mul_f16" => f16s!(|a, b| a * b),
        "v_min_f16" => f16s!(|a, b| a.min(b)),
        "v_max_f16" => f16s!(|a, b| a.max(b)),
        "v_fma_f16" => f16s!(|a, b, c| (f64::from(a) * f64::from(b) + f64::from(c)) as f32),
        "v_fmac_f16" => f16s!(|a, b, c| (f64::from(a) * f64::from(b) + f64::from(c)) as f32).accumulating(),
        "v_rcp_f16" => f16s!(|a| 1.0 / a),
        "v_rsq_f16" => f16s!(|a| 1.0 / a.sqrt()),
        "v_sqrt_f16" => f16s!(|a| a.sqrt()),
        "v_exp_f16" => f16s!(|a| a.exp2()),
        "v_log_f16" => f16s!(|a| a.log2()),
        "v_trunc_f16" => f16s!(|a| a.trunc()),
        "v_floor_f16" => f16s!(|a| a.floor()),
        "v_ceil_f16" => f16s!(|a| a.ceil()),
        "v_rndne_f16" => f16s!(|a| a.round_ties_even()),
        _ => return None,
    })
}

/// Zero instead of a subnormal number, with its sign.
pub(crate) fn flush(a: f32) -> f32 {
    if a.is_subnormal() { 0.0_f32.copysign(a) } else { a }
}

/// `2^exponent`, or zero or infinity if the exponent is far beyond those of fp32.
fn power_of_two(exponent: i32) -> f64 {
    f64::from(exponent.clamp(-1000, 1000)).exp2()
}

/// `a · 2^exponent`, rounded once.
fn ldexp(a: f64, exponent: i32) -> f64 {
    let exponent = exponent.clamp(-2200, 2200);
    // In two exact steps and one that may round.
    let step = exponent.clamp(-900, 900);
    let rest = exponent - step;
    let half = rest / 2;
    if exponent < -900 {
        // Scaled up first, so that only the last product can be subnormal.
        return a * power_of_two(half) * power_of_two(rest - half) * power_of_two(step);
    }
    a * power_of_two(step) * power_of_two(half) * power_of_two(rest - half)
}

/// The number as a mantissa in [0.5, 1) and an exponent. The exponent of zero, infinity and NaN is 0.
fn frexp(a: f64) -> (f64, i32) {
    if a == 0.0 || !a.is_finite() {
        return (a, 0);
    }
    let (scaled, shift) = if a.is_subnormal() { (a * 2.0_f64.powi(54), 54) } else { (a, 0) };
    let exponent = (scaled.to_bits() >> 52 & 0x7ff) as i32 - 1022;
    (f64::from_bits(scaled.to_bits() & !(0x7ff << 52) | 1022 << 52), exponent - shift)
}

/// The quotient of a division, with the special cases that its refinement does not handle.
fn div_fixup(quotient: f64, denominator: f64, numerator: f64) -> f64 {
    let sign = if denominator.is_sign_negative() == numerator.is_sign_negative() { 1.0 } else { -1.0 };
    if numerator.is_nan() {
        numerator
    } else if denominator.is_nan() {
        denominator
    } else if (denominator == 0.0 && numerator == 0.0)
        || (denominator.is_infinite() && numerator.is_infinite())
    {
        f64::NAN
    } else if denominator == 0.0 || numerator.is_infinite() {
        sign * f64::INFINITY
    } else if denominator.is_infinite() || numerator == 0.0 {
        sign * 0.0
    } else {
        sign * quotient.abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaling_by_powers_of_two_rounds_once() {
        assert_eq!(ldexp(1.5, 10), 1536.0);
        assert_eq!(ldexp(1.0, -1074), f64::from_bits(1));
        assert_eq!(ldexp(f64::from_bits(1), 2000), 2.0_f64.powi(926));
        assert_eq!((ldexp(1.0, 1023), ldexp(1.0, 2200)), (2.0_f64.powi(1023), f64::INFINITY));
    }

    #[test]
    fn mantissa_and_exponent() {
        assert_eq!(frexp(-12.0), (-0.75, 4));
        assert_eq!(frexp(f64::from_bits(1)), (0.5, -1073));
        assert_eq!(frexp(0.0), (0.0, 0));
    }

    #[test]
    fn divisions_keep_their_special_cases() {
        assert!(div_fixup(1.0, 0.0, 0.0).is_nan());
        assert_eq!(div_fixup(f64::NAN, -0.0, 2.0), f64::NEG_INFINITY);
        assert_eq!(div_fixup(f64::NAN, f64::INFINITY, 2.0), 0.0);
        assert_eq!(div_fixup(1.5, -2.0, 3.0), -1.5);
    }
}

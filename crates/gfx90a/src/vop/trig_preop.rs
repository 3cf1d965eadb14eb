//! `v_trig_preop_f64`: 53 bits of 2/π from where they matter for an angle. Large angles are reduced by them (Payne and
//! Hanek, 1983).

/// The first 1216 bits of 2/π after the point.
const TWO_OVER_PI: [u32; 38] = [
    0xa2f9_836e,
    0x4e44_1529,
    0xfc27_57d1,
    0xf534_ddc0,
    0xdb62_9599,
    0x3c43_9041,
    0xfe51_63ab,
    0xdebb_c561,
    0xb724_6e3a,
    0x424d_d2e0,
    0x0649_2eea,
    0x09d1_921c,
    0xfe1d_eb1c,
    0xb129_a73e,
    0xe882_35f5,
    0x2ebb_4484,
    0xe99c_7026,
    0xb45f_7e41,
    0x3991_d639,
    0x8353_39f4,
    0x9c84_5f8b,
    0xbdf9_283b,
    0x1ff8_97ff,
    0xde05_980f,
    0xef2f_118b,
    0x5a0a_6d1f,
    0x6d36_7ecf,
    0x27cb_09b7,
    0x4f46_3f66,
    0x9e5f_ea2d,
    0x7527_bac7,
    0xebe5_f17b,
    0x3d07_39f7,
    0x8a52_92ea,
    0x6bfb_5fb1,
    0x1f8d_5d08,
    0x5603_3046,
    0xfc7b_6bab,
];

/// Bits that a segment has.
const BITS: u32 = 53;

/// The segment of 2/π that `angle` needs as its part number `index`, scaled to its place.
pub(crate) fn segment(angle: f64, index: u32) -> f64 {
    let exponent = (angle.to_bits() >> 52 & 0x7ff) as u32;
    let shift = (index & 31) * BITS + exponent.saturating_sub(1077);
    let digits = (0..BITS).fold(0_u64, |digits, i| digits << 1 | u64::from(bit(shift + i)));
    let scale = -(BITS as i32) - shift as i32 + if exponent >= 1968 { 128 } else { 0 };
    digits as f64 * f64::from(scale).exp2()
}

/// A bit of 2/π. The hardware has 1201 of them.
fn bit(index: u32) -> u32 {
    TWO_OVER_PI.get(index as usize / 32).map_or(0, |word| word >> (31 - index % 32) & 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_add_up_to_two_over_pi() {
        let first = segment(1.0, 0);
        assert!(
            first <= std::f64::consts::FRAC_2_PI && std::f64::consts::FRAC_2_PI - first <= 2.0_f64.powi(-53)
        );
        let sum = first + segment(1.0, 1);
        assert!((sum - std::f64::consts::FRAC_2_PI).abs() < 1e-16);
        assert!(segment(1.0, 1) > 0.0 && segment(1.0, 1) < 2.0_f64.powi(-53));
    }
}

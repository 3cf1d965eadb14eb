//! The formats of 8-bit products (arXiv 2209.05433), and their scales.
//!
//! Conversion multiplies by a power of two, saturates, and rounds to nearest even. A power of two loses nothing, so how a
//! number is rounded depends on the scale only if it is so small that it becomes subnormal.

/// A format of 8 bits: a sign, an exponent and a mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float8 {
    /// 4 bits of exponent and 3 of mantissa, up to ±448, without infinities: activations and weights.
    E4M3,
    /// 5 bits of exponent and 2 of mantissa, up to ±57344: gradients.
    E5M2,
}

/// The code that a number that is not finite becomes, in both formats: a NaN.
const NAN: u8 = 0x7f;

/// The bits of a float's mantissa below which the largest codes begin: 1.75 times a power of two.
const LARGEST_MANTISSA: u32 = 0x60_0000;

impl Float8 {
    /// Bits of the mantissa.
    pub const fn mantissa(self) -> u32 {
        match self {
            Float8::E4M3 => 3,
            Float8::E5M2 => 2,
        }
    }

    /// What the exponent is stored with.
    pub const fn bias(self) -> i32 {
        match self {
            Float8::E4M3 => 7,
            Float8::E5M2 => 15,
        }
    }

    /// The largest finite number: `1.75 · 2^k` in both formats.
    pub const fn largest(self) -> f32 {
        match self {
            Float8::E4M3 => 448.0,
            Float8::E5M2 => 57344.0,
        }
    }

    /// The exponent of the largest finite number.
    const fn largest_exponent(self) -> i32 {
        match self {
            Float8::E4M3 => 8,
            Float8::E5M2 => 15,
        }
    }

    /// The code of a number: the nearest, ties to even, and the largest if it is beyond. Infinities and NaN become NaN, so that
    /// an overflow stays one.
    #[inline]
    pub fn encode(self, x: f32) -> u8 {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        if !x.is_finite() {
            return NAN;
        }
        let dropped = 23 - self.mantissa();
        let magnitude = x.abs().min(self.largest());
        let least_normal = ((128 - self.bias()) as u32) << 23;
        let code = if magnitude.to_bits() < least_normal {
            // Adding a number whose last place is the smallest code's rounds to it.
            let round = f32::from_bits(((128 - self.bias() + dropped as i32) as u32) << 23);
            (magnitude + round).to_bits() - round.to_bits()
        } else {
            let bits = magnitude.to_bits() - least_normal + (1 << 23);
            (bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped
        };
        sign | code as u8
    }

    /// The number of a code.
    #[inline]
    pub fn decode(self, code: u8) -> f32 {
        let magnitude = u32::from(code & 0x7f);
        let sign = u32::from(code & 0x80) << 24;
        let (first_special, is_nan) = match self {
            Float8::E4M3 => (0x7f, true),
            Float8::E5M2 => (0x7c, magnitude > 0x7c),
        };
        if magnitude >= first_special {
            let special = if is_nan { f32::NAN } else { f32::INFINITY };
            return f32::from_bits(special.to_bits() | sign);
        }
        // As the bits of a float, the code is too small by a power of two, also if it is subnormal.
        let power = f32::from_bits(((254 - self.bias()) as u32) << 23);
        f32::from_bits((f32::from_bits(magnitude << (23 - self.mantissa())) * power).to_bits() | sign)
    }

    /// The factor that brings numbers of this largest magnitude into the format, as large as possible, and its inverse: powers
    /// of two. Both are 1 if all numbers are zero.
    #[inline]
    pub fn scale(self, maximum: f32) -> (f32, f32) {
        if maximum == 0.0 {
            return (1.0, 1.0);
        }
        let bits = maximum.to_bits();
        let exponent = (bits >> 23) as i32 - 127;
        let fits = bits & 0x7f_ffff <= LARGEST_MANTISSA;
        // Both powers must be normal numbers.
        let power = (self.largest_exponent() - exponent - i32::from(!fits)).clamp(-126, 126);
        let power_of_two = |power: i32| f32::from_bits(((power + 127) as u32) << 23);
        (power_of_two(power), power_of_two(-power))
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "conversions are exact")]
mod tests {
    use super::*;

    const FORMATS: [Float8; 2] = [Float8::E4M3, Float8::E5M2];

    /// By the definition: the nearest of all finite numbers of the format, an even code if there are two. Beyond the largest, that
    /// is the largest; a difference from numbers as large as 1e18 would not be exact in fp64.
    fn nearest(format: Float8, x: f32) -> u8 {
        let magnitude = f64::from(x.abs().min(format.largest()));
        let distance = |&code: &u8| (f64::from(format.decode(code)) - magnitude).abs();
        let codes = (0..=0x7f_u8).filter(|&code| format.decode(code).is_finite());
        let order = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)));
        codes.min_by(order).unwrap() | if x.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn codes_are_the_formats() {
        let [four, five] = FORMATS.map(|format| move |code: u8| format.decode(code));
        assert_eq!(
            [0x00, 0x01, 0x08, 0x38, 0x7e].map(four),
            [0.0, 2_f32.powi(-9), 2_f32.powi(-6), 1.0, 448.0]
        );
        assert_eq!([0x01, 0x04, 0x3c, 0x7b].map(five), [2_f32.powi(-16), 2_f32.powi(-14), 1.0, 57344.0]);
        assert!(four(0x7f).is_nan() && five(0x7f).is_nan() && five(0x7d).is_nan());
        assert_eq!([0x7c, 0xfc].map(five), [f32::INFINITY, f32::NEG_INFINITY]);
        for format in FORMATS {
            for code in 0..=u8::MAX {
                let number = format.decode(code);
                if number.is_finite() {
                    assert_eq!(format.encode(number), code, "{format:?} {number}");
                }
            }
        }
    }

    #[test]
    fn numbers_become_the_nearest_code() {
        for format in FORMATS {
            for high in 0..=u16::MAX {
                for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                    let x = f32::from_bits(u32::from(high) << 16 | low);
                    if x.is_finite() && (high % 7 == 0 || low == 0) {
                        assert_eq!(format.encode(x), nearest(format, x), "{format:?} {x:e}");
                    } else if !x.is_finite() {
                        assert_eq!(format.encode(x), NAN);
                    }
                }
            }
            // Between two codes there is a tie.
            for code in 0..0x7f_u8 {
                let (a, b) = (format.decode(code), format.decode(code + 1));
                if b.is_finite() {
                    let even = code + (code & 1);
                    assert_eq!(format.encode(0.5 * (a + b)), even, "{format:?} between {a} and {b}");
                }
            }
        }
    }

    #[test]
    fn the_largest_number_fits_and_twice_of_it_would_not() {
        for format in FORMATS {
            for bits in (0x0080_0000..0x7f80_0000_u32).step_by(0x1234) {
                let maximum = f32::from_bits(bits);
                let (scale, inverse) = format.scale(maximum);
                assert_eq!(scale * inverse, 1.0, "{maximum:e}");
                assert!(maximum * scale <= format.largest(), "{maximum:e}");
                let is_clamped = scale == 2_f32.powi(126);
                assert!(is_clamped || 2.0 * maximum * scale > format.largest(), "{maximum:e}");
            }
            assert_eq!(format.scale(0.0), (1.0, 1.0));
            let (scale, _) = format.scale(f32::from_bits(1));
            assert!(scale.is_finite() && scale == 2_f32.powi(126));
        }
    }
}

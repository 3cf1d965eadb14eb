//! SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). Its state is a counter times an odd constant, so any number of any
//! stream can be drawn without drawing the ones before it.

/// 2^64 divided by the golden ratio, made odd: consecutive counters become distant states.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser: a bijection in which every input bit flips each output bit half of the time.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the reference implementation with seed 0.
    #[test]
    fn the_first_numbers_are_those_of_the_reference() {
        let expected = [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F];
        assert_eq!([1, 2, 3].map(|n: u64| mix(n.wrapping_mul(GOLDEN))), expected);
    }
}

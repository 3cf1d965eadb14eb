//! Round places on an axis.

use super::{Scale, Unit};

/// The interval of an axis and the places that are labelled.
#[derive(Clone, Debug, PartialEq)]
pub struct Ticks {
    /// Where the axis begins.
    pub low: f64,
    /// Where it ends.
    pub high: f64,
    /// The labelled places.
    pub places: Vec<f64>,
}

/// An axis that holds all from `low` to `high`, with about `count` labels; it begins and ends at a label.
pub fn ticks(low: f64, high: f64, count: usize, unit: Unit, scale: Scale) -> Ticks {
    if scale == Scale::Log && low > 0.0 && high > low {
        return log_ticks(low, high, unit);
    }
    let (low, high) = if high > low { (low, high) } else { (low.min(0.0), high.max(low + 1.0)) };
    let step = round_step((high - low) / count.max(1) as f64, high, unit);
    let (first, last) = ((low / step + 1e-9).floor() as i64, (high / step - 1e-9).ceil() as i64);
    let places: Vec<f64> = (first..=last).map(|i| i as f64 * step).collect();
    Ticks { low: places[0], high: places[places.len() - 1], places }
}

/// 1, 2, 2.5 or 5 times a power of ten; bytes are counted in the unit that the largest value has.
fn round_step(rough: f64, high: f64, unit: Unit) -> f64 {
    let base = match unit {
        Unit::Bytes if high >= 1.0 => 1024_f64.powf((high.ln() / 1024_f64.ln()).floor()),
        _ => 1.0,
    };
    let power = 10_f64.powf((rough / base).log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power * base >= rough * 0.999);
    factor.unwrap_or(10.0) * power * base
}

/// Powers of two for plain numbers that are close, as people choose them for nodes and ranks; else 1, 2 and 5 times powers of
/// ten. The axis has some room beyond both ends.
fn log_ticks(low: f64, high: f64, unit: Unit) -> Ticks {
    let room = (high / low).powf(0.04);
    let powers = |base: f64| {
        let (first, last) = ((low.ln() / base.ln()).floor() as i32, (high.ln() / base.ln()).ceil() as i32);
        (first..=last).map(move |power| base.powi(power))
    };
    let places: Vec<f64> = if matches!(unit, Unit::Number | Unit::Count) && high / low <= 4096.0 {
        powers(2.0).collect()
    } else if high / low <= 1000.0 {
        powers(10.0).flat_map(|power| [1.0, 2.0, 5.0].map(|factor| factor * power)).collect()
    } else {
        powers(10.0).collect()
    };
    let inside = |place: &f64| (low * 0.999..=high * 1.001).contains(place);
    Ticks { low: low / room, high: high * room, places: places.into_iter().filter(inside).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_ticks_are_round() {
        let of = |low, high, unit| ticks(low, high, 5, unit, Scale::Linear).places;
        assert_eq!(of(0.0, 73.5, Unit::Number), [0.0, 20.0, 40.0, 60.0, 80.0]);
        assert_eq!(of(0.0, 1.0, Unit::Number).len(), 6);
        assert_eq!(of(0.0, 0.0, Unit::Number).len(), 6, "nothing but zero");
        let gib = f64::from(1 << 30);
        assert_eq!(of(0.0, 40.0 * gib, Unit::Bytes), [0.0, 10.0, 20.0, 30.0, 40.0].map(|n| n * gib));
    }

    #[test]
    fn logarithmic_ticks_are_powers() {
        let found = ticks(8.0, 128.0, 5, Unit::Number, Scale::Log);
        assert_eq!(found.places, [8.0, 16.0, 32.0, 64.0, 128.0]);
        assert!(found.low < 8.0 && found.high > 128.0);
        assert_eq!(ticks(1.0, 1e6, 5, Unit::Number, Scale::Log).places.len(), 7);
        let seconds = ticks(0.003, 0.06, 5, Unit::Seconds, Scale::Log).places;
        assert_eq!(
            seconds.iter().map(|&s| Unit::Seconds.format(s)).collect::<Vec<_>>(),
            ["5 ms", "10 ms", "20 ms", "50 ms"]
        );
    }
}

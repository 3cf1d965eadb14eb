//! Units of the numbers of a chart, and how a number is written with its unit.

use serde::Serialize;

/// The unit of an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// A number as it is.
    #[default]
    Number,
    /// Something counted, with k, M, G.
    Count,
    /// The number of a step.
    Step,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Joules.
    Joules,
    /// Watts.
    Watts,
    /// FLOP/s.
    Flops,
    /// Tokens per second.
    Rate,
    /// A share of 1, in percent.
    Share,
}

/// The names of a unit's multiples, from one on, and of its parts.
struct Names {
    base: f64,
    multiples: &'static [&'static str],
    parts: &'static [&'static str],
}

impl Unit {
    fn names(self) -> Option<Names> {
        let names = |base, multiples, parts| Some(Names { base, multiples, parts });
        match self {
            Unit::Number | Unit::Share | Unit::Step => None,
            Unit::Count => names(1e3, &["", "k", "M", "G", "T", "P"], &[]),
            Unit::Bytes => names(1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"], &[]),
            Unit::Seconds => names(1e3, &["s", "ks"], &["ms", "µs", "ns", "ps"]),
            Unit::Joules => names(1e3, &["J", "kJ", "MJ", "GJ", "TJ", "PJ"], &["mJ", "µJ"]),
            Unit::Watts => names(1e3, &["W", "kW", "MW", "GW"], &["mW"]),
            Unit::Flops => {
                names(1e3, &["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"], &[])
            }
            Unit::Rate => names(1e3, &["tokens/s", "k tokens/s", "M tokens/s", "G tokens/s"], &[]),
        }
    }

    /// A number with its unit: `12.5 GiB`.
    pub fn format(self, value: f64) -> String {
        if self == Unit::Share {
            return format!("{} %", digits(100.0 * value));
        }
        let Some(names) = self.names() else { return digits(value) };
        let (mut size, mut at) = (value.abs(), 0);
        while size >= names.base && at + 1 < names.multiples.len() {
            size /= names.base;
            at += 1;
        }
        let mut name = names.multiples[at];
        for part in names.parts {
            if size == 0.0 || size >= 1.0 {
                break;
            }
            size *= 1e3;
            name = part;
        }
        format!("{} {name}", digits(size.copysign(value))).trim_end().to_owned()
    }
}

/// A number with at most four significant digits.
fn digits(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        return "0".to_owned();
    }
    if !(1e-4..1e7).contains(&size) {
        return format!("{value:.2e}");
    }
    let decimals = (3 - size.log10().floor() as i32).max(0) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_multiple_that_fits() {
        assert_eq!(Unit::Bytes.format(1536.0), "1.5 KiB");
        assert_eq!(Unit::Seconds.format(0.012_34), "12.34 ms");
        assert_eq!(Unit::Seconds.format(0.0), "0 s");
        assert_eq!(Unit::Flops.format(73.52e12), "73.52 TFLOP/s");
        assert_eq!(Unit::Share.format(0.307), "30.7 %");
        assert_eq!(Unit::Count.format(12_500.0), "12.5 k");
        assert_eq!([1e-5, 1234.0, 0.125, 45_678.0].map(digits), ["1.00e-5", "1234", "0.125", "45678"]);
    }
}

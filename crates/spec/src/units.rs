//! Bytes, counts and times in readable form.

/// `1536` → `"1.50 KiB"`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// `"64 KiB"` or `"65536"` → `65_536`. `None` if it is not a number of bytes.
pub fn parse_bytes(text: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
    let text = text.trim();
    let unit = UNITS.iter().find_map(|&(name, bytes)| Some((text.strip_suffix(name)?, bytes)));
    let (number, unit) = unit.unwrap_or((text, 1));
    number.trim().parse::<u64>().ok()?.checked_mul(unit)
}

/// `0.000_25` → `"250.0 µs"`.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        1.0.. => format!("{seconds:.2} s"),
        1e-3.. => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.1} µs", seconds * 1e6),
    }
}

/// `1_234_567` → `"1.23 M"`, followed by `unit` if it is not empty.
pub fn count(n: f64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let mut value = n;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 if value.fract() == 0.0 => format!("{value}"),
        0 => format!("{value:.2}"),
        _ => format!("{value:.2} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_binary_and_counts_decimal() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!([Some(65536), None], ["64KiB", "64 kB"].map(parse_bytes));
        assert_eq!(parse_bytes(" 7 "), Some(7));
        assert_eq!([250e-6, 0.0125, 2.0].map(seconds), ["250.0 µs", "12.50 ms", "2.00 s"]);
        assert_eq!(count(1_234_567.0), "1.23 M");
        assert_eq!(count(12.0), "12");
        assert_eq!(count(10.785_234), "10.79");
    }
}

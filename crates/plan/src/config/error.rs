//! Errors of a configuration, in one sentence each: the field, its value, and what is allowed.
//!
//! A check names its key itself. It is about the merged value or its default, and neither has the path with which the
//! deserializer read it.

use std::fmt::Display;
use std::ops::RangeInclusive;

use kintsugi_spec::presets::UnknownPreset;

/// An error in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The text is not TOML.
    #[error("{file}, line {line}: {reason}")]
    Syntax {
        /// The file's name.
        file: String,
        /// Line, from 1.
        line: usize,
        /// The parser's message.
        reason: String,
    },
    /// A `--set` that is not `table.key=value`.
    #[error("--set {argument}: {reason}")]
    Set {
        /// The argument.
        argument: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A key that does not exist.
    #[error("unknown key {key} in {origin}; {hint}")]
    UnknownKey {
        /// The key, with its tables.
        key: String,
        /// The file, or `--set`.
        origin: String,
        /// A similar key, or the known keys.
        hint: String,
    },
    /// A key or value of other trainers that Kintsugi does not have.
    #[error("{what} is not available: {reason}")]
    NotAvailable {
        /// The key with its tables, and its value if that is not available.
        what: String,
        /// What Kintsugi does not have, and what to do instead.
        reason: &'static str,
    },
    /// A preset that does not exist.
    #[error("{field}: {unknown}")]
    Preset {
        /// `model.preset` or `cluster.preset`.
        field: &'static str,
        /// The name and the known ones.
        unknown: UnknownPreset,
    },
    /// A key that has no default and was not given.
    #[error("{field} is missing; {hint}")]
    Missing {
        /// The key.
        field: &'static str,
        /// How to set it.
        hint: String,
    },
    /// A value that is not allowed.
    #[error("{field} = {value} {rule}")]
    Value {
        /// The key, or an expression of keys.
        field: String,
        /// Its value, as TOML.
        value: String,
        /// The rule that it breaks, and what is allowed.
        rule: String,
    },
}

/// The error for a value that breaks a rule. The rule continues the sentence `field = value …`.
pub(crate) fn invalid(field: &str, value: impl Display, rule: impl Into<String>) -> ConfigError {
    ConfigError::Value { field: field.to_owned(), value: value.to_string(), rule: rule.into() }
}

/// A number that a range of a declared key bounds.
pub(crate) trait Bounded: Sized {
    /// The number, if it lies in `range`.
    fn check(self, field: &str, range: RangeInclusive<Self>) -> Result<Self, ConfigError>;
}

impl Bounded for usize {
    fn check(self, field: &str, range: RangeInclusive<Self>) -> Result<Self, ConfigError> {
        within(field, self, range)
    }
}

impl Bounded for u64 {
    fn check(self, field: &str, range: RangeInclusive<Self>) -> Result<Self, ConfigError> {
        within(field, self, range)
    }
}

impl Bounded for f64 {
    fn check(self, field: &str, range: RangeInclusive<Self>) -> Result<Self, ConfigError> {
        between(field, self, range)
    }
}

/// `value`, if it lies in the range of its key.
pub(crate) fn check<T: Bounded>(field: &str, value: T, range: RangeInclusive<T>) -> Result<T, ConfigError> {
    value.check(field, range)
}

/// `value`, if it lies in `range`.
pub(crate) fn within<T>(field: &str, value: T, range: RangeInclusive<T>) -> Result<T, ConfigError>
where
    T: PartialOrd + Display,
{
    if range.contains(&value) {
        return Ok(value);
    }
    let below = value < *range.start();
    let rule = if below {
        format!("must be at least {}", range.start())
    } else {
        format!("must be at most {}", range.end())
    };
    Err(invalid(field, value, rule))
}

/// `value`, if it lies in `range`.
pub(crate) fn between(field: &str, value: f64, range: RangeInclusive<f64>) -> Result<f64, ConfigError> {
    if range.contains(&value) {
        return Ok(value);
    }
    let rule = format!("must be from {} to {}", short(*range.start()), short(*range.end()));
    Err(invalid(field, short(value), rule))
}

/// A number without long rows of zeros.
pub(crate) fn short(value: f64) -> String {
    let plain = value == 0.0 || !value.is_finite() || (1e-4..1e6).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}

/// `value`, if it is a rate of a device or link, in FLOPs or bytes per second. A value outside of the range has a wrong
/// power of ten, and times computed from it would overflow.
pub(crate) fn rate(field: &str, value: f64) -> Result<f64, ConfigError> {
    between_in(field, value, 1e6..=1e18, "per second")
}

/// `value`, if it is a valid overhead of an op in seconds.
pub(crate) fn seconds(field: &str, value: f64) -> Result<f64, ConfigError> {
    between_in(field, value, 0.0..=60.0, "in seconds")
}

/// `value`, if it is a power.
pub(crate) fn watts(field: &str, value: f64) -> Result<f64, ConfigError> {
    between_in(field, value, 0.0..=1e6, "in watts")
}

/// `value`, if it is a valid share.
pub(crate) fn share(field: &str, value: f64) -> Result<f64, ConfigError> {
    between(field, value, 1e-6..=1.0)
}

/// `value`, if it is in `range`. The error names the unit.
fn between_in(field: &str, value: f64, range: RangeInclusive<f64>, unit: &str) -> Result<f64, ConfigError> {
    between(field, value, range).map_err(|error| match error {
        ConfigError::Value { field, value, rule } => {
            ConfigError::Value { field, value, rule: format!("{rule}: it is {unit}") }
        }
        other => other,
    })
}

/// `a, b or c`.
pub(crate) fn either<T: Display>(items: &[T]) -> String {
    let words: Vec<String> = items.iter().map(T::to_string).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => words.concat(),
    }
}

//! The macro that declares a table of the configuration.
//!
//! A key is declared on one line, with what is allowed and what it means as its doc comment:
//!
//! ```text
//! /// steps of linear warm-up
//! warmup: u64, default 0, in 0..=MAX_STEPS;
//! ```
//!
//! Instead of a `default`, `else "…"` says what happens without the key if that depends on other keys. `in` is a range that the value
//! is checked against. What has neither `default` nor `else` is a table.
//!
//! The macro makes a struct of optional values, which serde reads and writes, and the list of its keys. Every key with a `default` or a
//! range has a method with its name: it returns the value or its default, or the error of a value outside of the range.

/// Declares a table: its struct, and its path in the configuration.
macro_rules! table {
    ($table:ident in $path:literal {$(
        $(#[doc = $meaning:literal])*
        $key:ident: $type:ty $(, default $default:expr)? $(, else $otherwise:literal)? $(, in $range:expr)?;
    )+}) => {
        #[derive(Clone, Debug, Default, serde::Deserialize, serde::Serialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $table {$(
            $(#[doc = $meaning])*
            pub(crate) $key: Option<$type>,
        )+}

        #[allow(clippy::clone_on_copy, reason = "some types are not Copy")]
        impl $table {
            pub(crate) const KEYS: &'static [kintsugi_spec::DeclaredKey] = &[$(
                kintsugi_spec::declared_key!($key: $type, [$($meaning)*] [$($default)?] [$($otherwise)?])
            ),+];

            $($crate::config::declare::getter!($path, $key: $type, [$($default)?] [$($range)?]);)+
        }
    };
}

/// The method that returns a value or its default.
macro_rules! getter {
    ($path:literal, $key:ident: $type:ty, [] []) => {};
    ($path:literal, $key:ident: $type:ty, [$default:expr] []) => {
        pub(crate) fn $key(&self) -> $type {
            self.$key.clone().unwrap_or($default)
        }
    };
    ($path:literal, $key:ident: $type:ty, [$default:expr] [$range:expr]) => {
        pub(crate) fn $key(&self) -> Result<$type, $crate::config::ConfigError> {
            let value = self.$key.clone().unwrap_or($default);
            $crate::config::error::check(concat!($path, ".", stringify!($key)), value, $range)
        }
    };
    ($path:literal, $key:ident: $type:ty, [] [$range:expr]) => {
        pub(crate) fn $key(&self) -> Result<Option<$type>, $crate::config::ConfigError> {
            let check =
                |value| $crate::config::error::check(concat!($path, ".", stringify!($key)), value, $range);
            self.$key.map(check).transpose()
        }
    };
}

pub(crate) use {getter, table};

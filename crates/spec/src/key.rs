//! Declarations of configuration keys.
//!
//! A table of the configuration is a struct that a macro declares: every key with its type, its default, and a doc comment of what
//! is allowed and what it means. The comment is Markdown. `kintsugi config` and the tables of the documentation show it.

use serde::Serialize;

/// A key of the configuration, or a table in it.
#[derive(Clone, Copy, Debug)]
pub enum DeclaredKey {
    /// A key with a value.
    Value {
        /// Its name in its table.
        name: &'static str,
        /// The default, or what happens without the key, as Markdown.
        default: fn() -> String,
        /// What is allowed and what it means, as the lines of a Markdown text.
        meaning: &'static [&'static str],
    },
    /// A table.
    Table {
        /// Its name.
        name: &'static str,
        /// Its keys.
        keys: &'static [DeclaredKey],
    },
}

/// The default of a key as Markdown: as the declaration writes it if that is TOML, otherwise the value.
pub fn default_text(written: &str, value: &impl Serialize) -> String {
    let is_toml = toml::from_str::<toml::Table>(&format!("default = {written}")).is_ok();
    let text = || toml::Value::try_from(value).expect("a default is a value of TOML").to_string();
    let text = if is_toml { written.to_owned() } else { text() };
    if text.starts_with(['"', '[']) { format!("`{text}`") } else { text }
}

/// A [`DeclaredKey`] from the parts of a declaration: name and type, doc comment, default, and the text of `else`. What has neither
/// of the last two is a table.
#[macro_export]
macro_rules! declared_key {
    ($key:ident: $type:ty, [$($meaning:literal)*] [] []) => {
        $crate::DeclaredKey::Table { name: stringify!($key), keys: <$type>::KEYS }
    };
    ($key:ident: $type:ty, [$($meaning:literal)+] [$($default:expr)?] [$otherwise:literal]) => {
        $crate::DeclaredKey::Value {
            name: stringify!($key),
            default: || $otherwise.to_owned(),
            meaning: &[$($meaning),+],
        }
    };
    ($key:ident: $type:ty, [$($meaning:literal)+] [$default:expr] []) => {
        $crate::DeclaredKey::Value {
            name: stringify!($key),
            default: || {
                let value: $type = $default;
                $crate::default_text(stringify!($default), &value)
            },
            meaning: &[$($meaning),+],
        }
    };
}

/// Declares a table whose values are used as they are given. A key has a `default`, or an `else` that says what happens without it;
/// its value is then that of its type.
macro_rules! spec_table {
    (
        $(#[$meta:meta])*
        pub struct $table:ident {$(
            $(#[doc = $meaning:literal])*
            $key:ident: $type:ty $(, default $default:expr)? $(, else $otherwise:literal)?;
        )+}
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $table {$(
            $(#[doc = $meaning])*
            pub $key: $type,
        )+}

        impl $table {
            /// The keys of the table.
            pub const KEYS: &'static [$crate::DeclaredKey] = &[$(
                $crate::declared_key!($key: $type, [$($meaning)*] [$($default)?] [$($otherwise)?])
            ),+];
        }

        impl Default for $table {
            fn default() -> Self {
                $table { $($key: $crate::key::spec_table!(@default $($default)?)),+ }
            }
        }
    };
    (@default $default:expr) => { $default };
    (@default) => { Default::default() };
}

pub(crate) use spec_table;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_is_shown_as_it_is_written_if_that_is_toml() {
        assert_eq!(default_text("3e-4", &3e-4), "3e-4");
        assert_eq!(default_text("\"out\".to_owned()", &"out"), "`\"out\"`");
        assert_eq!(default_text("vec![0.9, 0.95]", &[0.9, 0.95]), "`[0.9, 0.95]`");
        assert_eq!(default_text("true", &true), "true");
    }
}

//! A deserializer over TOML values whose errors are data.
//!
//! The errors of `toml` are complete sentences, from which the allowed keys and words cannot be extracted.

use std::fmt::{self, Display};

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, Deserializer, Expected, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

/// An error of a key or its value.
#[derive(Debug)]
pub(super) enum Problem {
    /// The table has no such key; it has these.
    UnknownKey { known: &'static [&'static str] },
    /// The value is not one of these words.
    UnknownWord { known: &'static [&'static str] },
    /// The value is negative, but must not be.
    Negative,
    /// The value should be of this type.
    Expected(String),
}

/// A value to deserialize.
pub(super) struct Node(pub(super) toml::Value);

impl de::Error for Problem {
    fn custom<T: Display>(expected: T) -> Self {
        Problem::Expected(expected.to_string())
    }

    fn invalid_type(_: Unexpected, expected: &dyn Expected) -> Self {
        let expected = match expected.to_string().as_str() {
            "usize" | "u32" | "u64" => "a whole number".to_owned(),
            "f64" => "a number".to_owned(),
            "a boolean" => "true or false".to_owned(),
            "a sequence" => "a list".to_owned(),
            table if table.starts_with("struct ") => "a table".to_owned(),
            other => other.to_owned(),
        };
        Problem::Expected(expected)
    }

    fn invalid_value(_: Unexpected, _: &dyn Expected) -> Self {
        Problem::Negative
    }

    fn unknown_field(_: &str, known: &'static [&'static str]) -> Self {
        Problem::UnknownKey { known }
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Self {
        Problem::UnknownWord { known }
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for Problem {}

impl IntoDeserializer<'_, Problem> for Node {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Node {
    type Error = Problem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.0 {
            toml::Value::String(text) => visitor.visit_string(text),
            toml::Value::Integer(n) => visitor.visit_i64(n),
            toml::Value::Float(x) => visitor.visit_f64(x),
            toml::Value::Boolean(b) => visitor.visit_bool(b),
            toml::Value::Datetime(time) => visitor.visit_string(time.to_string()),
            toml::Value::Array(items) => visitor.visit_seq(SeqDeserializer::new(items.into_iter().map(Node))),
            toml::Value::Table(table) => {
                let entries = table.into_iter().map(|(key, value)| (key, Node(value)));
                visitor.visit_map(MapDeserializer::new(entries))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Problem> {
        match self.0 {
            toml::Value::String(word) => visitor.visit_enum(word.into_deserializer()),
            _ => Err(Problem::UnknownWord { known }),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

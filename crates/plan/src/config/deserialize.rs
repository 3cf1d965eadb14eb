//! A deserializer over TOML values whose errors know the path of the key they are about.

use std::fmt::{self, Display};

use serde::de::{
    self, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected,
    Visitor,
};
use serde::forward_to_deserialize_any;

/// What is wrong, and where.
#[derive(Debug)]
pub(super) struct Problem {
    /// The keys that lead to it, innermost first.
    path: Vec<String>,
    pub(super) kind: ProblemKind,
}

/// What is wrong with a key or its value.
#[derive(Debug)]
pub(super) enum ProblemKind {
    /// The table has no such key, only these.
    UnknownKey { known: &'static [&'static str] },
    /// The value is none of these words.
    UnknownWord { known: &'static [&'static str] },
    /// The value is negative where it cannot be.
    Negative,
    /// The value should be this.
    Expected(String),
}

/// A value to be read.
pub(super) struct Node(pub(super) toml::Value);

impl Problem {
    fn new(kind: ProblemKind) -> Self {
        Problem { path: Vec::new(), kind }
    }

    fn inside(mut self, key: String) -> Self {
        self.path.push(key);
        self
    }

    /// The keys that lead to it, outermost first.
    pub(super) fn path(&self) -> Vec<&str> {
        self.path.iter().rev().map(String::as_str).collect()
    }
}

impl de::Error for Problem {
    fn custom<T: Display>(expected: T) -> Self {
        Problem::new(ProblemKind::Expected(expected.to_string()))
    }

    fn invalid_type(_: Unexpected, expected: &dyn Expected) -> Self {
        let expected = match expected.to_string().as_str() {
            "usize" | "u64" => "a whole number".to_owned(),
            "f64" => "a number".to_owned(),
            "a boolean" => "true or false".to_owned(),
            "a sequence" => "a list".to_owned(),
            table if table.starts_with("struct ") => "a table".to_owned(),
            other => other.to_owned(),
        };
        Problem::new(ProblemKind::Expected(expected))
    }

    fn invalid_value(_: Unexpected, _: &dyn Expected) -> Self {
        Problem::new(ProblemKind::Negative)
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Problem::new(ProblemKind::UnknownKey { known }).inside(field.to_owned())
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Self {
        Problem::new(ProblemKind::UnknownWord { known })
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {:?}", self.path().join("."), self.kind)
    }
}

impl std::error::Error for Problem {}

impl<'de> Deserializer<'de> for Node {
    type Error = Problem;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Problem> {
        match self.0 {
            toml::Value::String(text) => visitor.visit_string(text),
            toml::Value::Integer(n) => visitor.visit_i64(n),
            toml::Value::Float(x) => visitor.visit_f64(x),
            toml::Value::Boolean(b) => visitor.visit_bool(b),
            toml::Value::Datetime(time) => visitor.visit_string(time.to_string()),
            toml::Value::Array(items) => visitor.visit_seq(Elements(items.into_iter())),
            toml::Value::Table(table) => {
                visitor.visit_map(Entries { rest: table.into_iter(), current: None })
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
            _ => Err(Problem::new(ProblemKind::UnknownWord { known })),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// The elements of a list, one by one.
struct Elements(std::vec::IntoIter<toml::Value>);

impl<'de> SeqAccess<'de> for Elements {
    type Error = Problem;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Problem> {
        let element = self.0.next().map(|item| seed.deserialize(Node(item))).transpose();
        element.map_err(|problem| match problem.kind {
            ProblemKind::Expected(what) => de::Error::custom(format!("a list whose every element is {what}")),
            ProblemKind::Negative => de::Error::custom("a list without negative numbers"),
            ProblemKind::UnknownKey { .. } | ProblemKind::UnknownWord { .. } => problem,
        })
    }
}

/// The entries of a table, one by one.
struct Entries {
    rest: toml::map::IntoIter<String, toml::Value>,
    current: Option<(String, toml::Value)>,
}

impl<'de> MapAccess<'de> for Entries {
    type Error = Problem;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Problem> {
        self.current = self.rest.next();
        match &self.current {
            Some((key, _)) => seed.deserialize(key.clone().into_deserializer()).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Problem> {
        let (key, value) = self.current.take().expect("a value follows its key");
        seed.deserialize(Node(value)).map_err(|problem| problem.inside(key))
    }
}

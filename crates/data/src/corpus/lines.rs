//! The documents of a chunk. Each JSON line or row is a document. A chunk of a text is a document or a part of one.

use std::borrow::Cow;
use std::fmt;
use std::str::Utf8Error;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor};

use super::inputs::Format;
use super::{RefusedLine, TextChunk};

/// The numbers of lines or rows of a chunk.
#[derive(Debug, Default)]
pub(crate) struct LineCounts {
    /// All lines or rows, without blank lines of JSON.
    pub(crate) lines: u64,
    /// Lines or rows that could not be used.
    pub(crate) refused: Vec<RefusedLine>,
}

/// Calls `each` with every document of a chunk.
///
/// Omits lines of a text that are not UTF-8, and skips blank lines of JSON.
pub(crate) fn documents<E>(
    chunk: &TextChunk,
    format: Format,
    key: &str,
    mut each: impl FnMut(u64, &str) -> Result<(), E>,
) -> Result<LineCounts, E> {
    let mut refused = chunk.refused.clone();
    let mut refuse = |line, reason| refused.push(RefusedLine { file: chunk.file, line, reason });
    let mut count = chunk.refused.len();
    match format {
        Format::Text => {
            count += lines(chunk).count();
            each(chunk.line, &text(chunk, &mut refuse))?;
        }
        Format::JsonLines => {
            for (number, line) in lines(chunk).filter(|(_, line)| !line.trim_ascii().is_empty()) {
                count += 1;
                match value(line, key) {
                    Ok(document) => each(number, &document)?,
                    Err(error) => refuse(number, error.to_string()),
                }
            }
        }
        Format::Parquet => {
            count += chunk.rows.len();
            let mut from = 0;
            for &(number, end) in &chunk.rows {
                match std::str::from_utf8(&chunk.bytes[from..end]) {
                    Ok(document) => each(number, document)?,
                    Err(_) => refuse(number, "the text is not UTF-8".to_owned()),
                }
                from = end;
            }
        }
    }
    Ok(LineCounts { lines: count as u64, refused })
}

fn lines(chunk: &TextChunk) -> impl Iterator<Item = (u64, &[u8])> {
    (chunk.line..).zip(chunk.bytes.split_inclusive(|&byte| byte == b'\n'))
}

fn text<'a>(chunk: &'a TextChunk, refuse: &mut impl FnMut(u64, String)) -> Cow<'a, str> {
    if let Ok(text) = std::str::from_utf8(&chunk.bytes) {
        return Cow::Borrowed(text);
    }
    let mut kept = String::with_capacity(chunk.bytes.len());
    for (number, line) in lines(chunk) {
        match std::str::from_utf8(line) {
            Ok(line) => kept.push_str(line),
            Err(_) => refuse(number, "the line is not UTF-8".to_owned()),
        }
    }
    Cow::Owned(kept)
}

/// Why a line of JSON cannot be used.
#[derive(Debug, thiserror::Error)]
enum LineError {
    #[error("the line is not UTF-8")]
    Encoding(#[from] Utf8Error),
    #[error("there is no key \"{0}\"")]
    NoKey(String),
    // The library's line number is useless, since it parses a single line.
    #[error("{} in column {}", without_line(.0), .0.column())]
    Json(#[from] serde_json::Error),
}

fn without_line(error: &serde_json::Error) -> String {
    let mut text = error.to_string();
    text.truncate(text.rfind(" at line ").unwrap_or(text.len()));
    text
}

/// The text that a line of JSON has under a key.
fn value<'a>(line: &'a [u8], key: &str) -> Result<Cow<'a, str>, LineError> {
    let line = std::str::from_utf8(line)?;
    let mut json = serde_json::Deserializer::from_str(line);
    let found = Field(key).deserialize(&mut json).and_then(|text| json.end().map(|()| text))?;
    found.ok_or_else(|| LineError::NoKey(key.to_owned()))
}

/// Deserializes one field of an object and skips the others.
struct Field<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<Cow<'de, str>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<Cow<'de, str>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(name) = map.next_key_seed(StringValue)? {
            if name == self.0 {
                found = Some(map.next_value_seed(StringValue)?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Deserializes a string. Borrows it from the line if it has no escapes.
struct StringValue;

impl<'de> DeserializeSeed<'de> for StringValue {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for StringValue {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

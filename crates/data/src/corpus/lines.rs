//! The documents of a piece: a text is one, or a part of one; JSON lines and rows are one each.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor};

use super::inputs::Format;
use super::{Batch, Refused};

/// The lines or rows of a piece.
#[derive(Debug, Default)]
pub(crate) struct LineCounts {
    /// How many there are, without blank lines of JSON.
    pub(crate) lines: u64,
    /// Those that could not be used.
    pub(crate) refused: Vec<Refused>,
}

/// Calls `each` with every document of a piece.
///
/// Of a text that is a piece or a part of it; lines that are not UTF-8 are left out. Blank lines of JSON are nothing.
pub(crate) fn documents<E>(
    batch: &Batch,
    format: Format,
    key: &str,
    mut each: impl FnMut(u64, &str) -> Result<(), E>,
) -> Result<LineCounts, E> {
    let mut refused = batch.refused.clone();
    let mut refuse = |line, reason| refused.push(Refused { file: batch.file, line, reason });
    let mut count = batch.refused.len();
    match format {
        Format::Text => {
            count += lines(batch).count();
            each(batch.line, &text(batch, &mut refuse))?;
        }
        Format::JsonLines => {
            for (number, line) in lines(batch).filter(|(_, line)| !line.trim_ascii().is_empty()) {
                count += 1;
                match value(line, key) {
                    Ok(document) => each(number, &document)?,
                    Err(reason) => refuse(number, reason),
                }
            }
        }
        Format::Parquet => {
            count += batch.rows.len();
            let mut from = 0;
            for &(number, end) in &batch.rows {
                match std::str::from_utf8(&batch.bytes[from..end]) {
                    Ok(document) => each(number, document)?,
                    Err(_) => refuse(number, "the text is not UTF-8".to_owned()),
                }
                from = end;
            }
        }
    }
    Ok(LineCounts { lines: count as u64, refused })
}

fn lines(batch: &Batch) -> impl Iterator<Item = (u64, &[u8])> {
    (batch.line..).zip(batch.bytes.split_inclusive(|&byte| byte == b'\n'))
}

fn text<'a>(batch: &'a Batch, refuse: &mut impl FnMut(u64, String)) -> Cow<'a, str> {
    if let Ok(text) = std::str::from_utf8(&batch.bytes) {
        return Cow::Borrowed(text);
    }
    let mut kept = String::with_capacity(batch.bytes.len());
    for (number, line) in lines(batch) {
        match std::str::from_utf8(line) {
            Ok(line) => kept.push_str(line),
            Err(_) => refuse(number, "the line is not UTF-8".to_owned()),
        }
    }
    Cow::Owned(kept)
}

/// The text that a line of JSON has under a key.
fn value<'a>(line: &'a [u8], key: &str) -> Result<Cow<'a, str>, String> {
    let line = std::str::from_utf8(line).map_err(|_| "the line is not UTF-8".to_owned())?;
    let mut json = serde_json::Deserializer::from_str(line);
    let found = Field(key).deserialize(&mut json).and_then(|text| json.end().map(|()| text));
    match found {
        Ok(Some(text)) => Ok(text),
        Ok(None) => Err(format!("there is no key \"{key}\"")),
        // The library counts lines and columns of what it was given, which is one line.
        Err(error) => {
            let text = error.to_string();
            let end = text.rfind(" at line ").unwrap_or(text.len());
            Err(format!("{} in column {}", &text[..end], error.column()))
        }
    }
}

/// Reads one field of an object and skips the rest, without building it.
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
        while let Some(name) = map.next_key_seed(Words)? {
            if name == self.0 {
                found = Some(map.next_value_seed(Words)?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// A string, borrowed from the line where it has no escapes.
struct Words;

impl<'de> DeserializeSeed<'de> for Words {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Words {
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

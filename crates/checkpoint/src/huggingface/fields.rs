//! The fields of a `config.json`, with the transformers library's defaults for missing ones.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use serde_json::{Map, Value};

use crate::CheckpointError;

/// A JSON object of a file, and its name in the file.
pub(super) struct Fields {
    path: PathBuf,
    /// `""`, or the outer field and a dot.
    prefix: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let text = input::bytes(path, input::MAX_WRITTEN_BY_PROGRAMS)
            .map_err(|error| CheckpointError::new(path, error))?;
        match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => Ok(Fields { path: path.to_owned(), prefix: String::new(), map }),
            Ok(_) => Err(CheckpointError::new(path, "is not a JSON object")),
            Err(error) => Err(CheckpointError::new(path, format!("is no JSON: {error}"))),
        }
    }

    /// Whether a field exists. It may be null.
    pub fn has(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }

    /// A field that exists and is not null.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// The object in a field, or an empty one if it is missing.
    pub fn object(&self, field: &str) -> Result<Fields, CheckpointError> {
        let map = match self.get(field) {
            Some(Value::Object(map)) => map.clone(),
            Some(_) => return Err(self.refused(field, "must be an object")),
            None => Map::new(),
        };
        Ok(Fields { path: self.path.clone(), prefix: format!("{}{field}.", self.prefix), map })
    }

    /// A size without a default.
    pub fn size(&self, field: &str, range: RangeInclusive<usize>) -> Result<usize, CheckpointError> {
        let missing = || CheckpointError::new(&self.path, format!("{}{field} is missing", self.prefix));
        self.optional_size(field, range)?.ok_or_else(missing)
    }

    /// A size that may be missing.
    pub fn optional_size(
        &self,
        field: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        let rule = || format!("must be a whole number from {} to {}", range.start(), range.end());
        size.filter(|size| range.contains(size)).map(Some).ok_or_else(|| self.refused(field, &rule()))
    }

    /// A size that divides that of another field, which it is if it is missing.
    pub fn divisor(&self, field: &str, other: &str, size: usize) -> Result<usize, CheckpointError> {
        let divisor = self.optional_size(field, 1..=size)?.unwrap_or(size);
        if size.is_multiple_of(divisor) {
            return Ok(divisor);
        }
        Err(self.refused(field, &format!("does not divide {other} = {size}")))
    }

    /// A number.
    pub fn number(
        &self,
        field: &str,
        default: f64,
        range: RangeInclusive<f64>,
    ) -> Result<f64, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        let rule = || format!("must be a number from {:e} to {:e}", range.start(), range.end());
        value.as_f64().filter(|number| range.contains(number)).ok_or_else(|| self.refused(field, &rule()))
    }

    /// A boolean.
    pub fn flag(&self, field: &str, default: bool) -> Result<bool, CheckpointError> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.refused(field, "must be true or false")),
        }
    }

    /// A string.
    pub fn word<'a>(&'a self, field: &str, default: &'a str) -> Result<&'a str, CheckpointError> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value.as_str().ok_or_else(|| self.refused(field, "must be a word")),
        }
    }

    /// Fails if a flag does not have this value, which is also the default.
    pub fn only(&self, field: &str, supported: bool) -> Result<(), CheckpointError> {
        if self.flag(field, supported)? == supported {
            return Ok(());
        }
        Err(self.refused(field, &format!("is not supported; only {supported} is")))
    }

    /// The error for the value of a field.
    pub fn refused(&self, field: &str, rule: &str) -> CheckpointError {
        let value = self.map.get(field).map_or_else(|| "null".into(), Value::to_string);
        CheckpointError::new(&self.path, format!("{}{field} = {value} {rule}", self.prefix))
    }
}

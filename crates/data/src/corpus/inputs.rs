//! The files that arguments name: files themselves, folders with all that is in them, and patterns.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::DataError;

/// A file of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Where it is.
    pub path: PathBuf,
    /// What is in it.
    pub format: Format,
    /// How it is compressed.
    pub compression: Compression,
    /// Bytes on disk.
    pub bytes: u64,
}

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One document.
    Text,
    /// A JSON object on every line, each a document.
    JsonLines,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
}

impl Input {
    /// The files that `arguments` name, in their order, and by name within a folder or a pattern.
    pub fn find(arguments: &[String]) -> Result<Vec<Input>, DataError> {
        let mut inputs = Vec::new();
        for argument in arguments {
            let before = inputs.len();
            let path = Path::new(argument);
            if path.is_dir() {
                add_folder(path, &mut HashSet::new(), &mut inputs)?;
            } else if path.exists() || !argument.contains(['*', '?', '[']) {
                inputs.push(Input::open(path)?);
            } else {
                add_matches(argument, &mut inputs)?;
            }
            if inputs.len() == before {
                let reason = "no file in it ends in .txt, .md, .jsonl, .ndjson or .json, or in one of these and .gz or .zst";
                return Err(DataError::file("use", path, reason));
            }
        }
        Ok(inputs)
    }

    fn open(path: &Path) -> Result<Input, DataError> {
        let about = fs::metadata(path).map_err(|error| DataError::file("read", path, error))?;
        if !about.is_file() {
            return Err(DataError::file("read", path, "it is no file"));
        }
        let (format, compression) = kind(path);
        let format = format.unwrap_or(Format::Text);
        Ok(Input { path: path.to_owned(), format, compression, bytes: about.len() })
    }
}

/// What the name of a file says. A format that it does not say is `None`.
fn kind(path: &Path) -> (Option<Format>, Compression) {
    let extension = |path: &Path| path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
    let compression = match extension(path).as_deref() {
        Some("gz") => Compression::Gzip,
        Some("zst") => Compression::Zstd,
        _ => Compression::None,
    };
    let inner = if compression == Compression::None { path.to_owned() } else { path.with_extension("") };
    let format = match extension(&inner).as_deref() {
        Some("txt" | "md") => Some(Format::Text),
        Some("jsonl" | "ndjson" | "json") => Some(Format::JsonLines),
        _ => None,
    };
    (format, compression)
}

/// What a folder may have beside text that ends like it: what this program and others keep of a tokenizer, and of token
/// files.
const NO_TEXT: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", ".meta.json"];

/// Everything in a folder that has a known name; other files and hidden ones are not text. Links are followed, and no
/// folder is `entered` twice: one that leads to a folder above would never end.
fn add_folder(
    folder: &Path,
    entered: &mut HashSet<PathBuf>,
    inputs: &mut Vec<Input>,
) -> Result<(), DataError> {
    let failed = |error| DataError::file("read", folder, error);
    if !entered.insert(folder.canonicalize().map_err(failed)?) {
        return Ok(());
    }
    let entries = fs::read_dir(folder).map_err(failed)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if name.starts_with(b".") {
            continue;
        }
        if path.is_dir() {
            add_folder(&path, entered, inputs)?;
        } else if path.is_file()
            && kind(&path).0.is_some()
            && !NO_TEXT.iter().any(|ending| name.ends_with(ending.as_bytes()))
        {
            inputs.push(Input::open(&path)?);
        }
    }
    Ok(())
}

fn add_matches(pattern: &str, inputs: &mut Vec<Input>) -> Result<(), DataError> {
    let path = Path::new(pattern);
    let matches = glob::glob(pattern).map_err(|error| DataError::file("use", path, error.msg))?;
    let before = inputs.len();
    for found in matches {
        let found = found.map_err(|error| DataError::file("read", error.path(), error.error()))?;
        if found.is_file() {
            inputs.push(Input::open(&found)?);
        }
    }
    if inputs.len() == before {
        return Err(DataError::file("find", path, "no file matches"));
    }
    Ok(())
}

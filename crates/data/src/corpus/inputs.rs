//! Finds the input files of arguments, which are files, folders or patterns.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kintsugi_spec::tokenizer_files;

use super::decompress;
use super::magic::{Content, HEAD, content};
use crate::DataError;

/// A file of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its path.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Its compression.
    pub compression: Compression,
    /// Bytes on disk.
    pub bytes: u64,
}

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One document.
    Text,
    /// A JSON object per line. Each is a document.
    JsonLines,
    /// A Parquet table with a text column. Each row is a document.
    Parquet,
}

impl Format {
    /// What messages call the parts of such a file: lines or rows.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Format::Text | Format::JsonLines => "line",
            Format::Parquet => "row",
        }
    }
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    None,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
    /// bzip2.
    Bzip2,
    /// xz.
    Xz,
}

impl Input {
    /// The files of `arguments`, in their order. Files of a folder or a pattern are sorted by name.
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
                let reason = "no file in it ends in .txt, .md, .jsonl, .ndjson, .json or .parquet, or in one of the first \
                              five and .gz, .zst, .bz2 or .xz";
                return Err(DataError::file("use", path, reason));
            }
        }
        Ok(inputs)
    }

    fn open(path: &Path) -> Result<Input, DataError> {
        let about = fs::metadata(path).map_err(|error| DataError::file("read", path, error))?;
        if !about.is_file() {
            return Err(DataError::file("read", path, "it is not a file"));
        }
        let (format, compression) = recognize(path)?;
        Ok(Input { path: path.to_owned(), format, compression, bytes: about.len() })
    }
}

/// The format and compression of a file. Its first and last bytes determine the compression and whether it is text. Its name
/// determines whether the text is JSON lines.
fn recognize(path: &Path) -> Result<(Format, Compression), DataError> {
    let (named, named_compression) = kind(path);
    let text = match named {
        Some(Format::JsonLines) => Format::JsonLines,
        _ => Format::Text,
    };
    match content(&head(path, Compression::None)?, Some(&tail(path)?)) {
        Content::Parquet => Ok((Format::Parquet, Compression::None)),
        Content::Compressed(compression) => match content(&head(path, compression)?, None) {
            Content::Text => Ok((text, compression)),
            Content::Parquet => Err(refused(path, "a Parquet file within a compressed file")),
            Content::Compressed(_) => Err(refused(path, "a compressed file within another")),
            Content::Encoded(encoding) => Err(encoded(path, encoding)),
            Content::Other(what) => Err(refused(path, &format!("{what}, compressed"))),
        },
        Content::Text if named_compression != Compression::None => Err(DataError::file(
            "use",
            path,
            "its name is that of a compressed file, but it is not compressed",
        )),
        Content::Text if named == Some(Format::Parquet) => {
            Err(DataError::file("use", path, "its name is that of a Parquet file, but it is none"))
        }
        Content::Text => Ok((text, Compression::None)),
        Content::Encoded(encoding) => Err(encoded(path, encoding)),
        Content::Other(what) => Err(refused(path, what)),
    }
}

fn refused(path: &Path, what: &str) -> DataError {
    let wanted = "UTF-8 text or JSON lines, also compressed by gzip, zstd, bzip2 or xz, and Parquet files";
    DataError::file("use", path, format!("it is {what}; prepare reads {wanted}"))
}

fn encoded(path: &Path, encoding: &str) -> DataError {
    let remedy = format!("convert it to UTF-8 first, for example with iconv -f {encoding} -t UTF-8");
    DataError::file("use", path, format!("it is {encoding} text; {remedy}"))
}

/// The first bytes of a file, after decompression.
fn head(path: &Path, compression: Compression) -> Result<Vec<u8>, DataError> {
    let read = || -> io::Result<Vec<u8>> {
        let mut head = Vec::with_capacity(HEAD);
        decompress::open(path, compression, &Arc::default())?.take(HEAD as u64).read_to_end(&mut head)?;
        Ok(head)
    };
    read().map_err(|error| DataError::file("read", path, error))
}

/// The last four bytes of a file, or as many as it has.
fn tail(path: &Path) -> Result<Vec<u8>, DataError> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let bytes = file.metadata()?.len();
        file.seek(SeekFrom::Start(bytes.saturating_sub(4)))?;
        let mut tail = Vec::with_capacity(4);
        file.take(4).read_to_end(&mut tail)?;
        Ok(tail)
    };
    read().map_err(|error| DataError::file("read", path, error))
}

/// The format and compression according to the name of a file. The format is `None` if the name does not tell.
fn kind(path: &Path) -> (Option<Format>, Compression) {
    let extension = |path: &Path| path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
    let compression = match extension(path).as_deref() {
        Some("gz") => Compression::Gzip,
        Some("zst") => Compression::Zstd,
        Some("bz2") => Compression::Bzip2,
        Some("xz") => Compression::Xz,
        _ => Compression::None,
    };
    let inner = if compression == Compression::None { path.to_owned() } else { path.with_extension("") };
    let format = match extension(&inner).as_deref() {
        Some("txt" | "md") => Some(Format::Text),
        Some("jsonl" | "ndjson" | "json") => Some(Format::JsonLines),
        Some("parquet") if compression == Compression::None => Some(Format::Parquet),
        _ => None,
    };
    (format, compression)
}

/// Files with a text-like suffix that are not text: those of tokenizers and token files.
const NO_TEXT: [&str; 3] = [tokenizer_files::TOKENIZER, tokenizer_files::CONFIG, ".meta.json"];

/// Adds the files of a folder whose suffix is known and that are not hidden. Follows links. Enters each folder once, because
/// links can form a cycle.
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
        let found = found.map_err(|error| {
            let path = error.path().to_owned();
            DataError::file("read", &path, io::Error::from(error))
        })?;
        if found.is_file() {
            inputs.push(Input::open(&found)?);
        }
    }
    if inputs.len() == before {
        return Err(DataError::file("find", path, "no file matches"));
    }
    Ok(())
}

//! A pair of token files, open for reading.
//!
//! Opening reads a few dozen bytes, whatever the number of documents. Tokens are read with `pread` when they are needed. The
//! page cache makes this as fast as a memory mapping, without `unsafe` and without a signal if the file is truncated.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use kintsugi_spec::output::with_suffix;

use super::index::IndexHeader;
use super::{OutputPaths, TokenFileInfo, TokenType, without_suffix};
use crate::DataError;

/// The tokens of all documents, and the start of each document.
#[derive(Debug)]
pub struct TokenFile {
    bin: (PathBuf, File),
    pub(super) idx: (PathBuf, File),
    pub(super) head: IndexHeader,
    tokens: u64,
    about: Option<TokenFileInfo>,
}

/// Bytes that are read at once, into a buffer on the stack.
const CHUNK: usize = 8 << 10;

impl TokenFile {
    /// Opens `PREFIX.bin` and `PREFIX.idx`. Fails if they are truncated or have another format.
    pub fn open(prefix: &Path) -> Result<TokenFile, DataError> {
        let prefix = without_suffix(prefix);
        let (bin, bin_bytes) = open(with_suffix(&prefix, ".bin"))?;
        let (idx, idx_bytes) = open(with_suffix(&prefix, ".idx"))?;
        let mut head = [0; IndexHeader::BYTES];
        let head_bytes = idx_bytes.min(IndexHeader::BYTES as u64) as usize;
        read_at(&idx, &mut head[..head_bytes], 0)?;
        let head = IndexHeader::read(&idx.0, &head[..head_bytes], idx_bytes)?;
        let about = TokenFileInfo::read(&with_suffix(&prefix, ".meta.json"))?;
        let tokens = bin_bytes / head.kind.bytes() as u64;
        let file = TokenFile { bin, idx, head, tokens, about };
        file.check_end(bin_bytes)?;
        file.check_about(&with_suffix(&prefix, ".meta.json"))?;
        Ok(file)
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of documents.
    pub fn documents(&self) -> u64 {
        self.head.documents.saturating_sub(1)
    }

    /// How a token is stored.
    pub fn token_type(&self) -> TokenType {
        self.head.kind
    }

    /// The description that `kintsugi prepare` wrote.
    pub fn about(&self) -> Option<&TokenFileInfo> {
        self.about.as_ref()
    }

    /// The tokenizer that made the files, if it is known: the copy beside them, or the name at that time.
    pub fn tokenizer(&self) -> Option<String> {
        let [copy, _] = OutputPaths::tokenizer(&self.bin.0.with_extension(""));
        if copy.is_file() {
            return Some(copy.display().to_string());
        }
        self.about.as_ref().map(|about| about.tokenizer.clone())
    }

    /// The path of the tokens.
    pub fn path(&self) -> &Path {
        &self.bin.0
    }

    /// Whether `other` is the same file on disk, even by another path or link.
    pub fn is_same(&self, other: &TokenFile) -> Result<bool, DataError> {
        let identity = |(path, file): &(PathBuf, File)| {
            let about = file.metadata().map_err(|error| DataError::file("read", path, error))?;
            Ok((about.dev(), about.ino()))
        };
        Ok(identity(&self.bin)? == identity(&other.bin)?)
    }

    /// Fills `out` with the tokens from `first` on. Fails if a token is negative or not below `vocab`.
    pub fn read(&self, first: u64, vocab: usize, out: &mut [u32]) -> Result<(), DataError> {
        let size = self.head.kind.bytes();
        let mut chunk = [0; CHUNK];
        let mut at = first;
        for tokens in out.chunks_mut(CHUNK / size) {
            let bytes = &mut chunk[..tokens.len() * size];
            read_at(&self.bin, bytes, at * size as u64)?;
            for (token, bytes) in tokens.iter_mut().zip(bytes.chunks_exact(size)) {
                let value = self.head.kind.read(bytes);
                if !usize::try_from(value).is_ok_and(|value| value < vocab) {
                    return Err(self.outside(at, value, vocab));
                }
                *token = value as u32;
                at += 1;
            }
        }
        Ok(())
    }

    /// The start of the first document that begins at or after token `at`, or the number of tokens if there is none.
    ///
    /// Uses a binary search in the index, which takes a few dozen small reads.
    pub fn document_from(&self, at: u64) -> Result<u64, DataError> {
        let next = self.next_document(at)?;
        if next == self.documents() { Ok(self.tokens) } else { self.document_start(next) }
    }

    /// Fills `out`, for a window that begins at token `first`, with the start of each token's document in the window, or 0 if
    /// the document began before it.
    pub fn read_starts(&self, first: u64, out: &mut [u32]) -> Result<(), DataError> {
        let mut start = 0;
        for document in self.next_document(first)?..self.documents() {
            let at = self.document_start(document)?;
            let Some(next) = at.checked_sub(first).filter(|&next| next >= start as u64) else {
                let found = format!("token {at} as the first of document {document}");
                let expected =
                    format!("{} or a later one: documents follow each other", first + start as u64);
                return Err(DataError::foreign(&self.idx.0, found, expected));
            };
            let end = next.min(out.len() as u64) as usize;
            out[start..end].fill(start as u32);
            start = end;
            if start == out.len() {
                return Ok(());
            }
        }
        out[start..].fill(start as u32);
        Ok(())
    }

    /// The first document that begins at or after token `at`, or the number of documents if there is none.
    fn next_document(&self, at: u64) -> Result<u64, DataError> {
        let (mut low, mut high) = (0, self.documents());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.document_start(middle)? < at {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }

    fn document_start(&self, document: u64) -> Result<u64, DataError> {
        let sequence = self.number(self.head.document_at(document))?;
        let wrong = |found: String| {
            DataError::foreign(&self.idx.0, format!("{found} of document {document}"), "a place in the .bin")
        };
        let Some(sequence) = u64::try_from(sequence).ok().filter(|&n| n <= self.head.sequences) else {
            return Err(wrong(format!("sequence {sequence}")));
        };
        if sequence == self.head.sequences {
            return Ok(self.tokens);
        }
        let (size, pointer) = (self.head.kind.bytes() as i64, self.number(self.head.pointer_at(sequence))?);
        match u64::try_from(pointer / size) {
            Ok(start) if pointer >= 0 && pointer % size == 0 && start <= self.tokens => Ok(start),
            _ => Err(wrong(format!("byte {pointer}"))),
        }
    }

    /// Checks that the last sequence ends at the end of the tokens.
    fn check_end(&self, bin_bytes: u64) -> Result<(), DataError> {
        let expected = match self.head.sequences.checked_sub(1) {
            None => 0,
            Some(last) => {
                let mut length = [0; 4];
                read_at(&self.idx, &mut length, IndexHeader::length_at(last))?;
                let length = i64::from(i32::from_le_bytes(length)) * self.head.kind.bytes() as i64;
                self.number(self.head.pointer_at(last))?.saturating_add(length)
            }
        };
        if u64::try_from(expected) == Ok(bin_bytes) {
            return Ok(());
        }
        let (sequences, idx) = (self.head.sequences, self.idx.0.display());
        let expected = format!("{expected}, where the last of the {sequences} sequences of {idx} ends");
        Err(DataError::foreign(&self.bin.0, format!("{bin_bytes} bytes"), expected))
    }

    fn check_about(&self, path: &Path) -> Result<(), DataError> {
        match &self.about {
            Some(about) if about.tokens != self.tokens => {
                let found = format!("{} tokens", about.tokens);
                Err(DataError::foreign(path, found, format!("the {} of the .bin beside it", self.tokens)))
            }
            Some(TokenFileInfo { validation: Some(drawn), .. }) if drawn.tokens > self.tokens => {
                let found = format!("{} tokens for validation", drawn.tokens);
                Err(DataError::foreign(
                    path,
                    found,
                    format!("at most the {} of the .bin beside it", self.tokens),
                ))
            }
            _ => Ok(()),
        }
    }

    fn number(&self, at: u64) -> Result<i64, DataError> {
        let mut bytes = [0; 8];
        read_at(&self.idx, &mut bytes, at)?;
        Ok(i64::from_le_bytes(bytes))
    }

    fn outside(&self, at: u64, value: i64, vocab: usize) -> DataError {
        let found = format!("token {value} at place {at}");
        DataError::foreign(&self.bin.0, found, format!("tokens from 0 to {}", vocab.saturating_sub(1)))
    }
}

fn open(path: PathBuf) -> Result<((PathBuf, File), u64), DataError> {
    let opened = input::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
    match opened {
        Ok((bytes, file)) => Ok(((path, file), bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(DataError::file("read", &path, format!("{error}; kintsugi prepare makes token files")))
        }
        Err(error) => Err(DataError::file("read", &path, error)),
    }
}

pub(super) fn read_at((path, file): &(PathBuf, File), bytes: &mut [u8], at: u64) -> Result<(), DataError> {
    file.read_exact_at(bytes, at).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => {
            let expected = format!("{} more at byte {at}", bytes.len());
            DataError::foreign(path, "the end of the file", expected)
        }
        _ => DataError::file("read", path, error),
    })
}

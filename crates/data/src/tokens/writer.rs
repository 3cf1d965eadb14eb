//! Writes token files that are complete or absent.
//!
//! The writer first writes to files whose names end in `.partial`. Lengths and documents also go to files rather than memory,
//! as there may be billions. Documents that are drawn for validation go to files of their own, which are appended at the end.
//! Then the writer syncs all files and renames them. It renames the index last, since nobody reads the other files without it.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use kintsugi_spec::output::{UnfinishedFile, with_suffix};
use kintsugi_spec::tokenizer_files;

use super::index::IndexHeader;
use super::validation::{is_about, is_drawn};
use super::{TokenFileInfo, TokenType, ValidationPart};
use crate::DataError;

/// The paths of the files of a prefix.
#[derive(Clone, Debug)]
pub struct OutputPaths {
    /// The tokens.
    pub bin: PathBuf,
    /// The index.
    pub idx: PathBuf,
    /// The description.
    pub meta: PathBuf,
}

/// Writes a pair of token files.
#[derive(Debug)]
pub struct TokenWriter {
    outputs: OutputPaths,
    kind: TokenType,
    documents: DocumentFiles,
    /// The documents that are drawn for validation, and the share to draw.
    validation: Option<(DocumentFiles, f64)>,
    /// Additional files that are published with the others, and their final names.
    further: Vec<(PathBuf, PartialFile)>,
}

/// Documents in unfinished files: tokens, lengths of sequences, and the first sequence of every document.
#[derive(Debug)]
struct DocumentFiles {
    bin: PartialFile,
    lengths: PartialFile,
    starts: PartialFile,
    sequences: u64,
    documents: u64,
    tokens: u64,
    /// Whether there are sequences after the end of the last document.
    open: bool,
}

/// An unfinished file, with errors that have its path.
#[derive(Debug)]
pub(crate) struct PartialFile(UnfinishedFile);

impl OutputPaths {
    /// The files of a prefix.
    pub fn new(prefix: &Path) -> OutputPaths {
        let [bin, idx, meta] = [".bin", ".idx", ".meta.json"].map(|suffix| with_suffix(prefix, suffix));
        OutputPaths { bin, idx, meta }
    }

    /// All paths.
    pub fn paths(&self) -> [&Path; 3] {
        [&self.bin, &self.idx, &self.meta]
    }

    /// The paths for a copy of the tokenizer, one for each of its files.
    pub fn tokenizer(prefix: &Path) -> [PathBuf; 2] {
        tokenizer_files::WRITTEN.map(|name| with_suffix(prefix, &format!(".{name}")))
    }
}

impl TokenWriter {
    /// Starts the files of a prefix. Existing files with these names are not changed before the end.
    pub fn create(prefix: &Path, kind: TokenType) -> Result<TokenWriter, DataError> {
        let outputs = OutputPaths::new(prefix);
        let documents = DocumentFiles::create(prefix, "")?;
        Ok(TokenWriter { outputs, kind, documents, validation: None, further: Vec::new() })
    }

    /// Draws this share of the documents for validation, and puts them last.
    pub fn with_validation(mut self, prefix: &Path, share: f64) -> Result<TokenWriter, DataError> {
        if share > 0.0 {
            self.validation = Some((DocumentFiles::create(prefix, ".validation")?, share));
        }
        Ok(self)
    }

    /// Appends tokens as bytes, and the lengths of their sequences. If `whole`, each sequence is a document.
    pub fn append(&mut self, bytes: &[u8], lengths: &[u32], whole: bool) -> Result<(), DataError> {
        let mut rest = bytes;
        for &length in lengths {
            let (sequence, after) = rest.split_at(length as usize * self.kind.bytes());
            rest = after;
            self.current().append(sequence, length)?;
            if whole {
                self.end_document()?;
            }
        }
        Ok(())
    }

    /// Ends the current document, if it has any sequences.
    pub fn end_document(&mut self) -> Result<(), DataError> {
        self.current().end_document()
    }

    /// The files of the current document. A hash of its position decides.
    fn current(&mut self) -> &mut DocumentFiles {
        let position = self.documents();
        match &mut self.validation {
            Some((drawn, share)) if is_drawn(position, *share) => drawn,
            _ => &mut self.documents,
        }
    }

    /// Adds a file that is published with the others.
    pub(crate) fn add(&mut self, path: PathBuf, bytes: &[u8]) -> Result<(), DataError> {
        let mut partial = PartialFile::create(&path)?;
        partial.write(bytes)?;
        self.further.push((path, partial));
        Ok(())
    }

    /// Number of tokens so far.
    pub fn tokens(&self) -> u64 {
        self.documents.tokens + self.drawn().map_or(0, |drawn| drawn.tokens)
    }

    /// Number of documents so far.
    pub fn documents(&self) -> u64 {
        self.documents.documents + self.drawn().map_or(0, |drawn| drawn.documents)
    }

    /// The documents drawn so far, if they are about the share that was asked for.
    pub fn validation(&self) -> Option<ValidationPart> {
        let (_, share) = self.validation.as_ref()?;
        self.drawn().filter(|drawn| is_about(*share, drawn.tokens, self.tokens()))
    }

    fn drawn(&self) -> Option<ValidationPart> {
        let (drawn, _) = self.validation.as_ref()?;
        Some(ValidationPart { documents: drawn.documents, tokens: drawn.tokens })
    }

    /// Writes the index and the description, and renames all files to their final names.
    pub fn finish(mut self, about: &TokenFileInfo) -> Result<OutputPaths, DataError> {
        if let Some((drawn, _)) = self.validation.take() {
            self.documents.join(drawn)?;
        }
        let mut idx = PartialFile::create(&self.outputs.idx)?;
        let mut meta = PartialFile::create(&self.outputs.meta)?;
        self.documents.write_index(self.kind, &mut idx)?;
        meta.write(&serde_json::to_vec_pretty(about).expect("a description has string keys"))?;
        meta.write(b"\n")?;
        let further = self.further.iter_mut().map(|(_, partial)| partial);
        for partial in further.chain([&mut self.documents.bin, &mut idx, &mut meta]) {
            partial.sync()?;
        }
        // An old index must never be beside new tokens.
        remove(&self.outputs.idx)?;
        self.documents.bin.publish(&self.outputs.bin)?;
        meta.publish(&self.outputs.meta)?;
        self.further.into_iter().try_for_each(|(path, partial)| partial.publish(&path))?;
        idx.publish(&self.outputs.idx)?;
        Ok(self.outputs)
    }
}

impl DocumentFiles {
    /// Creates the files of a prefix, with `part` in their names.
    fn create(prefix: &Path, part: &str) -> Result<DocumentFiles, DataError> {
        let file = |name: &str| PartialFile::create(&with_suffix(prefix, &format!("{part}{name}")));
        let (bin, lengths, mut starts) = (file(".bin")?, file(".lengths")?, file(".documents")?);
        starts.write(&0_i64.to_le_bytes())?;
        Ok(DocumentFiles { bin, lengths, starts, sequences: 0, documents: 0, tokens: 0, open: false })
    }

    fn append(&mut self, sequence: &[u8], length: u32) -> Result<(), DataError> {
        let length = i32::try_from(length).expect("a piece of text has fewer tokens than an i32 can count");
        self.bin.write(sequence)?;
        self.lengths.write(&length.to_le_bytes())?;
        self.tokens += length as u64;
        self.sequences += 1;
        self.open = true;
        Ok(())
    }

    fn end_document(&mut self) -> Result<(), DataError> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        self.documents += 1;
        self.starts.write(&self.sequences.to_le_bytes())
    }

    /// Appends other documents to these.
    fn join(&mut self, mut other: DocumentFiles) -> Result<(), DataError> {
        self.bin.copy(&mut other.bin.rewind()?)?;
        self.lengths.copy(&mut other.lengths.rewind()?)?;
        let mut starts = BufReader::new(other.starts.rewind()?);
        let mut start = [0; 8];
        // The first start is the end of these documents, which they have already.
        for place in 0..=other.documents {
            starts.read_exact(&mut start).map_err(|error| other.starts.failed("read", error))?;
            if place > 0 {
                self.starts.write(&(u64::from_le_bytes(start) + self.sequences).to_le_bytes())?;
            }
        }
        self.sequences += other.sequences;
        self.documents += other.documents;
        self.tokens += other.tokens;
        Ok(())
    }

    fn write_index(&mut self, kind: TokenType, idx: &mut PartialFile) -> Result<(), DataError> {
        let head = IndexHeader { kind, sequences: self.sequences, documents: self.documents + 1 };
        idx.write(&head.to_bytes())?;
        let mut lengths = self.lengths.rewind()?;
        idx.copy(&mut lengths)?;
        let mut lengths = BufReader::new(self.lengths.rewind()?);
        let mut place = 0_i64;
        for _ in 0..self.sequences {
            idx.write(&place.to_le_bytes())?;
            let mut length = [0; 4];
            lengths.read_exact(&mut length).map_err(|error| self.lengths.failed("read", error))?;
            place += i64::from(i32::from_le_bytes(length)) * kind.bytes() as i64;
        }
        let mut starts = self.starts.rewind()?;
        idx.copy(&mut starts)
    }
}

/// Writes a file that is complete or absent.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let mut partial = PartialFile::create(path)?;
    partial.write(bytes)?;
    partial.sync()?;
    partial.publish(path)
}

impl PartialFile {
    /// Begins the file that will be `path`. Fails if another process is writing it.
    pub fn create(path: &Path) -> Result<PartialFile, DataError> {
        let path = with_suffix(path, ".partial");
        let file = UnfinishedFile::create(path.clone());
        file.map(PartialFile).map_err(|error| DataError::file("write", &path, error))
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.0.write_all(bytes).map_err(|error| self.failed("write", error))
    }

    fn copy(&mut self, from: &mut File) -> Result<(), DataError> {
        io::copy(from, &mut self.0).map(drop).map_err(|error| self.failed("write", error))
    }

    /// What was written so far, from the beginning.
    fn rewind(&mut self) -> Result<File, DataError> {
        let rewound = self.0.reopen().and_then(|mut file| file.rewind().map(|()| file));
        rewound.map_err(|error| self.failed("read", error))
    }

    pub fn sync(&mut self) -> Result<(), DataError> {
        self.0.sync().map_err(|error| self.failed("write", error))
    }

    /// Renames a synced file to its final name and syncs the rename.
    pub fn publish(self, path: &Path) -> Result<(), DataError> {
        self.0.publish(path).map_err(|error| DataError::file("write", path, error))
    }

    fn failed(&self, action: &'static str, error: io::Error) -> DataError {
        DataError::file(action, self.0.path(), error)
    }
}

fn remove(path: &Path) -> Result<(), DataError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(DataError::file("replace", path, error)),
        _ => Ok(()),
    }
}

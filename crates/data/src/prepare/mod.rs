//! Makes token files of text: one thread reads chunks, several encode them, and one writes them in order.
//!
//! The number of chunks is fixed, so memory does not grow with the text. The output does not depend on the number of workers.

mod bad_lines;
mod chunk_ring;
mod encode;
mod summary;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub use crate::corpus::Input;
pub use crate::tokenizer::{TrainedTokenizer, train_tokenizer};
pub use summary::{BadLine, PrepareProgress, PrepareSummary};

use kintsugi_spec::input;

use crate::corpus::Format;
use crate::tokens::OutputPaths;
use crate::{DataError, TokenFileInfo, TokenType, TokenWriter, Tokenizer};
use bad_lines::BadLines;
use chunk_ring::ChunkRing;
use encode::{Encode, EncodedChunk};

/// The options of a preparation.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// The text.
    pub inputs: Vec<Input>,
    /// Prefix of the output files.
    pub out: PathBuf,
    /// The key of the text in a JSON line, and the text column of a Parquet file.
    pub json_key: String,
    /// The token to append to every document, if any.
    pub end_of_document: Option<u32>,
    /// Whether the first bad line is an error.
    pub strict: bool,
    /// Whether more than one line in ten of a file may be bad.
    pub allow_bad_lines: bool,
    /// Whether existing files may be replaced.
    pub overwrite: bool,
    /// Threads that encode.
    pub workers: usize,
    /// The share of the documents that is drawn for validation and put last. 0 keeps the order of the text.
    pub validation: f64,
}

/// Makes token files of text. Calls `on_progress` after every chunk, and stops if it returns `false`.
pub fn prepare(
    options: &PrepareOptions,
    tokenizer: &Tokenizer,
    mut on_progress: impl FnMut(&PrepareProgress) -> bool,
) -> Result<PrepareSummary, DataError> {
    let begun = Instant::now();
    check_outputs(options)?;
    check_tokenizer(options, tokenizer)?;
    let kind = TokenType::for_vocab(tokenizer.vocab());
    let mut writer =
        TokenWriter::create(&options.out, kind)?.with_validation(&options.out, options.validation)?;
    let mut progress = PrepareProgress {
        total: options.inputs.iter().map(|input| input.bytes).sum(),
        ..PrepareProgress::default()
    };
    let mut bad = BadLines::new(options);
    let encode = Encode { tokenizer, kind, key: &options.json_key, end_of_document: options.end_of_document };
    let read = Arc::new(AtomicU64::new(0));
    ChunkRing { inputs: &options.inputs, workers: options.workers, read: Arc::clone(&read) }.run(
        &encode,
        |encoded| {
            append(encoded, &options.inputs, &mut writer)?;
            progress.read = read.load(Ordering::Relaxed);
            progress.text += encoded.chunk.bytes.len() as u64;
            (progress.documents, progress.tokens) = (writer.documents(), writer.tokens());
            progress.empty += encoded.empty;
            bad.add(encoded.chunk.file, &encoded.parsed)?;
            progress.bad_lines = bad.count();
            if on_progress(&progress) {
                Ok(())
            } else {
                Err(DataError::Value("stopped when asked to".to_owned()))
            }
        },
    )?;
    bad.end_file()?;
    let bad = bad.into_first();
    if progress.tokens == 0 {
        let first = bad.first().map(|BadLine { file, unit, line, reason }| {
            format!("; {}, {unit} {line}: {reason}", file.display())
        });
        let files = options.inputs.len();
        let of = if files == 1 { "the file".to_owned() } else { format!("the {files} files") };
        let (bad, lines) = (progress.bad_lines, if progress.bad_lines == 1 { "line" } else { "lines" });
        let text = format!("there is no text in {of}: {bad} bad {lines}{}", first.unwrap_or_default());
        return Err(DataError::Value(text));
    }
    for (path, bytes) in OutputPaths::tokenizer(&options.out).into_iter().zip(tokenizer.files()) {
        writer.add(path, bytes)?;
    }
    let validation = writer.validation();
    let outputs = writer.finish(&TokenFileInfo {
        vocab: tokenizer.vocab(),
        tokenizer: tokenizer.name().to_owned(),
        end_of_document: options.end_of_document,
        documents: progress.documents,
        tokens: progress.tokens,
        validation,
    })?;
    let summary = PrepareSummary::new(&progress, bad, options, tokenizer, kind, &outputs, begun.elapsed());
    Ok(PrepareSummary { validation, ..summary })
}

/// Fails if an output file exists, unless it may be replaced. Fails in any case if it is an input.
pub fn check_outputs(options: &PrepareOptions) -> Result<(), DataError> {
    let outputs = OutputPaths::new(&options.out);
    let inputs: HashSet<PathBuf> =
        options.inputs.iter().filter_map(|input| input.path.canonicalize().ok()).collect();
    let tokenizer = OutputPaths::tokenizer(&options.out);
    for path in outputs.paths().into_iter().chain(tokenizer.iter().map(PathBuf::as_path)) {
        if path.canonicalize().is_ok_and(|path| inputs.contains(&path)) {
            return Err(DataError::file("write", path, "it is one of the inputs; choose another --out"));
        }
        if path.is_dir() {
            return Err(DataError::file("write", path, "it is a folder; choose another --out"));
        }
    }
    for path in outputs.paths() {
        if path.exists() && !options.overwrite {
            return Err(DataError::file(
                "write",
                path,
                "it exists; choose another --out, or add --overwrite",
            ));
        }
    }
    match options.out.parent() {
        Some(folder) if folder != Path::new("") => {
            fs::create_dir_all(folder).map_err(|error| DataError::file("create", folder, error))
        }
        _ => Ok(()),
    }
}

/// Fails if another tokenizer would be overwritten.
fn check_tokenizer(options: &PrepareOptions, tokenizer: &Tokenizer) -> Result<(), DataError> {
    for (path, bytes) in OutputPaths::tokenizer(&options.out).iter().zip(tokenizer.files()) {
        let other = input::bytes(path, input::MAX_WRITTEN_BY_PROGRAMS).is_ok_and(|there| there != bytes);
        if other && !options.overwrite {
            return Err(DataError::file(
                "write",
                path,
                "it is another tokenizer; choose another --out, or add --overwrite",
            ));
        }
    }
    Ok(())
}

/// Writes an encoded chunk.
fn append(encoded: &EncodedChunk, inputs: &[Input], writer: &mut TokenWriter) -> Result<(), DataError> {
    let separate = inputs[encoded.chunk.file].format != Format::Text;
    writer.append(&encoded.tokens, &encoded.lengths, separate)?;
    if encoded.chunk.ends { writer.end_document() } else { Ok(()) }
}

//! `kintsugi prepare`: text to token files.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args};
use kintsugi_data::prepare::{
    Input, PrepareOptions, PrepareProgress, PrepareSummary, TrainedTokenizer, check_outputs, prepare,
    train_tokenizer,
};
use kintsugi_data::{DEFAULT_SPLIT, Tokenizer, ValidationPart, without_suffix};
use kintsugi_spec::{Cause, units};

use crate::failure::Failure;
use crate::host;
use crate::output::Output;
use crate::progress::Progress;
use crate::signals::stop_on_signal;

/// Turns text into token files for training.
///
/// The files have Megatron's .bin/.idx format. PREFIX.bin, PREFIX.idx and PREFIX.meta.json are written completely or not
/// at all. Memory use does not grow with the text.
///
/// An input is a file, a folder (every .txt, .md, .jsonl, .ndjson, .json and .parquet file in it) or a quoted pattern
/// such as 'shards/*.jsonl.zst'. Text and JSON lines may be compressed with gzip, zstd, bzip2 or xz. A text file is one
/// document. In JSON lines and Parquet files, each line or row is a document, and --json-key names its text. The type
/// of a file is recognised by its first bytes; other types, such as PDF or UTF-16 text, are refused.
///
/// A line that is not a JSON object with that key, or not UTF-8, is skipped, counted, and reported with its file and
/// number; with --strict it ends the command. A file with more than 10 % of such lines also ends it, unless
/// --allow-bad-lines is given.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
#[command(group = ArgGroup::new("which").required(true).args(["tokenizer", "train_tokenizer"]))]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of the command")]
pub struct Arguments {
    /// Files, folders or quoted patterns
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<String>,
    /// Prefix of the files to write
    #[arg(long, value_name = "PREFIX")]
    out: PathBuf,
    /// A tokenizer.json, a folder with one or with vocab.json and merges.txt, or the word bytes
    #[arg(long, value_name = "FILE|FOLDER|bytes")]
    tokenizer: Option<String>,
    /// Trains a BPE tokenizer of N tokens on the text first, and uses it
    ///
    /// It is written to PREFIX.tokenizer.json.
    #[arg(long, value_name = "N")]
    train_tokenizer: Option<usize>,
    /// The key of the text in a JSON line, or the text column of a Parquet file
    #[arg(long, value_name = "KEY", default_value = "text")]
    json_key: String,
    /// Appends the tokenizer's end-of-document token to every document
    #[arg(long)]
    append_eod: bool,
    /// The token that --append-eod appends, if the tokenizer does not define one
    #[arg(long, value_name = "TOKEN", requires = "append_eod")]
    eod: Option<String>,
    /// Stops at the first bad line, and writes nothing
    #[arg(long)]
    strict: bool,
    /// Skips bad lines even if they are more than 10 % of a file
    #[arg(long, conflicts_with = "strict")]
    allow_bad_lines: bool,
    /// The share of the documents that is for validation, from 0 to 0.5
    ///
    /// A hash of their position draws them, and they are the last of the files. 0 keeps the order of the text.
    #[arg(long, value_name = "SHARE", default_value_t = DEFAULT_SPLIT, value_parser = share)]
    validation: f64,
    /// Replaces existing files
    #[arg(long)]
    overwrite: bool,
    /// Encoding threads; by default the number of cores
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: Option<u16>,
    /// Prints the summary as JSON, and nothing else to stdout
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi prepare book.txt --out data/book --train-tokenizer 8192 --append-eod
      a text of your own, and a tokenizer made for it
  kintsugi prepare 'shards/*.jsonl.zst' --out data/web --tokenizer llama/tokenizer.json --append-eod
      JSON lines with a Hugging Face tokenizer
  kintsugi train run.toml --set data.source=data/book
      train on it; without model.vocab and model.preset the vocabulary is that of the data";

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let output = Output { json: arguments.json };
    let mut options = options(arguments)?;
    check_outputs(&options)?;
    let tokenizer = match (arguments.train_tokenizer, &arguments.tokenizer) {
        (None, Some(name)) => Tokenizer::open(name)?,
        (vocab, _) => make_tokenizer(&options, vocab.expect("one of the two is required"), output)?,
    };
    options.end_of_document = end_of_document(arguments, &tokenizer)?;
    let stop = stop_on_signal()?;
    let (progress, begun) = (Progress::new("encoding", 0), Instant::now());
    let summary = prepare(&options, &tokenizer, |state| {
        progress.set(state.read, state.total, &message(state, begun.elapsed()));
        !stop.load(Ordering::Relaxed)
    });
    drop(progress);
    let summary = summary?;
    output.text(&conclusion(&summary))?;
    output.result(&summary)
}

/// Reads a share for validation.
fn share(text: &str) -> Result<f64, Cause> {
    let share = text.parse().ok().filter(|share| (0.0..=0.5).contains(share));
    share.ok_or_else(|| Cause::new("must be a number from 0 to 0.5"))
}

/// What a terminal shows beside the bar.
fn message(state: &PrepareProgress, elapsed: Duration) -> String {
    let speed = state.text as f64 / 1e6 / elapsed.as_secs_f64();
    let bad = if state.bad_lines > 0 { format!("  {} bad lines", state.bad_lines) } else { String::new() };
    format!("{} tokens  {speed:.1} MB/s{bad}", units::count(state.tokens as f64))
}

fn options(arguments: &Arguments) -> Result<PrepareOptions, Failure> {
    let cores = host::cores();
    Ok(PrepareOptions {
        inputs: Input::find(&arguments.inputs)?,
        out: without_suffix(&arguments.out),
        json_key: arguments.json_key.clone(),
        end_of_document: None,
        strict: arguments.strict,
        allow_bad_lines: arguments.allow_bad_lines,
        overwrite: arguments.overwrite,
        workers: arguments.workers.map_or(cores, usize::from),
        validation: arguments.validation,
    })
}

/// Trains a tokenizer on the text. It is written together with the tokens, so if anything fails, an older tokenizer
/// stays with its own tokens.
fn make_tokenizer(options: &PrepareOptions, vocab: usize, output: Output) -> Result<Tokenizer, Failure> {
    let mut path = options.out.clone().into_os_string();
    path.push(".tokenizer.json");
    let path = PathBuf::from(path);
    let name = path.display().to_string();
    if path.exists() && !options.overwrite {
        let reason = "it exists; use it with --tokenizer, or add --overwrite";
        return Err(Failure::mistake(format!("cannot write {name}: {reason}")));
    }
    let TrainedTokenizer { tokenizer, text } =
        train_tokenizer(&options.inputs, &options.json_key, vocab, &path)?;
    let (vocab, text) = (tokenizer.vocab(), units::bytes(text));
    output.text(&format!("tokenizer  {name}: {vocab} tokens, trained on {text} of text\n"))?;
    Ok(tokenizer)
}

/// The token to append to every document, if one was requested.
fn end_of_document(arguments: &Arguments, tokenizer: &Tokenizer) -> Result<Option<u32>, Failure> {
    if !arguments.append_eod {
        return Ok(None);
    }
    let found = match &arguments.eod {
        Some(word) => tokenizer.special(word).ok_or_else(|| format!("has no special token {word}")),
        None => tokenizer
            .end_of_document()
            .ok_or_else(|| "does not define an end-of-document token; choose one with --eod".to_owned()),
    };
    found.map(Some).map_err(|reason| Failure::mistake(format!("the tokenizer {} {reason}", tokenizer.name())))
}

fn conclusion(summary: &PrepareSummary) -> String {
    let PrepareSummary { files, text_bytes, documents, tokens, bad_lines, empty_documents, .. } = summary;
    let left_out = match (bad_lines, empty_documents) {
        (0, 0) => String::new(),
        (&bad, &empty) => {
            format!("skipped    {}, {}\n", counted(bad, "bad line"), counted(empty, "empty document"))
        }
    };
    let told = summary
        .bad
        .iter()
        .map(|bad| format!("  {}, {} {}: {}\n", bad.file.display(), bad.unit, bad.line, bad.reason));
    let untold = *bad_lines as usize - summary.bad.len();
    let more = if untold > 0 { format!("  … and {untold} more\n") } else { String::new() };
    format!(
        "text       {} in {}, {:.1} MB/s\n\
         tokens     {} in {}, {:.2} bytes each\n\
         validation {}\n\
         vocabulary {} ({}), stored as {}\n\
         {left_out}{}{more}\
         files      {}, {}\n",
        units::bytes(*text_bytes),
        counted(*files as u64, "file"),
        summary.mb_per_s,
        units::count(*tokens as f64),
        counted(*documents, "document"),
        *text_bytes as f64 / *tokens as f64,
        validation(summary),
        summary.vocab,
        summary.tokenizer,
        summary.token_type,
        told.collect::<String>(),
        summary.bin.display(),
        summary.idx.display(),
    )
}

/// Which tokens are for validation.
fn validation(summary: &PrepareSummary) -> String {
    match summary.validation {
        Some(ValidationPart { documents, tokens }) => {
            let share = 100.0 * tokens as f64 / summary.tokens as f64;
            format!(
                "{} drawn from all of the text, {share:.2} % of the tokens",
                counted(documents, "document")
            )
        }
        None => format!("the last {} % of the tokens; data.split sets another share", 100.0 * DEFAULT_SPLIT),
    }
}

fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

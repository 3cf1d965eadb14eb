//! Token files in Megatron's format: `PREFIX.bin` has the tokens, and `PREFIX.idx` the starts of sequences and documents. The
//! format is the same as that of Megatron-LM and GPT-NeoX.

mod file;
mod index;
mod info;
mod kind;
mod tables;
mod validation;
mod writer;

use std::path::{Path, PathBuf};

pub use file::TokenFile;
pub use info::{TokenFileInfo, ValidationPart};
pub use kind::TokenType;
pub use validation::DEFAULT_SPLIT;
pub use writer::TokenWriter;
pub(crate) use writer::{OutputPaths, PartialFile, write_whole};

/// The prefix of a path, which may have the suffix of either file.
pub fn without_suffix(prefix: &Path) -> PathBuf {
    match prefix.extension() {
        Some(suffix) if suffix == "bin" || suffix == "idx" => prefix.with_extension(""),
        _ => prefix.to_owned(),
    }
}

#[cfg(test)]
mod tests;

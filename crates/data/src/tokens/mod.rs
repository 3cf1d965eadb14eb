//! Token files in Megatron's format: `PREFIX.bin` holds tokens end to end, `PREFIX.idx` says where sequences and
//! documents begin. Files made by Megatron-LM or GPT-NeoX are read here, and ours there.

mod about;
mod file;
mod index;
mod kind;
mod tables;
mod writer;

use std::path::{Path, PathBuf};

pub use about::About;
pub use file::TokenFile;
pub use kind::TokenType;
pub use writer::TokenWriter;
pub(crate) use writer::{Outputs, Partial, write_whole};

/// The prefix that is meant, which may be written with the suffix of either file.
pub fn without_suffix(prefix: &Path) -> PathBuf {
    match prefix.extension() {
        Some(suffix) if suffix == "bin" || suffix == "idx" => prefix.with_extension(""),
        _ => prefix.to_owned(),
    }
}

#[cfg(test)]
mod tests;

//! Training data: preparing text as token files, datasets, and the sampler that distributes samples to replicas.
//!
//! A dataset returns one sample at a time, by index. Nothing in it depends on the layout of the ranks.
#![forbid(unsafe_code)]

mod batches;
mod blend;
mod corpus;
mod demo;
mod error;
mod guard;
mod packed;
mod permutation;
pub mod prepare;
mod random;
mod sampler;
#[cfg(test)]
mod testing;
mod text;
mod tokenizer;
mod tokens;

pub use batches::{BatchRange, write_batches};
pub use blend::Blend;
pub use demo::Demo;
pub use error::DataError;
pub use packed::{PackedBlend, PackedOptions};
pub use permutation::Permutation;
pub use random::RandomStream;
pub use sampler::{MicroBatch, Sampler};
pub use text::{StreamingDecoder, TextCodec};
pub use tokenizer::{Encoder, Tokenizer};
pub use tokens::{
    DEFAULT_SPLIT, TokenFile, TokenFileInfo, TokenType, TokenWriter, ValidationPart, without_suffix,
};

/// A part of a dataset. The two parts never share a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Training samples, in an order that depends on the seed.
    Train,
    /// Samples for evaluation only, always in the same order.
    Validation,
}

/// A source of the validation split.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationSource {
    /// Its name.
    pub name: String,
    /// Its weight in the mean over all sources.
    pub weight: f64,
    /// Number of samples; `None` if it is unlimited.
    pub samples: Option<u64>,
}

/// A source of samples, addressed by index.
pub trait Dataset: Send + Sync {
    /// Size of the vocabulary: every token is below it.
    fn vocab(&self) -> usize;

    /// The expected loss, in nats per token, of a perfect model over samples of `sequence` targets.
    ///
    /// `None` if it is unknown, as for natural text.
    fn floor(&self, sequence: usize) -> Option<f64>;

    /// The sources of the validation split. Its samples are those of the first source, then those of the second, and so on.
    fn validation(&self) -> Vec<ValidationSource> {
        vec![ValidationSource { name: String::new(), weight: 1.0, samples: None }]
    }

    /// How often the first `samples` training samples have gone through every source. Empty if the data have no end.
    fn epochs(&self, _samples: u64) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// Fills `out` with sample `index`: the inputs of the model, and one more token for the last target.
    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError>;

    /// Fills `out` with the start of each input's document in sample `index`, or 0 if the document began before the sample. A
    /// source without documents treats a sample as one document.
    fn starts(&self, _split: Split, _index: u64, out: &mut [u32]) -> Result<(), DataError> {
        out.fill(0);
        Ok(())
    }
}

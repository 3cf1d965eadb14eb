//! Where training tokens come from: text made into token files, datasets, and the sampler that deals them out to
//! replicas.
//!
//! A dataset answers for one sample at a time, by index; nothing here depends on the layout of the ranks.
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
pub use packed::{Packed, PackedOptions};
pub use permutation::Permutation;
pub use random::Stream;
pub use sampler::{MicroBatch, Sampler};
pub use text::{GrowingText, Text};
pub use tokenizer::{Encoder, Tokenizer};
pub use tokens::{About, TokenFile, TokenType, TokenWriter, without_suffix};

/// Which part of a dataset: the two never share a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// What the model is trained on, in an order by seed.
    Train,
    /// What it is only evaluated on, always in the same order.
    Validation,
}

/// A source of the validation split.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationPart {
    /// What it is called.
    pub name: String,
    /// Its weight in the mean over all sources.
    pub weight: f64,
    /// How many samples it has; `None` where they have no end.
    pub samples: Option<u64>,
}

/// A source of samples, addressed by index.
pub trait Dataset: Send + Sync {
    /// Number of different tokens; every token is below it.
    fn vocab(&self) -> usize;

    /// The expected loss, in nats per token, of a perfect model over samples of `sequence` targets.
    ///
    /// `None` where nobody knows it, as for any natural text.
    fn floor(&self, sequence: usize) -> Option<f64>;

    /// The sources of the validation split: its samples are those of the first, then those of the second, and so on.
    fn validation(&self) -> Vec<ValidationPart> {
        vec![ValidationPart { name: String::new(), weight: 1.0, samples: None }]
    }

    /// Fills `out` with sample `index`: as many inputs as the model sees, and one token more for the last target.
    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError>;

    /// Fills `out` with where the document of each input of sample `index` begins in the sample: 0 for one that began
    /// before it. A source that knows no documents has one to a sample.
    fn starts(&self, _split: Split, _index: u64, out: &mut [u32]) -> Result<(), DataError> {
        out.fill(0);
        Ok(())
    }
}

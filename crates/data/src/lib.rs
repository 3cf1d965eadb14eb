//! Where training tokens come from: datasets, and the sampler that deals them out to replicas.
//!
//! A dataset answers for one sample at a time, by index; nothing here depends on the layout of the ranks.
#![forbid(unsafe_code)]

mod demo;
mod random;
mod sampler;

pub use demo::Demo;
pub use random::Stream;
pub use sampler::Sampler;

/// Which part of a dataset: the two never share a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// What the model is trained on.
    Train,
    /// What it is only evaluated on.
    Validation,
}

/// A source of samples, addressed by index.
pub trait Dataset: Send + Sync {
    /// Number of different tokens; every token is below it.
    fn vocab(&self) -> usize;

    /// The expected loss, in nats per token, of a perfect model over samples of `sequence` targets.
    ///
    /// `None` where nobody knows it, as for any natural text.
    fn floor(&self, sequence: usize) -> Option<f64>;

    /// Fills `out` with sample `index`: as many inputs as the model sees, and one token more for the last target.
    fn sample(&self, split: Split, index: u64, out: &mut [u32]);
}

//! A rank's micro-batches, from the dataset.

use kintsugi_data::{Dataset, Sampler, Split};
use kintsugi_plan::Plan;
use kintsugi_rank::Source;

/// The samples of one replica, step by step.
pub(crate) struct Batches<'a> {
    dataset: &'a dyn Dataset,
    sampler: Sampler,
    split: Split,
    replica: usize,
    /// The step whose global batch is read.
    pub step: u64,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

impl<'a> Batches<'a> {
    pub fn new(plan: &Plan, dataset: &'a dyn Dataset, split: Split, replica: usize) -> Self {
        let sampler = Sampler::new(plan.batch.sequence, plan.batch.global, plan.batch.micro, plan.mesh.dp);
        Batches { dataset, sampler, split, replica, step: 0, tokens: Vec::new(), targets: Vec::new() }
    }
}

impl Source for Batches<'_> {
    fn batch(&mut self, micro: usize) -> Option<(&[u32], &[u32])> {
        let Batches { dataset, sampler, split, replica, step, tokens, targets } = self;
        sampler.batch(*dataset, *split, *step, *replica, micro, tokens, targets);
        Some((&self.tokens, &self.targets))
    }
}

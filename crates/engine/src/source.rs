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
    step: u64,
    /// The step whose first micro-batch is made already.
    ahead: Option<u64>,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

impl<'a> Batches<'a> {
    pub fn new(plan: &Plan, dataset: &'a dyn Dataset, split: Split, replica: usize) -> Self {
        let sampler = Sampler::new(plan.batch.sequence, plan.batch.global, plan.batch.micro, plan.mesh.dp);
        let (tokens, targets) = (Vec::new(), Vec::new());
        Batches { dataset, sampler, split, replica, step: 0, ahead: None, tokens, targets }
    }

    /// Reads the global batch of `step` from now on.
    pub fn begin(&mut self, step: u64) {
        self.step = step;
    }

    /// Makes the first micro-batch of `step` now, while the device is busy with the step before.
    pub fn prepare(&mut self, step: u64) {
        self.make(step, 0);
        self.ahead = Some(step);
    }

    fn make(&mut self, step: u64, micro: usize) {
        let Batches { dataset, sampler, split, replica, tokens, targets, .. } = self;
        sampler.batch(*dataset, *split, step, *replica, micro, tokens, targets);
    }
}

impl Source for Batches<'_> {
    fn batch(&mut self, micro: usize) -> Option<(&[u32], &[u32])> {
        let made = micro == 0 && self.ahead.take() == Some(self.step);
        if !made {
            self.make(self.step, micro);
        }
        Some((&self.tokens, &self.targets))
    }
}

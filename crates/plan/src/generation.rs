//! How prompts are dealt out for generation: to replicas, rounds, micro-batches and samples.
//!
//! Replicas take prompts in turn. A replica runs as many together as its pipeline has stages, times the samples of a
//! micro-batch; what is left goes into further rounds. Nothing that is generated depends on any of this.

use crate::{Plan, Sharding};

/// The prompts that one replica runs together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// Which prompts, by their place among all. Those of micro-batch 0 come first; the last may be short of some.
    pub prompts: Vec<usize>,
    /// Micro-batches: as many as keep the pipeline busy.
    pub micro_batches: usize,
    /// Samples of every micro-batch.
    pub samples: usize,
    /// New tokens of a sample in the first step: the longest prompt's.
    pub prompt: usize,
    /// Tokens of a sample that there must be room for.
    pub capacity: usize,
}

impl Plan {
    /// This plan for generation: every replica holds all weights of its ranks, for gathering them anew for every
    /// token would take longer than using them.
    #[must_use]
    pub fn for_generation(&self) -> Plan {
        let sharding = Sharding { weights: 1, gradients: 1, states: 1, ..self.sharding };
        Plan { sharding, sequence_parallel: false, ..self.clone() }
    }

    /// The rounds of a replica that continues its share of prompts of these `lengths` by up to `tokens` tokens.
    pub fn rounds(&self, replica: usize, lengths: &[usize], tokens: usize) -> Vec<Round> {
        let own: Vec<usize> = (replica..lengths.len()).step_by(self.mesh.dp).collect();
        own.chunks(self.mesh.pp * self.batch.micro)
            .map(|prompts| {
                let micro_batches = prompts.len().min(self.mesh.pp);
                let samples = prompts.len().div_ceil(micro_batches);
                let prompt = prompts.iter().map(|&i| lengths[i]).max().expect("a round has a prompt");
                // The last token that is chosen is never fed.
                let capacity = prompt + tokens.saturating_sub(1);
                Round { prompts: prompts.to_vec(), micro_batches, samples, prompt, capacity }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigSource;

    #[test]
    fn every_prompt_is_dealt_out_once_and_pipelines_are_filled() {
        let sets = ["parallel.tp=1", "parallel.pp=2", "parallel.dp=2", "batch.micro=2"];
        let plan = ConfigSource::demo().sets(sets).plan().unwrap();
        let lengths = [3, 9, 4, 1, 5, 9, 2, 6, 5, 3, 5];
        let rounds: Vec<Vec<Round>> = (0..2).map(|replica| plan.rounds(replica, &lengths, 10)).collect();
        let first = |prompts: &[usize], micro_batches, samples, prompt| Round {
            prompts: prompts.to_vec(),
            micro_batches,
            samples,
            prompt,
            capacity: prompt + 9,
        };
        assert_eq!(rounds[0], [first(&[0, 2, 4, 6], 2, 2, 5), first(&[8, 10], 2, 1, 5)]);
        assert_eq!(rounds[1], [first(&[1, 3, 5, 7], 2, 2, 9), first(&[9], 1, 1, 3)]);
        assert!(plan.rounds(1, &lengths[..1], 10).is_empty());
    }
}

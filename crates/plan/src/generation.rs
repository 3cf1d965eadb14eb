//! How prompts are distributed for generation: to replicas, rounds, micro-batches and samples.
//!
//! Replicas take prompts in turn. A replica runs as many at a time as its pipeline has stages, times the samples of a
//! micro-batch; further prompts run in later rounds. The generated text does not depend on this.

use crate::Plan;

/// The prompts that one replica runs at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// The indices of the prompts. Those of micro-batch 0 come first; the last micro-batch may have fewer.
    pub prompts: Vec<usize>,
    /// Micro-batches: as many as keep the pipeline busy.
    pub micro_batches: usize,
    /// Samples of every micro-batch.
    pub samples: usize,
    /// New tokens per sample in the first step: the length of the longest prompt.
    pub prompt: usize,
    /// Tokens per sample that the cache must hold.
    pub capacity: usize,
}

impl Plan {
    /// This plan for generation. Every replica holds all weights of its ranks, because gathering them for every token
    /// would take longer than using them.
    #[must_use]
    pub fn for_generation(&self) -> Plan {
        Plan { sharding: self.sharding.unsharded(), sequence_parallel: false, ..self.clone() }
    }

    /// The rounds of a replica that continues its share of prompts of these `lengths` by up to `tokens` tokens.
    pub fn rounds(&self, replica: usize, lengths: &[usize], tokens: usize) -> Vec<Round> {
        let own: Vec<usize> = (replica..lengths.len()).step_by(self.mesh.dp()).collect();
        own.chunks(self.mesh.pp() * self.batch.micro)
            .map(|prompts| {
                let micro_batches = prompts.len().min(self.mesh.pp());
                let samples = prompts.len().div_ceil(micro_batches);
                let prompt = prompts.iter().map(|&i| lengths[i]).max().expect("a round has a prompt");
                // The last chosen token is not fed to the model.
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

//! Silent corruption of memory: `run.checksum_every`.
//!
//! Every so many steps a rank takes checksums of its weights and states when they have been written, and again before the next update.
//! Nothing writes them in between, so a difference is an error of this rank's memory. Weights that several ranks hold are also compared
//! when they have been written. Errors in an owner's own update are not found: there is nothing to compare its result with.

use std::sync::{Mutex, PoisonError};

use kintsugi_comm::{Blame, RankFailure, World};
use kintsugi_rank::{Checksums, Rank, WeightChecksum};

use crate::RankError;

/// The weights of the ranks of this process, until all of them have come to the end of a step.
#[derive(Default)]
pub(crate) struct ChecksumBoard(Mutex<Vec<RankWeights>>);

/// The checksums of the weights of a rank.
type RankWeights = (usize, Vec<WeightChecksum>);

/// The checks of a rank.
pub(crate) struct CorruptionCheck<'a> {
    every: u64,
    /// Whether tp ranks compute the same bits.
    compares_parts: bool,
    board: &'a ChecksumBoard,
    /// The last step, from 1, and what it has written. `None` once it was checked.
    written: Option<(u64, Checksums)>,
    buffer: Vec<u8>,
}

impl<'a> CorruptionCheck<'a> {
    /// The checks of a rank, every so many steps; none if that is 0. If the run is not deterministic, parameters that every tp rank
    /// updates by itself may differ by rounding, and are not compared.
    pub fn new(every: u64, deterministic: bool, board: &'a ChecksumBoard) -> Self {
        CorruptionCheck { every, compares_parts: deterministic, board, written: None, buffer: Vec::new() }
    }

    /// Whether the next update must be preceded by [`CorruptionCheck::verify`].
    pub fn is_pending(&self) -> bool {
        self.written.is_some()
    }

    /// Checks before an update that weights and states are still what the last step has written.
    pub fn verify(&mut self, rank: &Rank) -> Result<(), RankError> {
        let Some((step, written)) = self.written.take() else { return Ok(()) };
        match written.difference(&rank.checksums(&mut self.buffer)) {
            None => Ok(()),
            Some(what) => Err(RankError::Corrupted { what, step }),
        }
    }

    /// After a step, counted from 1: takes the checksums, and compares the weights with those of the other ranks.
    pub fn record(
        &mut self,
        step: u64,
        number: usize,
        rank: &Rank,
        world: &dyn World,
    ) -> Result<(), RankError> {
        if self.every == 0 || !step.is_multiple_of(self.every) {
            return Ok(());
        }
        let written = rank.checksums(&mut self.buffer);
        let mut weights = written.weights.clone();
        weights.retain(|weights| weights.part.is_some() || self.compares_parts);
        self.written = Some((step, written));
        let Some(all) = self.board.add(number, weights, world)? else { return Ok(()) };
        match odd_one(&all) {
            None => Ok(()),
            Some(odd) => {
                let failure = odd.failure(step);
                world.abort(failure.clone());
                Err(failure.into())
            }
        }
    }
}

impl ChecksumBoard {
    /// Adds the weights of a rank. Whoever adds the last ones of the process of rank 0 gets those of all ranks.
    fn add(
        &self,
        number: usize,
        weights: Vec<WeightChecksum>,
        world: &dyn World,
    ) -> Result<Option<Vec<RankWeights>>, RankFailure> {
        let mine = {
            let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            board.push((number, weights));
            if board.len() < world.local_ranks().len() {
                return Ok(None);
            }
            std::mem::take(&mut *board)
        };
        let bytes = postcard::to_stdvec(&mine).expect("checksums have lengths that are known");
        let Some(processes) = world.gather(bytes)? else { return Ok(None) };
        let decode = |bytes: &Vec<u8>| {
            postcard::from_bytes::<Vec<RankWeights>>(bytes).expect("all processes run one version")
        };
        let mut all: Vec<RankWeights> = processes.iter().flat_map(decode).collect();
        // Ranks of a process add theirs in any order; the message does not depend on it.
        all.sort_by_key(|(rank, _)| *rank);
        Ok(Some(all))
    }
}

/// Ranks that should hold the same weights and do not.
#[derive(Debug, PartialEq, Eq)]
struct Odd {
    /// The rank that differs, or the first one.
    rank: usize,
    /// One that it differs from.
    other: usize,
    /// Whether most ranks agree with the other one, so that this one is the cause.
    is_cause: bool,
    what: String,
}

/// The first difference between ranks that should hold the same weights.
fn odd_one(all: &[RankWeights]) -> Option<Odd> {
    let weights = || all.iter().flat_map(|(rank, weights)| weights.iter().map(move |one| (*rank, one)));
    weights().find_map(|(_, first)| {
        let same: Vec<(usize, u64)> =
            weights().filter(|(_, one)| one.is_of_same(first)).map(|(rank, one)| (rank, one.sum)).collect();
        let votes = |sum: u64| same.iter().filter(|(_, other)| *other == sum).count();
        let most = same.iter().map(|(_, sum)| *sum).max_by_key(|sum| votes(*sum))?;
        let (rank, _) = *same.iter().find(|(_, sum)| *sum != most)?;
        let (other, _) = *same.iter().find(|(_, sum)| *sum == most)?;
        let what = format!("the weights of {}", first.unit);
        Some(Odd { rank, other, is_cause: 2 * votes(most) > same.len(), what })
    })
}

impl Odd {
    fn failure(self, step: u64) -> RankFailure {
        let Odd { rank, other, is_cause, what } = self;
        let (others, whose, blame) = if is_cause {
            (" and most others", "this rank", Blame::Rank)
        } else {
            ("", "one of them", Blame::Nobody)
        };
        let reason = format!(
            "after step {step} {what} differ from those of rank {other}{others}; the memory of {whose} is not sound"
        );
        RankFailure { peer: Some(other), blame, ..RankFailure::new(rank, "the end of a step", reason) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kintsugi_plan::Unit;
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_rank::{Elements, InitialWeights, Store, StoreError, StoredTensor};

    use super::*;
    use crate::{Job, JobError, MemoryChoice, run_job};

    /// Moments of layer 1 that have their lowest bit set, and zeros elsewhere.
    struct Flipped;

    impl Store for Flipped {
        fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
            let is_flipped = elements.parameter.unit == Unit::Layer(1);
            out.fill(if is_flipped { f32::from_bits(1) } else { 0.0 });
            Ok(())
        }
    }

    /// What four ranks find if `change` acts on each of them after the checksums were taken, and `before` does before that.
    fn check(
        sets: &[&str],
        before: impl Fn(usize, &Rank) + Sync,
        change: impl Fn(usize, &Rank) + Sync,
    ) -> Result<(), JobError> {
        let small =
            ["model.layers=2", "model.hidden=32", "model.heads=4", "batch.sequence=16", "parallel.pp=1"];
        let plan = ConfigSource::demo().sets(small.iter().chain(sets).copied()).plan().expect("a plan");
        let job = Job::new(Arc::new(plan), MemoryChoice::Heap);
        let board = ChecksumBoard::default();
        run_job(&job, |worker| {
            let (number, rank) = (worker.number, &worker.rank);
            rank.initialise(1);
            before(number, rank);
            let mut check = CorruptionCheck::new(2, true, &board);
            check.record(1, number, rank, &*worker.world)?;
            assert!(!check.is_pending(), "only every second step");
            check.record(2, number, rank, &*worker.world)?;
            change(number, rank);
            check.verify(rank)?;
            assert!(!check.is_pending());
            check.verify(rank)
        })
        .map(|_| ())
    }

    const LAYOUTS: [&[&str]; 4] = [
        &["parallel.tp=1", "parallel.dp=4", "sharding.zero=0"],
        &["parallel.tp=1", "parallel.dp=4", "sharding.zero=1", "precision.compute=bf16"],
        &["parallel.tp=2", "parallel.dp=2", "sharding.zero=3"],
        &["parallel.tp=4", "parallel.dp=1"],
    ];

    #[test]
    fn a_bit_that_changes_between_two_steps_names_its_rank_under_every_sharding() {
        for sets in LAYOUTS {
            check(sets, |_, _| {}, |_, _| {}).expect("nothing changes");
            let flip = |number: usize, rank: &Rank| {
                if number == 3 {
                    rank.load(&Flipped, &[StoredTensor::SecondMoment]).expect("it is no file");
                }
            };
            let found = check(sets, |_, _| {}, flip).expect_err("a bit has changed").to_string();
            assert!(found.starts_with("rank 3 failed in "), "{sets:?}: {found}");
            assert!(found.contains("the states of layer.1 are not those that step 2 has written"), "{found}");
            let other = |number: usize, rank: &Rank| {
                if number == 2 {
                    rank.load(&InitialWeights { seed: 2 }, &[StoredTensor::Weights]).expect("it is no file");
                }
            };
            let found = check(sets, |_, _| {}, other).expect_err("weights have changed").to_string();
            assert!(found.starts_with("rank 2 failed in ") && found.contains("the weights of "), "{found}");
        }
    }

    #[test]
    fn weights_that_differ_from_those_of_most_ranks_name_their_rank() {
        let other = |number: usize, rank: &Rank| {
            if number == 1 {
                rank.load(&InitialWeights { seed: 2 }, &[StoredTensor::Weights]).expect("it is no file");
            }
        };
        let found = |sets| match check(sets, other, |_, _| {}).expect_err("weights differ") {
            JobError::Failure(failure) => *failure,
            error => panic!("{error}"),
        };
        let most = found(LAYOUTS[0]);
        assert_eq!((most.rank, most.culprit()), (1, Some(1)), "{most}");
        let expected = "after step 2 the weights of table differ from those of rank 0 and most others; ";
        assert!(most.reason.starts_with(expected), "{most}");
        // Of two ranks, nobody knows which one is right. The parameters that every tp rank holds are compared over tp.
        let two = found(LAYOUTS[2]);
        assert_eq!(two.culprit(), None, "{two}");
        let replicated = found(LAYOUTS[3]);
        assert_eq!(replicated.culprit(), Some(1), "{replicated}");
    }
}

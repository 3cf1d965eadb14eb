//! Silent corruption of memory: `run.checksum_every`.
//!
//! Every so many steps a rank takes checksums when it has written something, and again when nothing has written it since then: of the
//! weights that it updates itself, before other ranks get them and at the end of the step; of its states and of all weights that it
//! holds, at the end of the step and before the next update. A difference is an error of this rank's memory, whatever others hold.
//!
//! Weights that several ranks hold are also compared at the end of the step. That accuses nobody: a rank passes a wrong value on, so
//! most ranks may hold it. Errors in an owner's own update are not found: there is nothing to compare its result with.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, PoisonError};

use kintsugi_comm::{Blame, RankFailure, World};
use kintsugi_plan::{Op, StepOp, Transfer, Unit};
use kintsugi_rank::{Rank, UnitChecksum, WeightChecksum};

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
    /// The running step, from 1.
    step: u64,
    /// What this rank has updated in the running step, before other ranks got it.
    updated: Option<Updated>,
    /// What the last step has left. `None` once it was checked.
    written: Option<Written>,
    buffer: Vec<u8>,
}

struct Updated {
    weights: Vec<UnitChecksum>,
    states: Vec<UnitChecksum>,
}

struct Written {
    step: u64,
    weights: Vec<WeightChecksum>,
    states: Vec<UnitChecksum>,
}

impl<'a> CorruptionCheck<'a> {
    /// The checks of a rank, every so many steps; none if that is 0. If the run is not deterministic, parameters that every tp rank
    /// updates by itself may differ by rounding, and are not compared.
    pub fn new(every: u64, deterministic: bool, board: &'a ChecksumBoard) -> Self {
        let (step, buffer) = (0, Vec::new());
        CorruptionCheck {
            every,
            compares_parts: deterministic,
            board,
            step,
            updated: None,
            written: None,
            buffer,
        }
    }

    /// A step begins, counted from 1. Returns whether it needs [`CorruptionCheck::before_op`].
    pub fn begin_step(&mut self, step: u64) -> bool {
        self.step = step;
        self.is_due() || self.written.is_some()
    }

    /// Whether what the running step writes is checked.
    fn is_due(&self) -> bool {
        self.every > 0 && self.step.is_multiple_of(self.every)
    }

    /// Before the update: whether weights and states are still those that the last step has left. Before the first transfer of updated
    /// weights: takes the checksums of what this rank has written.
    pub fn before_op(&mut self, rank: &Rank, op: &Op) -> Result<(), RankError> {
        if *op == Op::Step(StepOp::Update) {
            return self.verify(rank);
        }
        if matches!(op, Op::Start(Transfer::Refresh { .. })) && self.is_due() && self.updated.is_none() {
            let weights = rank.updated_checksums(&mut self.buffer);
            self.updated = Some(Updated { weights, states: rank.state_checksums(&mut self.buffer) });
        }
        Ok(())
    }

    fn verify(&mut self, rank: &Rank) -> Result<(), RankError> {
        let Some(Written { step, weights, states }) = self.written.take() else { return Ok(()) };
        let now = rank.weight_checksums(&mut self.buffer);
        if let Some((changed, _)) = weights.iter().zip(&now).find(|(one, now)| one != now) {
            return Err(RankError::Corrupted { what: format!("the weights of {}", changed.unit), step });
        }
        unchanged("states", &states, &rank.state_checksums(&mut self.buffer), step)
    }

    /// At the end of a step: takes the checksums of what it has left, and compares the weights with those of the other ranks.
    pub fn end_step(&mut self, number: usize, rank: &Rank, world: &dyn World) -> Result<(), RankError> {
        if !self.is_due() {
            return Ok(());
        }
        let step = self.step;
        let states = match self.updated.take() {
            Some(Updated { weights, states }) => {
                unchanged("weights", &weights, &rank.updated_checksums(&mut self.buffer), step)?;
                states
            }
            None => rank.state_checksums(&mut self.buffer),
        };
        let weights = rank.weight_checksums(&mut self.buffer);
        let mut compared = weights.clone();
        compared.retain(|weights| weights.part.is_some() || self.compares_parts);
        self.written = Some(Written { step, weights, states });
        let Some(all) = self.board.add(number, compared, world)? else { return Ok(()) };
        match first_difference(&all) {
            None => Ok(()),
            Some(found) => {
                let failure = found.failure(world.local_ranks().start, step);
                world.abort(failure.clone());
                Err(failure.into())
            }
        }
    }
}

/// Whether checksums of this rank are those that it took before.
fn unchanged(what: &str, before: &[UnitChecksum], now: &[UnitChecksum], step: u64) -> Result<(), RankError> {
    match before.iter().zip(now).find(|(before, now)| before != now) {
        None => Ok(()),
        Some((changed, _)) => {
            Err(RankError::Corrupted { what: format!("the {what} of {}", changed.unit), step })
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

/// Two ranks that should hold the same weights and do not.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    ranks: [usize; 2],
    unit: Unit,
}

/// The first difference between ranks that should hold the same weights.
fn first_difference(all: &[RankWeights]) -> Option<Difference> {
    let mut first_holders = BTreeMap::new();
    let mut weights = all.iter().flat_map(|(rank, weights)| weights.iter().map(move |one| (*rank, one)));
    weights.find_map(|(rank, one)| match first_holders.entry(one.key()) {
        Entry::Vacant(first) => {
            first.insert((rank, one.sum));
            None
        }
        Entry::Occupied(first) => {
            let (other, sum) = *first.get();
            (sum != one.sum).then_some(Difference { ranks: [other, rank], unit: one.unit })
        }
    })
}

impl Difference {
    /// The failure of the job, found by a rank.
    fn failure(self, found_by: usize, step: u64) -> RankFailure {
        let Difference { ranks: [one, other], unit } = self;
        let reason = format!(
            "after step {step} ranks {one} and {other} hold different weights of {unit}, and the checksums of what each has written \
             do not tell whose memory is not sound"
        );
        RankFailure { blame: Blame::Nobody, ..RankFailure::new(found_by, "the end of a step", reason) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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

    /// What happens to the memory of a rank.
    type Change<'a> = &'a (dyn Fn(usize, &Rank) + Sync);

    /// What four ranks find in a step with these changes: before its update, while the updated weights are gathered, and after the step.
    fn check(sets: &[&str], [before, meanwhile, after]: [Change; 3]) -> Result<(), JobError> {
        let small =
            ["model.layers=2", "model.hidden=32", "model.heads=4", "batch.sequence=16", "parallel.pp=1"];
        let plan = ConfigSource::demo().sets(small.iter().chain(sets).copied()).plan().expect("a plan");
        let job = Job::new(Arc::new(plan), MemoryChoice::Heap);
        let board = ChecksumBoard::default();
        run_job(&job, |worker| {
            let (number, rank) = (worker.number, &worker.rank);
            let ops = worker.program(&job.plan).ops;
            let refresh = ops.iter().find(|op| matches!(op, Op::Start(Transfer::Refresh { .. })));
            let update = Op::Step(StepOp::Update);
            rank.initialise(1);
            let mut check = CorruptionCheck::new(2, true, &board);
            assert!(!check.begin_step(1), "only every second step");
            check.before_op(rank, &update)?;
            check.end_step(number, rank, &*worker.world)?;
            assert!(check.begin_step(2));
            check.before_op(rank, &update)?;
            before(number, rank);
            refresh.map_or(Ok(()), |refresh| check.before_op(rank, refresh))?;
            meanwhile(number, rank);
            check.end_step(number, rank, &*worker.world)?;
            after(number, rank);
            assert!(check.begin_step(3));
            check.before_op(rank, &update)?;
            assert!(!check.begin_step(3), "it was checked");
            Ok(())
        })
        .map(|_| ())
    }

    fn nothing(_: usize, _: &Rank) {}

    /// The failure that such changes lead to.
    fn found(sets: &[&str], changes: [Change; 3]) -> RankFailure {
        match check(sets, changes).expect_err("memory has changed") {
            JobError::Failure(failure) => *failure,
            JobError::Rank { rank, source, .. } => RankFailure::new(rank, "", source.to_string()),
            error @ JobError::Thread(_) => panic!("{error}"),
        }
    }

    /// Other weights, or the right ones except for one element of the table.
    #[derive(Clone, Copy)]
    enum Wrong {
        All,
        First,
        Last,
    }

    impl Store for Wrong {
        fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
            let Elements { parameter, start, .. } = elements;
            let (seed, changed) = match self {
                Wrong::All => (2, None),
                Wrong::First => (1, Some(0)),
                Wrong::Last => (1, Some(parameter.valid_elements() - 1)),
            };
            InitialWeights { seed }.read(elements, out)?;
            let index = changed.filter(|_| parameter.unit == Unit::Table);
            let index = index.and_then(|element: usize| element.checked_sub(start));
            if let Some(element) = index.and_then(|index| out.get_mut(index)) {
                *element = 7.0;
            }
            Ok(())
        }
    }

    /// Gives these ranks wrong weights.
    fn wrong(ranks: &[usize], wrong: Wrong) -> impl Fn(usize, &Rank) + Sync {
        move |number, rank| {
            if ranks.contains(&number) {
                rank.load(&wrong, &[StoredTensor::Weights]).expect("it is no file");
            }
        }
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
            check(sets, [&nothing; 3]).expect("nothing changes");
            let flip = |number: usize, rank: &Rank| {
                if number == 3 {
                    rank.load(&Flipped, &[StoredTensor::SecondMoment]).expect("it is no file");
                }
            };
            let states = found(sets, [&nothing, &nothing, &flip]);
            assert_eq!(states.culprit(), Some(3), "{sets:?}: {states}");
            let expected = "the states of layer.1 are not those that step 2 has written";
            assert!(states.reason.starts_with(expected), "{states}");
            let weights = found(sets, [&nothing, &nothing, &wrong(&[2], Wrong::All)]);
            assert_eq!(weights.culprit(), Some(2), "{sets:?}: {weights}");
            assert!(weights.reason.starts_with("the weights of "), "{weights}");
        }
    }

    #[test]
    fn an_owner_whose_weights_change_while_they_are_gathered_names_itself_though_all_hold_the_same() {
        let sets = ["parallel.tp=1", "parallel.dp=4", "sharding.zero=1"];
        // The last element belongs to rank 3, and the others get what it has then.
        let failure = found(&sets, [&nothing, &wrong(&[0, 1, 2, 3], Wrong::Last), &nothing]);
        assert_eq!(failure.culprit(), Some(3), "{failure}");
        assert!(failure.reason.starts_with("the weights of table are not those that step 2"), "{failure}");
    }

    #[test]
    fn a_rank_that_passes_wrong_weights_on_does_not_make_their_owner_the_culprit() {
        let sets = ["parallel.tp=1", "parallel.dp=4", "sharding.zero=1"];
        // The first element belongs to rank 0. Rank 1 gets it, a bit changes there, and ranks 2 and 3 get it from rank 1.
        let failure = found(&sets, [&nothing, &wrong(&[1, 2, 3], Wrong::First), &nothing]);
        assert_eq!(failure.culprit(), None, "{failure}");
        let expected = "after step 2 ranks 0 and 1 hold different weights of table, ";
        assert!(failure.reason.starts_with(expected), "{failure}");
    }

    #[test]
    fn ranks_that_update_the_same_weights_and_differ_are_not_accused() {
        // Without an owner, and over tp.
        for (sets, rank) in [(LAYOUTS[0], 1), (LAYOUTS[2], 3), (LAYOUTS[3], 2)] {
            let failure = found(sets, [&wrong(&[rank], Wrong::All), &nothing, &nothing]);
            assert_eq!(failure.culprit(), None, "{failure}");
            assert!(failure.reason.contains(&format!("and {rank} hold different weights of ")), "{failure}");
        }
    }
}

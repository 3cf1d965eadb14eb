//! The ring at run time: each rank takes chunks out of its predecessor's memory.
//!
//! Rank `r` begins step `i` of [`crate::ring::step`] when rank `r − 1` has started the collective and finished `i`
//! steps, and it finishes the collective when rank `r + 1` has finished all steps. Why no chunk is read while it is
//! written, nor read too late, for rank `p` and its successor `r`, the only one that reads `p`'s memory:
//!
//! - *Reading after writing.* Within a phase `r` reads in step `i` the chunk that `p` wrote in step `i − 1`, or one
//!   that `p` does not write in this phase; `p` has finished step `i − 1` by then. The first chunk of the gather
//!   phase of an all-reduce is the one that `p` wrote in its last reduce step, and the same rule covers it.
//! - *Writing after reading.* Within a phase `p` writes each chunk at most once, and `r` reads it only later. Across
//!   the phases of an all-reduce over `n` ranks: `p` overwrites in step `n − 1 + s` the chunk that `r` reads in step
//!   `s`. Rank `p` begins step `t` when `p − 1` has finished `t` steps, so `p − 1` had begun step `t − 1` and `p − 2`
//!   finished `t − 1` steps, and so on: `p − k` has finished `t − k + 1`. With `k = n − 1`, which is `r`, and
//!   `t = n − 1 + s`, rank `r` has finished `s + 1` steps: step `s` is done.
//! - *Leaving.* When `p` leaves, `r` has taken all that it needs; `p`'s buffer is its own again.
//!
//! Finishing a step is posted under the board's lock, so "has finished" includes the memory it wrote.

use std::fmt;

use kintsugi_tensor::DType;

use super::ThreadsGroup;
use super::board::Posts;
use super::group::Activity;
use super::memory::Region;
use crate::{Collective, Communicator, ring};

/// A collective that is under way.
#[derive(Debug)]
pub(super) struct Round {
    /// Its number in the group.
    sequence: u64,
    kind: Kind,
    seats: Vec<Seat>,
    /// Members that are done with it.
    left: usize,
}

/// What all ranks have to agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    collective: Collective,
    len: usize,
    dtype: DType,
}

/// One member's part in a collective.
#[derive(Clone, Debug, Default)]
pub(super) struct Seat {
    /// Its memory, once it has started.
    region: Option<Region>,
    /// Whether it waits for it, or has waited.
    waits: bool,
    /// Steps that it has finished.
    steps: usize,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} of {} {:?}", self.collective.operation().name(), self.len, self.dtype)
    }
}

impl Posts {
    fn round(&mut self, sequence: u64) -> &mut Round {
        let round = self.rounds.iter_mut().find(|round| round.sequence == sequence);
        round.expect("a collective is waited for in the group that started it")
    }

    /// The round with this number, begun if this member is the first to come.
    fn enter(&mut self, sequence: u64, kind: Kind) -> &mut Round {
        if let Some(index) = self.rounds.iter().position(|round| round.sequence == sequence) {
            return &mut self.rounds[index];
        }
        let mut seats = self.spare.pop().unwrap_or_default();
        seats.clear();
        seats.resize(self.started.len(), Seat::default());
        self.rounds.push(Round { sequence, kind, seats, left: 0 });
        self.rounds.last_mut().expect("just pushed")
    }

    /// A member is done; the last one clears the round away.
    fn leave(&mut self, sequence: u64) {
        let members = self.started.len();
        let round = self.round(sequence);
        round.left += 1;
        if round.left == members {
            let index = self.rounds.iter().position(|round| round.sequence == sequence);
            let round = self.rounds.swap_remove(index.expect("found above"));
            self.spare.push(round.seats);
        }
    }
}

impl ThreadsGroup {
    /// Starts a collective: posts where this rank's elements are.
    pub(super) fn post_collective(&self, collective: Collective, region: Region) -> u64 {
        let kind = Kind { collective, len: region.len(), dtype: region.dtype() };
        assert!(
            collective == Collective::AllGather || region.dtype() != DType::U32,
            "{kind}: token ids are not summed"
        );
        let mut posts = self.board.lock();
        let sequence = posts.started[self.me];
        let during = self.collective(collective, sequence);
        self.assert_running(during);
        posts.started[self.me] += 1;
        let round = posts.enter(sequence, kind);
        if round.kind != kind {
            let reason = format!("it starts {kind}, another rank started {}", round.kind);
            drop(posts);
            self.fail(during, reason);
        }
        round.seats[self.me].region = Some(region);
        drop(posts);
        self.board.ring(self.successor());
        sequence
    }

    /// Runs this rank's part of the ring.
    pub(super) fn run_collective(&self, collective: Collective, sequence: u64, mine: Region) {
        self.take_seat(sequence, mine);
        let (size, predecessor) = (self.size(), self.predecessor());
        for index in 0..ring::step_count(collective, size) {
            let theirs = self.await_predecessor(collective, sequence, index);
            let step = ring::step(collective, size, self.me, index);
            let chunk = ring::chunk(mine.len(), size, step.chunk);
            let from = (self.global(predecessor), theirs.part(chunk.clone()));
            let to = (self.global(self.me), mine.part(chunk));
            self.carry(collective.operation(), step.action, from, to);
            self.finish_step(collective, sequence);
        }
        self.await_successor(collective, sequence);
        self.board.lock().leave(sequence);
    }

    fn take_seat(&self, sequence: u64, mine: Region) {
        let mut posts = self.board.lock();
        let seat = &mut posts.round(sequence).seats[self.me];
        assert_eq!(seat.region, Some(mine), "a collective is waited for in the group that started it");
        seat.waits = true;
    }

    /// Sleeps until the predecessor has what this rank takes in step `index`; gives its memory.
    fn await_predecessor(&self, collective: Collective, sequence: u64, index: usize) -> Region {
        let predecessor = self.predecessor();
        let ready = |posts: &mut Posts| {
            let seat = &posts.round(sequence).seats[predecessor];
            seat.region.filter(|_| seat.steps >= index)
        };
        let missing = |posts: &mut Posts| self.blame(posts.round(sequence), predecessor);
        self.sleep_until(self.collective(collective, sequence), ready, missing)
    }

    /// Sleeps until the successor has taken all that it takes from this rank.
    fn await_successor(&self, collective: Collective, sequence: u64) {
        let (successor, steps) = (self.successor(), ring::step_count(collective, self.size()));
        let ready = |posts: &mut Posts| (posts.round(sequence).seats[successor].steps == steps).then_some(());
        let missing = |posts: &mut Posts| self.blame(posts.round(sequence), successor);
        self.sleep_until(self.collective(collective, sequence), ready, missing);
    }

    fn finish_step(&self, collective: Collective, sequence: u64) {
        let steps = {
            let mut posts = self.board.lock();
            let seat = &mut posts.round(sequence).seats[self.me];
            seat.steps += 1;
            seat.steps
        };
        self.board.ring(self.successor());
        if steps == ring::step_count(collective, self.size()) {
            self.board.ring(self.predecessor());
        }
    }

    fn successor(&self) -> usize {
        (self.me + 1) % self.size()
    }

    fn predecessor(&self) -> usize {
        (self.me + self.size() - 1) % self.size()
    }

    fn collective(&self, collective: Collective, sequence: u64) -> Activity {
        Activity::Collective { group: self.board.name, collective, sequence }
    }

    /// Who keeps the others waiting: those who have not come, else the neighbour that is waited for.
    fn blame(&self, round: &Round, neighbour: usize) -> String {
        let ranks = |absent: fn(&Seat) -> bool| {
            let members = (0..self.size()).filter(|&member| absent(&round.seats[member]));
            members.map(|member| self.global(member).to_string()).collect::<Vec<_>>().join(", ")
        };
        let (not_started, not_waiting) = (ranks(|seat| seat.region.is_none()), ranks(|seat| !seat.waits));
        if !not_started.is_empty() {
            format!("not started by rank {not_started}")
        } else if !not_waiting.is_empty() {
            format!("started but not waited for by rank {not_waiting}")
        } else {
            let steps = ring::step_count(round.kind.collective, self.size());
            let done = round.seats[neighbour].steps;
            format!("rank {} has done {done} of {steps} steps", self.global(neighbour))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// For every rank the steps it has finished, and whether it is within the next one.
    type State = Vec<(usize, bool)>;

    /// The steps of `rank` that touch `chunk`, both the chunk it writes and the chunk it reads from its predecessor.
    fn steps_on(
        collective: Collective,
        ranks: usize,
        rank: usize,
        chunk: usize,
    ) -> impl Iterator<Item = usize> {
        let count = ring::step_count(collective, ranks);
        (0..count).filter(move |&index| ring::step(collective, ranks, rank, index).chunk == chunk)
    }

    /// Panics if `rank` may not begin its next step yet, though its predecessor has come far enough.
    ///
    /// The definition is the lockstep ring, where step `i` of every rank reads before any step `i` writes.
    fn assert_in_order(collective: Collective, state: &State, rank: usize) {
        let ranks = state.len();
        let (index, (predecessor, successor)) =
            (state[rank].0, ((rank + ranks - 1) % ranks, (rank + 1) % ranks));
        let chunk = ring::step(collective, ranks, rank, index).chunk;
        for step in steps_on(collective, ranks, predecessor, chunk).filter(|&step| step < index) {
            assert!(state[predecessor].0 > step, "{rank} reads {chunk} too early in {state:?}");
        }
        for step in steps_on(collective, ranks, predecessor, chunk).filter(|&step| step >= index) {
            assert!(state[predecessor] <= (step, false), "{rank} reads {chunk} too late in {state:?}");
        }
        for step in steps_on(collective, ranks, successor, chunk).filter(|&step| step <= index) {
            assert!(state[successor].0 > step, "{rank} overwrites {chunk} too early in {state:?}");
        }
    }

    #[test]
    fn no_interleaving_breaks_the_order_of_the_ring() {
        for (collective, ranks) in [
            (Collective::AllReduce, 2),
            (Collective::AllReduce, 3),
            (Collective::AllReduce, 4),
            (Collective::AllGather, 4),
            (Collective::ReduceScatter, 4),
        ] {
            let count = ring::step_count(collective, ranks);
            let mut seen = HashSet::new();
            let mut open: Vec<State> = vec![vec![(0, false); ranks]];
            while let Some(state) = open.pop() {
                if !seen.insert(state.clone()) {
                    continue;
                }
                for rank in 0..ranks {
                    let (steps, within) = state[rank];
                    let mut next = state.clone();
                    if within {
                        next[rank] = (steps + 1, false);
                    } else if steps < count && state[(rank + ranks - 1) % ranks].0 >= steps {
                        assert_in_order(collective, &state, rank);
                        next[rank] = (steps, true);
                    } else {
                        continue;
                    }
                    open.push(next);
                }
            }
            assert!(seen.contains(&vec![(count, false); ranks]), "{collective:?} over {ranks} can finish");
        }
    }
}

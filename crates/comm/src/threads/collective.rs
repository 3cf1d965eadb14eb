//! Runs the ring: each rank reads chunks from its predecessor's memory.
//!
//! Rank `r` begins step `i` of [`crate::ring::step`] when rank `r − 1` has started the collective and finished `i`
//! steps. It finishes the collective when rank `r + 1` has finished all steps. Only the successor `r` of rank `p` reads
//! `p`'s memory. It reads no chunk while `p` writes it, and none too late:
//!
//! - *Reading after writing.* Within a phase `r` reads in step `i` the chunk that `p` wrote in step `i − 1`, or one
//!   that `p` does not write in this phase; `p` has finished step `i − 1` by then. The first chunk of the gather
//!   phase of an all-reduce is the one that `p` wrote in its last reduce step, and the same rule covers it.
//! - *Writing after reading.* Within a phase `p` writes each chunk at most once, and `r` reads it only later. Across
//!   the phases of an all-reduce over `n` ranks: `p` overwrites in step `n − 1 + s` the chunk that `r` reads in step
//!   `s`. Rank `p` begins step `t` when `p − 1` has finished `t` steps, so `p − 1` had begun step `t − 1` and `p − 2`
//!   finished `t − 1` steps, and so on: `p − k` has finished `t − k + 1`. With `k = n − 1`, which is `r`, and
//!   `t = n − 1 + s`, rank `r` has finished `s + 1` steps: step `s` is done.
//! - *Leaving.* When `p` leaves, `r` has read all that it needs, so `p` may use its buffer again.
//!
//! A rank records a finished step under the group's mutex, so the memory that it wrote is visible to ranks that see the step
//! as finished.

use std::fmt;

use kintsugi_tensor::DType;

use super::ThreadsGroup;
use super::group_state::Transfers;
use crate::activity::Activity;
use crate::region::Region;
use crate::{Collective, Communicator, ring};

/// An active collective.
#[derive(Debug)]
pub(super) struct ActiveCollective {
    /// Its number in the group.
    sequence: u64,
    signature: Signature,
    /// The member that started it first.
    first: usize,
    members: Vec<MemberProgress>,
    /// Members that have finished.
    left: usize,
}

/// What all ranks of a collective must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signature {
    collective: Collective,
    len: usize,
    dtype: DType,
}

/// One member's progress in a collective.
#[derive(Clone, Debug, Default)]
pub(super) struct MemberProgress {
    /// Its memory, once it has started.
    region: Option<Region>,
    /// Whether it has started to wait.
    waits: bool,
    /// Whether it reads its predecessor's memory now.
    moving: bool,
    /// Finished steps.
    steps: usize,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} of {} {:?}", self.collective.operation().name(), self.len, self.dtype)
    }
}

impl Transfers {
    fn collective(&mut self, sequence: u64) -> &mut ActiveCollective {
        let active = self.collectives.iter_mut().find(|active| active.sequence == sequence);
        active.expect("a collective is waited for in the group that started it")
    }

    /// The collective with this number. The first member to start it adds it.
    fn join_collective(&mut self, sequence: u64, signature: Signature, me: usize) -> &mut ActiveCollective {
        if let Some(index) = self.collectives.iter().position(|active| active.sequence == sequence) {
            return &mut self.collectives[index];
        }
        let mut members = self.spare.pop().unwrap_or_default();
        members.clear();
        members.resize(self.started.len(), MemberProgress::default());
        self.collectives.push(ActiveCollective { sequence, signature, first: me, members, left: 0 });
        self.collectives.last_mut().expect("just pushed")
    }

    /// A member has finished. The last one removes the collective.
    fn leave_collective(&mut self, sequence: u64) {
        let members = self.started.len();
        let active = self.collective(sequence);
        active.left += 1;
        if active.left == members {
            let index = self.collectives.iter().position(|active| active.sequence == sequence);
            let active = self.collectives.swap_remove(index.expect("found above"));
            self.spare.push(active.members);
        }
    }
}

impl ThreadsGroup {
    /// Starts a collective: publishes the address of this rank's elements. After a failure it does nothing.
    pub(super) fn start_collective(&self, collective: Collective, region: Region) -> u64 {
        let signature = Signature { collective, len: region.len(), dtype: region.dtype() };
        assert!(
            collective == Collective::AllGather || region.dtype().is_float(),
            "{signature}: token ids and bytes are not summed"
        );
        let mut transfers = self.shared.lock();
        let sequence = transfers.started[self.me];
        transfers.started[self.me] += 1;
        if self.has_failed() {
            return sequence;
        }
        let active = transfers.join_collective(sequence, signature, self.me);
        if active.signature != signature {
            let (other, reason) =
                (active.first, format!("it starts {signature}, another rank started {}", active.signature));
            drop(transfers);
            self.fail(self.collective(collective, sequence), other, reason);
            return sequence;
        }
        active.members[self.me].region = Some(region);
        drop(transfers);
        self.shared.wake(self.successor());
        sequence
    }

    /// Runs this rank's part of the ring. Returns when no other rank uses this rank's elements, even after a failure.
    pub(super) fn run_collective(&self, collective: Collective, sequence: u64, mine: Region) {
        if self.run_ring(collective, sequence, mine).is_none() {
            let successor = self.successor();
            self.leave_after_failure(|transfers| {
                let mut active = transfers.collectives.iter();
                !active.any(|active| active.sequence == sequence && active.members[successor].moving)
            });
        }
    }

    /// `None` if the world stops.
    fn run_ring(&self, collective: Collective, sequence: u64, mine: Region) -> Option<()> {
        self.begin_wait(sequence, mine)?;
        let (size, predecessor) = (self.size(), self.predecessor());
        for index in 0..ring::step_count(collective, size) {
            let theirs = self.await_predecessor(collective, sequence, index)?;
            let moving = Moving { group: self, sequence };
            let step = ring::step(collective, size, self.me, index);
            let chunk = ring::chunk(mine.len(), size, step.chunk);
            let from = (self.global(predecessor), theirs.part(chunk.clone()));
            let to = (self.global(self.me), mine.part(chunk));
            self.move_elements(collective.operation(), step.action, from, to);
            // A finished step ends the move, too.
            std::mem::forget(moving);
            self.finish_step(collective, sequence);
        }
        self.await_successor(collective, sequence)?;
        self.shared.lock().leave_collective(sequence);
        Some(())
    }

    fn begin_wait(&self, sequence: u64, mine: Region) -> Option<()> {
        let mut transfers = self.shared.lock();
        if self.has_failed() {
            return None;
        }
        let member = &mut transfers.collective(sequence).members[self.me];
        assert_eq!(member.region, Some(mine), "a collective is waited for in the group that started it");
        member.waits = true;
        Some(())
    }

    /// Waits until the predecessor is ready for this rank's step `index`. Returns the predecessor's memory, and marks that this
    /// rank moves it.
    fn await_predecessor(&self, collective: Collective, sequence: u64, index: usize) -> Option<Region> {
        let predecessor = self.predecessor();
        let ready = |transfers: &mut Transfers| {
            let members = &mut transfers.collective(sequence).members;
            let member = &members[predecessor];
            let theirs = member.region.filter(|_| member.steps >= index)?;
            members[self.me].moving = true;
            Some(theirs)
        };
        let missing =
            |transfers: &mut Transfers| self.missing_ranks(transfers.collective(sequence), predecessor);
        self.sleep_until(self.collective(collective, sequence), ready, missing)
    }

    /// Waits until the successor has read all that it needs from this rank.
    fn await_successor(&self, collective: Collective, sequence: u64) -> Option<()> {
        let (successor, steps) = (self.successor(), ring::step_count(collective, self.size()));
        let ready = |transfers: &mut Transfers| {
            (transfers.collective(sequence).members[successor].steps == steps).then_some(())
        };
        let missing =
            |transfers: &mut Transfers| self.missing_ranks(transfers.collective(sequence), successor);
        self.sleep_until(self.collective(collective, sequence), ready, missing)
    }

    fn finish_step(&self, collective: Collective, sequence: u64) {
        let steps = {
            let mut transfers = self.shared.lock();
            let member = &mut transfers.collective(sequence).members[self.me];
            member.steps += 1;
            member.moving = false;
            member.steps
        };
        self.shared.wake(self.successor());
        if steps == ring::step_count(collective, self.size()) {
            self.shared.wake(self.predecessor());
        }
    }

    fn successor(&self) -> usize {
        (self.me + 1) % self.size()
    }

    fn predecessor(&self) -> usize {
        (self.me + self.size() - 1) % self.size()
    }

    fn collective(&self, collective: Collective, sequence: u64) -> Activity {
        Activity::Collective { group: self.shared.group, collective, sequence }
    }

    /// Describes which ranks the others wait for: those that have not started or waited, or else the neighbour. The first of
    /// them is returned, too.
    fn missing_ranks(&self, active: &ActiveCollective, neighbour: usize) -> (usize, String) {
        let members = |absent: fn(&MemberProgress) -> bool| -> Vec<usize> {
            (0..self.size()).filter(|&member| absent(&active.members[member])).collect()
        };
        let names = |members: &[usize]| {
            members.iter().map(|&member| self.global(member).to_string()).collect::<Vec<_>>().join(", ")
        };
        let (not_started, not_waiting) =
            (members(|member| member.region.is_none()), members(|member| !member.waits));
        if let Some(&first) = not_started.first() {
            (first, format!("not started by rank {}", names(&not_started)))
        } else if let Some(&first) = not_waiting.first() {
            (first, format!("started but not waited for by rank {}", names(&not_waiting)))
        } else {
            let steps = ring::step_count(active.signature.collective, self.size());
            let done = active.members[neighbour].steps;
            (neighbour, format!("rank {} has done {done} of {steps} steps", self.global(neighbour)))
        }
    }
}

/// Ends a move of this rank if it panics, so that the owner of the memory does not wait for it for ever.
struct Moving<'a> {
    group: &'a ThreadsGroup,
    sequence: u64,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.group.shared.lock().collective(self.sequence).members[self.group.me].moving = false;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// For every rank: the steps that it has finished, and whether it is in the next one.
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

    /// Panics if `rank` must not begin its next step yet, although its predecessor is far enough.
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

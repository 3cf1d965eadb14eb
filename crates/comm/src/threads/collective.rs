//! Runs the ring: each rank, or its progress thread, reads chunks from its predecessor's memory.
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
//! An all-to-all is no ring: in step `i` of [`crate::all_to_all`], rank `r` reads from rank `r − i`, as soon as that has started.
//! Chunks that are sent are never written, and chunks that are received are read by nobody, so the order does not matter. A
//! rank leaves when all others have read from it. On emulated links all its chunks are under way at once.
//!
//! A rank records a finished step under the group's mutex, so the memory that it wrote is visible to ranks that see the step
//! as finished.

use std::time::Instant;
use std::{fmt, mem};

use kintsugi_tensor::{AddressSpace, DType};

use super::group::{Member, Next, move_within};
use super::group_state::Transfers;
use super::shared_gpu::SharedGpu;
use crate::activity::Activity;
use crate::region::Region;
use crate::ring::Action;
use crate::{Collective, all_to_all, ring};

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
    /// Whether the rank waits for it.
    waits: bool,
    /// Whether the rank or its progress thread runs a step now.
    moving: bool,
    /// When the data of the current step arrives, if it is on an emulated link. After the last step, when the last data arrives.
    arrival: Option<Instant>,
    /// Finished steps. The last one is finished when its data is copied: nobody reads the other rank's memory any more.
    steps: usize,
    /// When it could begin its current step of a ring: when it started, or when the data of the step before was there.
    ready: Option<Instant>,
    /// The same for the step before.
    ready_before: Option<Instant>,
}

/// What a member does next in a collective.
#[derive(Clone, Copy, Debug)]
enum Work {
    /// Moves a chunk from another rank's memory to its own.
    Move { step: usize, theirs: Region, mine: Region, ready: Instant },
    /// Finishes a step whose data has arrived.
    FinishStep,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} of {} {:?}", self.collective.operation().name(), self.len, self.dtype)
    }
}

impl MemberProgress {
    /// After a move: the data is there, or is on an emulated link until `arrival`. After a wait for such data: it is there.
    fn advance_ring(&mut self, arrival: Option<Instant>, is_last_step: bool) {
        let there = arrival.or(self.arrival);
        self.arrival = arrival;
        if arrival.is_none() || is_last_step {
            self.steps += 1;
            self.ready_before = self.ready.replace(there.unwrap_or_else(Instant::now));
        }
    }
}

impl ActiveCollective {
    fn step_count(&self) -> usize {
        if self.is_all_to_all() {
            return self.members.len();
        }
        ring::step_count(self.signature.collective, self.members.len())
    }

    fn is_all_to_all(&self) -> bool {
        self.signature.collective == Collective::AllToAll
    }

    /// The member that `member` reads from in its next step.
    fn source(&self, member: usize) -> usize {
        let ranks = self.members.len();
        if self.is_all_to_all() {
            return all_to_all::source(ranks, member, self.members[member].steps);
        }
        (member + ranks - 1) % ranks
    }

    /// A member that still has to read `me`'s elements.
    fn reader(&self, me: usize) -> Option<usize> {
        let ranks = self.members.len();
        if self.is_all_to_all() {
            let has_read =
                |member: usize| self.members[member].steps > all_to_all::step_from(ranks, member, me);
            return (0..ranks).find(|&member| !has_read(member));
        }
        Some((me + 1) % ranks).filter(|&successor| self.members[successor].steps < self.step_count())
    }

    /// Takes the next work of a member; `None` if it has finished all steps. Whoever takes it does it.
    fn take_work(&mut self, me: usize) -> Next<Option<Work>> {
        let next = self.next_work(me);
        if let Next::Now(Some(_)) = next {
            self.members[me].moving = true;
        }
        next
    }

    fn next_work(&self, me: usize) -> Next<Option<Work>> {
        let member = &self.members[me];
        if member.steps == self.step_count() {
            return match member.arrival {
                Some(arrival) if arrival > Instant::now() => Next::At(arrival),
                _ => Next::Now(None),
            };
        }
        let (source, arrival) =
            (&self.members[self.source(me)], member.arrival.filter(|_| !self.is_all_to_all()));
        let may_read = self.is_all_to_all() || source.steps >= member.steps;
        match (arrival, member.region, source.region) {
            _ if member.moving => Next::AfterOthers,
            (Some(arrival), ..) if arrival > Instant::now() => Next::At(arrival),
            (Some(_), ..) => Next::Now(Some(Work::FinishStep)),
            (None, Some(mine), Some(theirs)) if may_read => {
                // A source that is further ahead had the data no later than `ready_before`.
                let is_ahead = !self.is_all_to_all() && source.steps > member.steps;
                let theirs_ready = if is_ahead { source.ready_before } else { source.ready };
                let ready = member.ready.max(theirs_ready).expect("both have started");
                Next::Now(Some(Work::Move { step: member.steps, theirs, mine, ready }))
            }
            _ => Next::AfterOthers,
        }
    }

    fn can_go_on(&self, member: usize) -> bool {
        matches!(self.next_work(member), Next::Now(Some(_)))
    }

    /// The members that can go on now that `started` has started, and whether each waits.
    fn to_wake_at_start(&self, started: usize) -> impl Iterator<Item = (usize, bool)> {
        let others = (0..self.members.len()).filter(move |&member| member != started);
        let reading = others.filter(move |&member| self.source(member) == started && self.can_go_on(member));
        reading.map(|member| (member, self.members[member].waits))
    }

    /// Who can go on after a step of `changed`, and whether each waits: its successor, its predecessor if that only waits for
    /// `changed` to finish, and `changed` itself. In an all-to-all, the member that `changed` has read from may only wait for that.
    /// A rank that waits runs its own steps, so its progress thread wakes it.
    fn to_wake(&self, changed: usize) -> [Option<(usize, bool)>; 3] {
        let ranks = self.members.len();
        let can_go_on = |member: usize| self.can_go_on(member);
        let waits = |member: usize| self.members[member].waits;
        if self.is_all_to_all() {
            let last = all_to_all::source(ranks, changed, self.members[changed].steps.saturating_sub(1));
            return [waits(last).then_some((last, true)), waits(changed).then_some((changed, true)), None];
        }
        let (successor, predecessor) = ((changed + 1) % ranks, (changed + ranks - 1) % ranks);
        let finished = self.members[changed].steps == self.step_count();
        [
            can_go_on(successor).then(|| (successor, waits(successor))),
            (finished && waits(predecessor)).then_some((predecessor, true)),
            waits(changed).then_some((changed, true)),
        ]
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

impl Member {
    /// Starts a collective: publishes the address of this rank's elements. After a failure it does nothing. `waits` says that
    /// the rank waits for it at once.
    pub(super) fn start_collective(&self, collective: Collective, region: Region, waits: bool) -> u64 {
        let signature = Signature { collective, len: region.len(), dtype: region.dtype() };
        assert!(
            !collective.sums() || region.dtype().is_float(),
            "{signature}: token ids and bytes are not summed"
        );
        if collective == Collective::AllToAll {
            all_to_all::chunk_len(region.len(), self.size());
        }
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
        let ready = Some(Instant::now());
        active.members[self.me] =
            MemberProgress { region: Some(region), waits, ready, ..MemberProgress::default() };
        for (member, waits) in active.to_wake_at_start(self.me) {
            self.wake(member, waits);
        }
        let can_step = active.can_go_on(self.me);
        drop(transfers);
        if can_step && !waits {
            self.wake(self.me, false);
        }
        sequence
    }

    /// Runs this rank's part of a collective. Returns when no other rank uses this rank's elements, even after a failure.
    pub(super) fn run_collective(
        &self,
        collective: Collective,
        sequence: u64,
        mine: Region,
        gpu: Option<&SharedGpu>,
    ) {
        if self.run_steps(collective, sequence, mine, gpu).is_none() {
            let successor = (self.me + 1) % self.size();
            self.leave_after_failure(|transfers| {
                let mut active = transfers.collectives.iter();
                !active.any(|active| {
                    let uses = |user: usize| active.is_all_to_all() || user == self.me || user == successor;
                    let mut members = active.members.iter().enumerate();
                    active.sequence == sequence && members.any(|(user, member)| member.moving && uses(user))
                })
            });
        }
    }

    /// `None` if the world stops.
    fn run_steps(
        &self,
        collective: Collective,
        sequence: u64,
        mine: Region,
        gpu: Option<&SharedGpu>,
    ) -> Option<()> {
        self.begin_wait(sequence, mine)?;
        let during = self.collective(collective, sequence);
        let ready = |transfers: &mut Transfers| {
            let active = transfers.collective(sequence);
            match active.take_work(self.me) {
                // Another rank still reads this rank's elements.
                Next::Now(None) if active.reader(self.me).is_some() => Next::AfterOthers,
                next => next,
            }
        };
        let missing = |transfers: &mut Transfers| self.missing_rank(transfers.collective(sequence));
        let describe = |transfers: &mut Transfers| self.describe_missing(transfers.collective(sequence));
        while let Some(work) = self.sleep_until(during, ready, missing, describe)? {
            self.perform_step(collective, sequence, work, gpu);
        }
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

    /// Advances the collectives that this rank does not wait for. Returns when the next data arrives, if it is on an emulated
    /// link.
    pub(super) fn advance_collectives(&self) -> Option<Instant> {
        loop {
            let mut arrival = None;
            let mut transfers = self.shared.lock();
            if self.has_failed() {
                return None;
            }
            let mut found = None;
            let unfinished = |active: &&mut ActiveCollective| {
                let member = &active.members[self.me];
                !member.waits && member.steps < active.step_count()
            };
            for active in transfers.collectives.iter_mut().filter(|active| unfinished(active)) {
                match active.take_work(self.me) {
                    Next::Now(Some(work)) => {
                        found = Some((active.signature.collective, active.sequence, work));
                        break;
                    }
                    Next::At(next) => arrival = [arrival, Some(next)].into_iter().flatten().min(),
                    Next::Now(None) | Next::AfterOthers => {}
                }
            }
            drop(transfers);
            match found {
                Some((collective, sequence, work)) => self.perform_step(collective, sequence, work, None),
                None => return arrival,
            }
        }
    }

    /// Does what [`ActiveCollective::take_work`] returned.
    fn perform_step(&self, collective: Collective, sequence: u64, work: Work, gpu: Option<&SharedGpu>) {
        let moving = Moving { member: self, sequence };
        let arrival = match work {
            Work::FinishStep => None,
            Work::Move { step, theirs, mine, ready } if collective == Collective::AllToAll => {
                self.all_to_all_step(step, theirs, mine, ready, gpu)
            }
            Work::Move { step, theirs, mine, ready } => {
                let step = ring::step(collective, self.size(), self.me, step);
                let chunk = ring::chunk(mine.len(), self.size(), step.chunk);
                let predecessor = (self.me + self.size() - 1) % self.size();
                let (from, to) = ((predecessor, theirs.part(chunk.clone())), (self.me, mine.part(chunk)));
                self.move_elements(collective.operation(), step.action, from, to, ready, gpu)
            }
        };
        // What follows ends the move, too.
        mem::forget(moving);
        let to_wake = {
            let mut transfers = self.shared.lock();
            let active = transfers.collective(sequence);
            let steps = active.step_count();
            let member = &mut active.members[self.me];
            member.moving = false;
            if collective == Collective::AllToAll {
                member.arrival = member.arrival.max(arrival);
                member.steps += 1;
            } else {
                member.advance_ring(arrival, member.steps + 1 == steps);
            }
            active.to_wake(self.me)
        };
        self.wake_all_of(to_wake);
    }

    /// Copies a chunk of an all-to-all. Returns when it arrives, if it is on an emulated link.
    fn all_to_all_step(
        &self,
        step: usize,
        theirs: Region,
        mine: Region,
        ready: Instant,
        gpu: Option<&SharedGpu>,
    ) -> Option<Instant> {
        let source = all_to_all::source(self.size(), self.me, step);
        let from = theirs.part(all_to_all::sent(mine.len(), self.size(), self.me));
        let to = mine.part(all_to_all::received(mine.len(), self.size(), source));
        if source == self.me {
            move_within(Action::Copy, from, to, gpu);
            return None;
        }
        let operation = Collective::AllToAll.operation();
        self.move_elements(operation, Action::Copy, (source, from), (self.me, to), ready, gpu)
    }

    fn wake_all_of(&self, members: [Option<(usize, bool)>; 3]) {
        for (member, waits) in members.into_iter().flatten() {
            self.wake(member, waits);
        }
    }

    fn collective(&self, collective: Collective, sequence: u64) -> Activity {
        Activity::Collective { group: self.shared.group, collective, sequence }
    }

    /// The rank that this rank waits for: the first that has not started, or that is on a GPU and does not wait, or else the
    /// neighbour.
    fn missing_rank(&self, active: &ActiveCollective) -> usize {
        let first = |is_absent: fn(&MemberProgress) -> bool| {
            (0..self.size()).find(|&member| is_absent(&active.members[member]))
        };
        let is_done = active.members[self.me].steps == active.step_count();
        let neighbour = || active.reader(self.me).filter(|_| is_done).unwrap_or(active.source(self.me));
        first(has_not_started).or_else(|| first(does_not_wait)).unwrap_or_else(neighbour)
    }

    /// What the ranks that this rank waits for have not done.
    fn describe_missing(&self, active: &ActiveCollective) -> String {
        let names = |is_absent: fn(&MemberProgress) -> bool| {
            let absent = (0..self.size()).filter(|&member| is_absent(&active.members[member]));
            absent.map(|member| self.global(member).to_string()).collect::<Vec<_>>().join(", ")
        };
        let missing = self.missing_rank(active);
        let member = &active.members[missing];
        if has_not_started(member) {
            format!("not started by rank {}", names(has_not_started))
        } else if does_not_wait(member) {
            format!("started but not waited for by rank {}", names(does_not_wait))
        } else {
            let (done, steps) = (member.steps, active.step_count());
            format!("rank {} has done {done} of {steps} steps", self.global(missing))
        }
    }
}

fn has_not_started(member: &MemberProgress) -> bool {
    member.region.is_none()
}

/// Whether a member does not wait for elements on a GPU, where only its rank moves them.
fn does_not_wait(member: &MemberProgress) -> bool {
    !member.waits && on_gpu(member)
}

/// Whether a member's elements are on a GPU, where its progress thread does not move them.
fn on_gpu(member: &MemberProgress) -> bool {
    member.region.is_some_and(|region| region.address_space() == AddressSpace::Device)
}

/// Ends a move if it panics, so that the owner of the memory does not wait for it for ever.
struct Moving<'a> {
    member: &'a Member,
    sequence: u64,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.member.shared.lock().collective(self.sequence).members[self.member.me].moving = false;
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

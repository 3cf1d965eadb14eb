//! Many transfers at once, in several groups, in random programs.

use std::collections::VecDeque;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use kintsugi_spec::{EmulatedLink, EmulatedLinks, Group, Level, Topology};
use kintsugi_tensor::{Buffer, DType};
use proptest::prelude::*;

use super::{HALF, HOUR, TestBuffers, run};
use crate::ring::chunk;
use crate::threads::group_state::PREALLOCATED;
use crate::threads::{ThreadsGroup, ThreadsWorld};
use crate::{Collective, Communicator, Pending};

/// Packages and nodes of two ranks.
const TOPOLOGY: Topology = Topology { per_package: 1, per_node: Some(2), nodes_per_pod: Some(2) };

/// Small integers: sums over six ranks are exact in every type.
fn value(rank: usize, index: usize) -> f64 {
    ((7 * rank + 3 * index) % 31) as f64
}

/// What rank `me` must have in element `index` of a collective that started from [`value`]; `None` if undefined.
fn expected(collective: Collective, len: usize, ranks: usize, me: usize, index: usize) -> Option<f64> {
    let owner = (0..ranks).find(|&rank| chunk(len, ranks, rank).contains(&index)).expect("within `len`");
    let sum = || (0..ranks).map(|rank| value(rank, index)).sum();
    match collective {
        Collective::AllReduce => Some(sum()),
        Collective::AllGather => Some(value(owner, index)),
        Collective::ReduceScatter => (owner == me).then(sum),
        Collective::AllToAll if index < len / 2 => Some(value(me, index)),
        Collective::AllToAll => {
            let chunk = len / 2 / ranks;
            let (from, offset) = ((index - len / 2) / chunk, index % chunk);
            Some(value(from, me * chunk + offset))
        }
    }
}

/// The elements of a collective: an all-to-all needs two halves of equal chunks.
fn rounded(collective: Collective, len: usize, ranks: usize) -> usize {
    if collective == Collective::AllToAll { len.next_multiple_of(2 * ranks) } else { len }
}

/// What rank `me` starts a collective from: for a gather only its own chunk is filled.
fn input(collective: Collective, len: usize, ranks: usize, me: usize) -> Vec<f64> {
    let own = chunk(len, ranks, me);
    let filled = |index| collective != Collective::AllGather || own.contains(&index);
    (0..len).map(|index| if filled(index) { value(me, index) } else { 99.0 }).collect()
}

/// What all ranks of a group do together.
#[derive(Clone, Copy, Debug)]
enum Action {
    Collective(Collective),
    /// Everybody sends to the next rank and receives from the previous one.
    Shift,
}

/// One line of a program, run by all ranks.
#[derive(Clone, Copy, Debug)]
struct Line {
    action: Action,
    group: usize,
    len: usize,
    dtype: DType,
}

/// A started line: how to check what comes back, beside it.
struct Started<'a> {
    line: Line,
    group: &'a ThreadsGroup,
    pending: Vec<Pending>,
}

impl<'a> Started<'a> {
    fn new(line: Line, group: &'a ThreadsGroup) -> Self {
        let (size, me, buffers) = (group.size(), group.rank(), TestBuffers::new());
        let pending = match line.action {
            Action::Collective(collective) => {
                let len = rounded(collective, line.len, size);
                let values = input(collective, len, size, me);
                vec![group.start(collective, buffers.buffer(&values, line.dtype), 0..len)]
            }
            Action::Shift if size == 1 => Vec::new(),
            Action::Shift => {
                let buffer = |x: usize| buffers.buffer(&vec![x as f64; line.len], line.dtype);
                let sent = group.send((me + 1) % size, 0, buffer(me));
                vec![sent, group.receive((me + size - 1) % size, 0, buffer(99))]
            }
        };
        Started { line, group, pending }
    }

    fn finish(self) {
        let Started { line, group, pending } = self;
        let (size, me) = (group.size(), group.rank());
        let buffers: Vec<Buffer> = pending.into_iter().map(|pending| group.wait(pending)).collect();
        let Some(values) = buffers.last().map(TestBuffers::values) else { return };
        for (index, &value) in values.iter().enumerate() {
            let expected = match line.action {
                Action::Collective(collective) => expected(collective, values.len(), size, me, index),
                Action::Shift => Some(((me + size - 1) % size) as f64),
            };
            assert!(
                expected.is_none_or(|expected| expected == value),
                "{line:?}: {value} at {index} of {me}"
            );
        }
    }
}

/// Runs a program with up to `depth` lines in flight, over everybody, halves, and everybody in reverse.
fn play(ranks: usize, depth: usize, program: &[Line], links: EmulatedLinks) {
    let world = ThreadsWorld::with_links(TOPOLOGY, ranks, HOUR, links);
    let all: Vec<_> = (0..ranks).collect();
    let reverse: Vec<_> = (0..ranks).rev().collect();
    run(&world, ranks, |rank| {
        let (low, high) = all.split_at(ranks / 2);
        let half = if low.contains(&rank) { low } else { high };
        let groups = [(Group::DATA, &all[..]), (HALF, half), (Group::DATA, &reverse[..])]
            .map(|(group, members)| world.host_group(group, members, rank));
        let mut in_flight = VecDeque::new();
        for &line in program {
            in_flight.push_back(Started::new(line, &groups[line.group]));
            if in_flight.len() > depth
                && let Some(oldest) = in_flight.pop_front()
            {
                oldest.finish();
            }
        }
        in_flight.into_iter().for_each(Started::finish);
    });
    let transfers = world.host_group(Group::DATA, &all, 0);
    let transfers = transfers.member.shared.lock();
    assert!(transfers.collectives.is_empty() && transfers.messages.is_empty(), "everything is cleared away");
    // A rank leaves a collective when its neighbours have finished their steps, and they may not have left it yet.
    let made = transfers.spare.len();
    assert!(
        (PREALLOCATED..=PREALLOCATED.max(ranks * (depth + 2))).contains(&made),
        "{made} collectives were made"
    );
}

/// A link on which a chunk of a test takes up to a few milliseconds.
fn link() -> impl Strategy<Value = EmulatedLink> {
    (1e6..1e9, 0.0..3e-4).prop_map(|(bandwidth, latency)| EmulatedLink { bandwidth, latency })
}

fn line() -> impl Strategy<Value = Line> {
    let action = prop_oneof![
        Just(Action::Collective(Collective::AllReduce)),
        Just(Action::Collective(Collective::AllGather)),
        Just(Action::Collective(Collective::ReduceScatter)),
        Just(Action::Collective(Collective::AllToAll)),
        Just(Action::Shift),
    ];
    let dtype = prop_oneof![Just(DType::F64), Just(DType::F32), Just(DType::BF16), Just(DType::F16)];
    (action, 0_usize..3, 0_usize..40, dtype).prop_map(|(action, group, len, dtype)| Line {
        action,
        group,
        len,
        dtype,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn random_programs_give_what_the_definitions_say(
        ranks in 1_usize..=6,
        depth in 0_usize..6,
        program in prop::collection::vec(line(), 1..60),
        links in prop::array::uniform4(prop::option::of(link())),
    ) {
        play(ranks, depth, &program, links);
    }
}

#[test]
fn a_hundred_collectives_may_be_in_flight() {
    let action = Action::Collective(Collective::AllReduce);
    let program: Vec<_> =
        (0..100).map(|i| Line { action, group: i % 3, len: i, dtype: DType::F32 }).collect();
    play(4, 100, &program, EmulatedLinks::default());
}

fn zeros(len: usize) -> Buffer {
    TestBuffers::new().buffer(&vec![0.0; len], DType::F32)
}

#[test]
fn a_transfer_finishes_while_a_rank_computes() {
    for links in
        [EmulatedLinks::default(), Level::ALL.map(|_| Some(EmulatedLink { bandwidth: 1e9, latency: 1e-4 }))]
    {
        let world = ThreadsWorld::with_links(TOPOLOGY, 3, HOUR, links);
        let others_done = Barrier::new(3);
        run(&world, 3, |rank| {
            let group = world.host_group(Group::DATA, &[0, 1, 2], rank);
            let sum = group.start(Collective::AllReduce, zeros(1000), 0..1000);
            let message = match rank {
                0 => Some(group.send(1, 7, zeros(500))),
                1 => Some(group.receive(0, 7, zeros(500))),
                _ => None,
            };
            // Rank 0 "computes" until the others have their results.
            if rank == 0 {
                others_done.wait();
            }
            for pending in [Some(sum), message].into_iter().flatten() {
                drop(group.wait(pending));
            }
            if rank > 0 {
                others_done.wait();
            }
        });
    }
}

#[test]
fn a_transfer_takes_as_long_as_its_emulated_links() {
    let slow = EmulatedLink { bandwidth: 1e6, latency: 5e-3 };
    // Ranks 0 and 1 share a node, and rank 2 is in another node of the pod.
    let world = ThreadsWorld::with_links(TOPOLOGY, 3, HOUR, [None, None, Some(slow), None]);
    let begun = Instant::now();
    run(&world, 3, |rank| {
        let group = world.host_group(Group::DATA, &[0, 1, 2], rank);
        drop(group.run(Collective::AllGather, zeros(3000)));
    });
    // Two of the three links cross nodes, and two chunks of 4 kB pass each of them, one after the other.
    let least = Duration::from_millis(2 * 4 + 5);
    assert!(begun.elapsed() >= least, "{:?}", begun.elapsed());
}

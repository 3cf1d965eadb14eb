//! What every transport must do. All ranks of a world run it together.

use std::collections::VecDeque;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Instant;

use kintsugi_comm::paper::{Entry, Transfer, sent_bytes};
use kintsugi_comm::ring::chunk;
use kintsugi_comm::{Collective, Communicator, Pending, Traffic, World};
use kintsugi_spec::{Axis, Group, Level, Span, Topology, splitmix64};
use kintsugi_tensor::{Backend, DType};

use crate::PATIENCE;
use crate::buffers::{backend, buffer, values};

const COLLECTIVES: [Collective; 4] =
    [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll];
const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// Empty, shorter than the group, odd, and longer than what a transport moves at once.
const LENGTHS: [usize; 7] = [0, 1, 2, 7, 64, 1001, 300_001];

/// The suite on one rank of a world.
pub struct Suite<'a> {
    world: &'a dyn World,
    topology: Topology,
    me: usize,
    backend: Rc<dyn Backend>,
}

/// One of a rank's groups.
struct Member {
    group: Group,
    ranks: Vec<usize>,
    communicator: Box<dyn Communicator>,
}

impl<'a> Suite<'a> {
    /// The suite on rank `me`, in host memory.
    pub fn new(world: &'a dyn World, topology: Topology, me: usize) -> Self {
        Suite::on(backend(), world, topology, me)
    }

    /// The suite on rank `me`, in the memory of a device.
    pub fn on(backend: Rc<dyn Backend>, world: &'a dyn World, topology: Topology, me: usize) -> Self {
        Suite { world, topology, me, backend }
    }

    /// Runs what a transport can do that has no tags and chooses the order of its sums: NCCL.
    pub fn run_without_tags(&self) {
        let groups = self.groups();
        for member in &groups {
            self.check_sizes_and_types(member);
        }
        self.check_messages_in_order();
        self.check_skipped_group();
        self.check_traffic(&groups[0]);
        self.check_many_at_once(&groups);
        self.check_exchanges();
        assert_eq!(self.world.failure(), None);
    }

    /// Runs everything.
    pub fn run(&self) {
        let groups = self.groups();
        for member in &groups {
            self.check_sizes_and_types(member);
            self.check_messages(member);
            self.check_order_of_messages(member);
            self.check_order_of_sums(member);
        }
        self.check_traffic(&groups[0]);
        self.check_many_at_once(&groups);
        if self.world.local_ranks().len() < self.world.ranks() {
            self.check_exchanges();
        }
        assert_eq!(self.world.failure(), None);
    }

    /// A collective finishes while rank 0 does nothing but compute: it computes until `told` says that rank 1 has its result, of
    /// which rank 1 tells by `tell`.
    pub fn run_beside_computing(&self, tell: impl Fn(), told: impl Fn() -> bool) {
        let all: Vec<usize> = (0..self.world.ranks()).collect();
        let group = self.world.group(Group::DATA, &all, self.me, &self.backend);
        let given = input(Collective::AllReduce, 300_001, all.len(), self.me);
        let pending =
            group.start(Collective::AllReduce, buffer(&*self.backend, &given, DType::F32), 0..given.len());
        let (begun, mut sum) = (Instant::now(), 1.0_f64);
        while self.me == 0 && !told() {
            sum = black_box((0..10_000).fold(sum, |sum, i| sum.mul_add(0.999, f64::from(i))));
            assert!(begun.elapsed() < PATIENCE, "rank 1 waits for rank 0, which computes");
        }
        let after = values(&*self.backend, &group.wait(pending));
        check_result(Collective::AllReduce, &after, (all.len(), self.me));
        if self.me == 1 {
            tell();
        }
    }

    /// Runs all-reduces only, started and waited for, and at once.
    pub fn run_sums(&self) {
        let groups = self.groups();
        for (member, len) in groups.iter().flat_map(|member| LENGTHS.map(|len| (member, len))) {
            for dtype in FLOATS {
                self.check(member, Collective::AllReduce, len, dtype);
                let (ranks, me) = (member.communicator.size(), member.communicator.rank());
                let given = buffer(&*self.backend, &input(Collective::AllReduce, len, ranks, me), dtype);
                let after = member.communicator.run(Collective::AllReduce, given);
                check_result(Collective::AllReduce, &values(&*self.backend, &after), (ranks, me));
            }
        }
        self.check_traffic(&groups[0]);
        assert_eq!(self.world.failure(), None);
    }

    /// Everybody, halves of the world, and everybody in reverse.
    fn groups(&self) -> [Member; 3] {
        let all: Vec<usize> = (0..self.world.ranks()).collect();
        let (low, high) = all.split_at(all.len() / 2);
        let half = if low.contains(&self.me) { low } else { high }.to_vec();
        let reverse = all.iter().rev().copied().collect();
        let inside = Group::Along(Axis::Data, Span::Inside(Level::Node));
        [(Group::DATA, all), (inside, half), (Group::TENSOR, reverse)].map(|(group, ranks)| Member {
            group,
            communicator: self.world.group(group, &ranks, self.me, &self.backend),
            ranks,
        })
    }

    fn check_sizes_and_types(&self, member: &Member) {
        for collective in COLLECTIVES {
            for len in LENGTHS {
                for dtype in FLOATS {
                    self.check(member, collective, len, dtype);
                }
            }
        }
        self.check(member, Collective::AllGather, 1001, DType::U32);
        for collective in [Collective::AllGather, Collective::AllToAll] {
            self.check(member, collective, 1001, DType::U8);
        }
    }

    /// Runs a collective over the middle of a larger buffer, and checks the middle and that the rest is unchanged.
    fn check(&self, member: &Member, collective: Collective, len: usize, dtype: DType) {
        let (ranks, me) = (member.communicator.size(), member.communicator.rank());
        let len = rounded(collective, len, ranks);
        let mut given = vec![50.0; 3];
        given.extend(input(collective, len, ranks, me));
        given.extend([51.0; 2]);
        let pending =
            member.communicator.start(collective, buffer(&*self.backend, &given, dtype), 3..3 + len);
        let after = values(&*self.backend, &member.communicator.wait(pending));
        assert_eq!((&after[..3], &after[3 + len..]), (&[50.0; 3][..], &[51.0; 2][..]), "outside the range");
        check_result(collective, &after[3..3 + len], (ranks, me));
    }

    /// Messages to the next rank, of several sizes at once, received in another order than they are sent.
    fn check_messages(&self, member: &Member) {
        let group = &*member.communicator;
        let (ranks, me) = (group.size(), group.rank());
        if ranks == 1 {
            return;
        }
        let (next, previous) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let made = |rank: usize, tag: usize| vec![(10 * rank + tag) as f64; LENGTHS[tag]];
        let tags = 0..LENGTHS.len();
        let sent: Vec<Pending> = tags
            .clone()
            .map(|tag| group.send(next, tag as u64, buffer(&*self.backend, &made(me, tag), DType::F32)))
            .collect();
        for tag in tags.rev() {
            let empty = buffer(&*self.backend, &vec![0.0; LENGTHS[tag]], DType::F32);
            let received = group.wait(group.receive(previous, tag as u64, empty));
            assert_eq!(values(&*self.backend, &received), made(previous, tag), "tag {tag} from {previous}");
        }
        for pending in sent {
            drop(group.wait(pending));
        }
    }

    /// Messages around the pipeline, both ways at once. Those of a lane are received in the order in which they are sent, and
    /// waited for in any.
    fn check_messages_in_order(&self) {
        let ranks = self.world.ranks();
        let all: Vec<usize> = (0..ranks).collect();
        let group = self.world.group(Group::PIPELINE, &all, self.me, &self.backend);
        let (next, previous) = ((self.me + 1) % ranks, (self.me + ranks - 1) % ranks);
        let made = |rank: usize, tag: usize| vec![(10 * rank + tag) as f64; LENGTHS[tag]];
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for (tag, len) in LENGTHS.into_iter().enumerate() {
            // An even tag goes forward, an odd one backward.
            let (to, from) = if tag % 2 == 0 { (next, previous) } else { (previous, next) };
            sent.push(group.send(to, tag as u64, buffer(&*self.backend, &made(self.me, tag), DType::F32)));
            let empty = buffer(&*self.backend, &vec![0.0; len], DType::F32);
            received.push((from, tag, group.receive(from, tag as u64, empty)));
        }
        for (from, tag, pending) in received.into_iter().rev() {
            let found = values(&*self.backend, &group.wait(pending));
            assert_eq!(found, made(from, tag), "tag {tag} from {from}");
        }
        for pending in sent {
            drop(group.wait(pending));
        }
    }

    /// A group of the first and the last rank, which the others skip.
    fn check_skipped_group(&self) {
        let last = self.world.ranks() - 1;
        if self.me != 0 && self.me != last {
            return self.world.skip_group(Group::Tied, 2);
        }
        let group = self.world.group(Group::Tied, &[0, last], self.me, &self.backend);
        let given = buffer(&*self.backend, &input(Collective::AllReduce, 100, 2, group.rank()), DType::F32);
        let after = values(&*self.backend, &group.run(Collective::AllReduce, given));
        check_result(Collective::AllReduce, &after, (2, group.rank()));
    }

    /// Messages with equal tags keep their order, in whatever order they are waited for, and everybody may wait for its own
    /// sends first.
    fn check_order_of_messages(&self, member: &Member) {
        let group = &*member.communicator;
        let (ranks, me) = (group.size(), group.rank());
        if ranks == 1 {
            return;
        }
        let (next, previous) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let one = |value: usize| buffer(&*self.backend, &[value as f64], DType::BF16);
        let sent = [(7, 1), (8, 2), (7, 3)].map(|(tag, value)| group.send(next, tag, one(10 * me + value)));
        let received = [8, 7, 7].map(|tag| group.receive(previous, tag, one(0)));
        for pending in sent.into_iter().rev() {
            drop(group.wait(pending));
        }
        for (pending, value) in received.into_iter().zip([2, 1, 3]).rev() {
            let found = values(&*self.backend, &group.wait(pending));
            assert_eq!(found, [(10 * previous + value) as f64]);
        }
    }

    /// Sums are taken around the ring, beginning behind the owner of a chunk: every transport has the same bits.
    fn check_order_of_sums(&self, member: &Member) {
        const LEN: usize = 1001;
        let (ranks, me) = (member.communicator.size(), member.communicator.rank());
        let value = |rank: usize, index: usize| ((rank * LEN + index) as f32 * 0.7).sin();
        let mine: Vec<f64> = (0..LEN).map(|index| value(me, index).into()).collect();
        let summed =
            member.communicator.run(Collective::AllReduce, buffer(&*self.backend, &mine, DType::F32));
        let found = values(&*self.backend, &summed);
        for owner in 0..ranks {
            for index in chunk(LEN, ranks, owner) {
                let order = (1..=ranks).map(|i| value((owner + i) % ranks, index));
                assert_eq!(
                    found[index],
                    order.reduce(|a, b| a + b).map_or(0.0, f64::from),
                    "{index} of {LEN}"
                );
            }
        }
    }

    /// What is counted must be what the planner charges.
    fn check_traffic(&self, member: &Member) {
        let (ranks, me) = (member.communicator.size(), member.communicator.rank());
        for (collective, len) in COLLECTIVES.into_iter().flat_map(|c| [(c, 1001), (c, 300_001)]) {
            let before = self.world.traffic(self.me);
            self.check(member, collective, len, DType::BF16);
            let entry = Entry {
                group: member.group,
                transfer: Transfer::Collective(collective),
                len: rounded(collective, len, ranks),
                dtype: DType::BF16,
            };
            let mut sent = Traffic::default();
            for (level, operation, bytes) in sent_bytes(entry, ranks, me, |i| member.ranks[i], self.topology)
            {
                sent.add(level, operation, bytes);
            }
            sent.merge(&before);
            assert_eq!(self.world.traffic(self.me), sent, "{entry:?}");
        }
    }

    /// A random program, the same on all ranks, with up to six collectives in flight in three groups.
    fn check_many_at_once(&self, groups: &[Member]) {
        let mut drawn = 0_u64;
        let mut draw = |below: usize| {
            drawn += 1;
            (splitmix64::mix(drawn.wrapping_mul(splitmix64::GOLDEN)) % below as u64) as usize
        };
        let mut in_flight = VecDeque::new();
        for _ in 0..200 {
            let (group, collective) = (&groups[draw(groups.len())], COLLECTIVES[draw(4)]);
            let (len, dtype, depth) = (draw(3000), FLOATS[draw(4)], draw(6));
            let (ranks, me) = (group.communicator.size(), group.communicator.rank());
            let len = rounded(collective, len, ranks);
            let given = buffer(&*self.backend, &input(collective, len, ranks, me), dtype);
            in_flight.push_back((group, collective, group.communicator.start(collective, given, 0..len)));
            while in_flight.len() > depth {
                self.finish(in_flight.pop_front().expect("there is one"));
            }
        }
        for transfer in in_flight {
            self.finish(transfer);
        }
    }

    fn finish(&self, (group, collective, pending): (&Member, Collective, Pending)) {
        let after = values(&*self.backend, &group.communicator.wait(pending));
        let (ranks, me) = (group.communicator.size(), group.communicator.rank());
        check_result(collective, &after, (ranks, me));
    }

    /// Results come to rank 0, and its decisions go to all.
    fn check_exchanges(&self) {
        let mine = vec![self.me as u8; 1000 * self.me];
        let all = self.world.gather(mine).expect("nobody fails");
        let expected = (0..self.world.ranks()).map(|rank| vec![rank as u8; 1000 * rank]).collect();
        assert_eq!(all, (self.me == 0).then_some(expected));
        let word = if self.me == 0 { b"begin".to_vec() } else { Vec::new() };
        assert_eq!(self.world.broadcast(word), Ok(b"begin".to_vec()));
        self.world.barrier().expect("nobody fails");
    }
}

/// Small integers: sums over eight ranks are exact in every type.
fn value(rank: usize, index: usize) -> f64 {
    ((7 * rank + 3 * index) % 31) as f64
}

/// The elements of a collective: an all-to-all needs two halves of equal chunks.
fn rounded(collective: Collective, len: usize, ranks: usize) -> usize {
    if collective == Collective::AllToAll { len.next_multiple_of(2 * ranks) } else { len }
}

/// What rank `me` starts a collective with: for a gather only its own chunk is filled.
fn input(collective: Collective, len: usize, ranks: usize, me: usize) -> Vec<f64> {
    let own = chunk(len, ranks, me);
    let filled = |index| collective != Collective::AllGather || own.contains(&index);
    (0..len).map(|index| if filled(index) { value(me, index) } else { 99.0 }).collect()
}

/// Compares what rank `me` has after a collective that started from [`input`] with the definition.
fn check_result(collective: Collective, after: &[f64], (ranks, me): (usize, usize)) {
    for owner in 0..ranks {
        for index in chunk(after.len(), ranks, owner) {
            let sum = || (0..ranks).map(|rank| value(rank, index)).sum();
            let expected = match collective {
                Collective::AllReduce => sum(),
                Collective::AllGather => value(owner, index),
                Collective::ReduceScatter if owner == me => sum(),
                Collective::ReduceScatter => continue,
                Collective::AllToAll if 2 * index < after.len() => value(me, index),
                Collective::AllToAll => {
                    let chunk = after.len() / 2 / ranks;
                    let (from, offset) = (index / chunk - ranks, index % chunk);
                    value(from, me * chunk + offset)
                }
            };
            let found = after[index];
            assert_eq!(found, expected, "{collective:?} over {ranks}, rank {me}, {index} of {}", after.len());
        }
    }
}

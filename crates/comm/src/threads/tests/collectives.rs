//! Each collective against its definition, and what it sends against what the planner charges.

use kintsugi_spec::{Group, Level, Topology};
use kintsugi_tensor::DType;

use super::{HOUR, TestBuffers, run, world};
use crate::paper::{Entry, Transfer, charge};
use crate::ring::chunk;
use crate::threads::ThreadsWorld;
use crate::{Collective, Communicator, Traffic, World};

const COLLECTIVES: [Collective; 3] =
    [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter];
const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// Small integers: sums over six ranks are exact in every type.
fn value(rank: usize, index: usize) -> f64 {
    ((7 * rank + 3 * index) % 31) as f64
}

/// What rank `me` must have in element `index` of a collective that started from [`value`]; `None` if undefined.
pub(super) fn expected(
    collective: Collective,
    len: usize,
    ranks: usize,
    me: usize,
    index: usize,
) -> Option<f64> {
    let owner = (0..ranks).find(|&rank| chunk(len, ranks, rank).contains(&index)).expect("within `len`");
    let sum = || (0..ranks).map(|rank| value(rank, index)).sum();
    match collective {
        Collective::AllReduce => Some(sum()),
        Collective::AllGather => Some(value(owner, index)),
        Collective::ReduceScatter => (owner == me).then(sum),
    }
}

/// What rank `me` starts a collective from: for a gather only its own chunk is filled.
pub(super) fn input(collective: Collective, len: usize, ranks: usize, me: usize) -> Vec<f64> {
    let own = chunk(len, ranks, me);
    let filled = |index| collective != Collective::AllGather || own.contains(&index);
    (0..len).map(|index| if filled(index) { value(me, index) } else { 99.0 }).collect()
}

/// Runs a collective over the middle of a larger buffer, and checks the middle and that the rest is left alone.
fn check(group: &impl Communicator, collective: Collective, len: usize, dtype: DType) {
    let (ranks, me) = (group.size(), group.rank());
    let mut values = vec![50.0; 3];
    values.extend(input(collective, len, ranks, me));
    values.extend([51.0; 2]);
    let pending = group.start(collective, TestBuffers::new().buffer(&values, dtype), 3..3 + len);
    let after = TestBuffers::values(&group.wait(pending));
    assert_eq!((&after[..3], &after[3 + len..]), (&[50.0; 3][..], &[51.0; 2][..]), "outside the range");
    for index in 0..len {
        if let Some(expected) = expected(collective, len, ranks, me, index) {
            let got = after[3 + index];
            assert_eq!(got, expected, "{collective:?} {dtype:?} over {ranks}, rank {me}, {index} of {len}");
        }
    }
}

#[test]
fn collectives_do_what_their_definitions_say() {
    for ranks in 1..=6 {
        let world = world(ranks);
        let members: Vec<_> = (0..ranks).collect();
        run(&world, ranks, |rank| {
            let group = world.host_group(Group::DATA, &members, rank);
            for len in [0, 1, 2, 5, 6, 33, 300] {
                for dtype in FLOATS {
                    for collective in COLLECTIVES {
                        check(&group, collective, len, dtype);
                    }
                }
                check(&group, Collective::AllGather, len, DType::U32);
            }
        });
    }
}

#[test]
fn a_group_is_a_ring_in_its_own_order() {
    let world = world(4);
    run(&world, 4, |rank| {
        let members = if rank % 2 == 0 { [2, 0] } else { [1, 3] };
        let group = world.host_group(Group::DATA, &members, rank);
        assert_eq!(members[group.rank()], rank);
        for collective in COLLECTIVES {
            check(&group, collective, 11, DType::F32);
        }
    });
}

#[test]
fn sums_are_taken_around_the_ring_and_have_the_same_bits_every_time() {
    const RANKS: usize = 4;
    const LEN: usize = 37;
    let value = |rank: usize, index: usize| ((rank * LEN + index) as f32 * 0.7).sin();
    let sums: Vec<_> = (0..LEN)
        .map(|index| {
            let owner = (0..RANKS).find(|&rank| chunk(LEN, RANKS, rank).contains(&index)).expect("within");
            let order = (1..=RANKS).map(|i| (owner + i) % RANKS);
            f64::from(order.map(|rank| value(rank, index)).reduce(|a, b| a + b).expect("ranks"))
        })
        .collect();
    let world = world(RANKS);
    run(&world, RANKS, |rank| {
        let group = world.host_group(Group::DATA, &[0, 1, 2, 3], rank);
        let values: Vec<_> = (0..LEN).map(|index| value(rank, index).into()).collect();
        for _ in 0..50 {
            let buffer = group.run(Collective::AllReduce, TestBuffers::new().buffer(&values, DType::F32));
            assert_eq!(TestBuffers::values(&buffer), sums);
        }
    });
}

#[test]
fn traffic_is_what_the_planner_charges_to_the_byte() {
    const RANKS: usize = 8;
    let topology = Topology { per_package: 2, per_node: Some(4) };
    let world = ThreadsWorld::new(topology, RANKS, HOUR);
    let members = [0, 1, 2, 3, 4, 6, 7];
    let kinds = |len| {
        FLOATS.into_iter().flat_map(move |dtype| {
            COLLECTIVES.into_iter().map(move |collective| Entry {
                group: Group::DATA,
                transfer: Transfer::Collective(collective),
                len,
                dtype,
            })
        })
    };
    run(&world, RANKS, |rank| {
        let Some(me) = members.iter().position(|&member| member == rank) else {
            return;
        };
        let group = world.host_group(Group::DATA, &members, rank);
        let mut charged = Traffic::default();
        for entry in [3, 7, 100].into_iter().flat_map(kinds) {
            let Transfer::Collective(collective) = entry.transfer else { unreachable!("only collectives") };
            check(&group, collective, entry.len, entry.dtype);
            let (level, operation, bytes) = charge(entry, members.len(), me, |i| members[i], topology);
            charged.add(level, operation, bytes);
            assert_eq!(world.traffic(rank), charged, "rank {rank} after {entry:?}");
        }
    });
    assert_eq!(world.traffic(5), Traffic::default(), "rank 5 is in no group");
    let crossed: Vec<_> = world.traffic(7).iter().map(|(level, _, _)| level).collect();
    assert_eq!(crossed, [Level::Cluster; 3], "the ring closes over the network");
}

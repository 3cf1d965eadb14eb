//! How a world fails: a rank dies, a rank never starts a transfer, ranks disagree.

use std::sync::Barrier;
use std::time::Duration;

use kintsugi_spec::{Group, Topology};
use kintsugi_tensor::{Buffer, DType};

use super::{TestBuffers, run, try_run, world};
use crate::threads::{ThreadsGroup, ThreadsWorld};
use crate::{Collective, Communicator, RankFailure, World};

/// Waits so short that a test which must time out is fast.
const MOMENT: Duration = Duration::from_millis(20);

fn buffer(len: usize) -> Buffer {
    TestBuffers::new().buffer(&vec![0.0; len], DType::F32)
}

/// Runs four ranks. Rank 2 does `before` and panics, and the others do `body`, which must end.
fn rank_2_breaks(before: impl Fn(&ThreadsGroup) + Sync, body: impl Fn(&ThreadsGroup) + Sync) {
    let world = world(4);
    let results = try_run(&world, 4, |rank| {
        let group = world.host_group(Group::DATA, &[0, 1, 2, 3], rank);
        if rank == 2 {
            before(&group);
            panic!("broken");
        }
        body(&group);
        group.failure()
    });
    let expected = RankFailure::new(2, "a test", "broken");
    assert_eq!(expected.to_string(), "rank 2 failed in a test: broken");
    for rank in [0, 1, 3] {
        assert_eq!(results[rank], Ok(Some(expected.clone())), "rank {rank} learns why");
    }
}

#[test]
fn a_rank_that_dies_takes_the_others_out_of_a_collective() {
    rank_2_breaks(|_| (), |group| drop(group.run(Collective::AllReduce, buffer(8))));
}

#[test]
fn a_rank_that_dies_in_between_leaves_its_memory_to_the_others() {
    let begin = |group: &ThreadsGroup| {
        let _lost = group.start(Collective::AllReduce, buffer(8), 0..8);
    };
    // The progress thread of rank 2 can finish the first one without its rank, but nobody starts its second one.
    rank_2_breaks(begin, |group| {
        let first = group.run(Collective::AllReduce, buffer(8));
        drop(group.run(Collective::AllReduce, first));
    });
}

#[test]
fn a_rank_that_dies_takes_the_others_out_of_messages() {
    rank_2_breaks(
        |_| (),
        |group| {
            let pending = match group.rank() {
                0 => group.send(2, 0, buffer(8)),
                _ => group.receive(2, 0, buffer(8)),
            };
            drop(group.wait(pending));
        },
    );
}

#[test]
fn nothing_is_transferred_in_a_world_that_has_stopped() {
    let world = world(2);
    let first = RankFailure::new(0, "one", "first");
    world.abort(first.clone());
    world.abort(RankFailure::new(1, "two", "second"));
    assert_eq!(world.failure(), Some(first), "the first failure stays");
    run(&world, 2, |rank| {
        let group = world.host_group(Group::DATA, &[0, 1], rank);
        let pending = match rank {
            0 => group.start(Collective::AllReduce, buffer(1), 0..1),
            _ => group.send(0, 0, buffer(1)),
        };
        drop(group.wait(pending));
    });
    assert_eq!(world.traffic(0).total() + world.traffic(1).total(), 0);
}

/// Four ranks start a collective or not, as `starts` says, and wait for it. Gives the failure of the first that times out.
fn time_out(starts: [bool; 4]) -> RankFailure {
    let world = ThreadsWorld::new(Topology::ONE_NODE, 4, MOMENT);
    let started = Barrier::new(4);
    run(&world, 4, |rank| {
        let group = world.host_group(Group::DATA, &[0, 1, 2, 3], rank);
        let pending = starts[rank].then(|| group.start(Collective::AllReduce, buffer(8), 0..8));
        started.wait();
        if let Some(pending) = pending {
            drop(group.wait(pending));
        }
    });
    world.failure().expect("the timeout has passed")
}

#[test]
fn a_timeout_ends_with_the_name_of_who_did_not_start() {
    let failure = time_out([true, true, false, true]);
    assert_eq!(failure.transfer.as_deref(), Some("all_reduce number 0 of group dp"));
    assert_eq!((failure.peer, &*failure.reason), (Some(2), "after 20ms, not started by rank 2"));
}

#[test]
fn a_timeout_ends_with_the_name_of_who_does_not_send() {
    let world = ThreadsWorld::new(Topology::ONE_NODE, 3, MOMENT);
    run(&world, 3, |rank| {
        if rank == 1 {
            // In the group the ranks are 0 and 1; messages name the ranks of the world.
            let group = world.host_group(Group::PIPELINE, &[1, 2], 1);
            drop(group.wait(group.receive(1, 5, buffer(8))));
        }
    });
    let during = "send from rank 2 to rank 1 with tag 5 of group pp";
    let reason = "after 20ms, not started by rank 2".to_owned();
    let failure = RankFailure::stalled(1, during, Some(2));
    assert_eq!(world.failure(), Some(RankFailure { reason, blame: crate::Blame::Peer, ..failure }));
}

#[test]
fn a_timeout_names_the_end_of_the_chain_of_waits() {
    // Rank 0 waits for rank 1, which waits for rank 2, which sends nothing. Rank 0 gives up first, because it waits longest.
    let world = ThreadsWorld::new(Topology::ONE_NODE, 3, Duration::from_millis(1500));
    let began = Barrier::new(2);
    run(&world, 3, |rank| {
        if rank == 2 {
            return;
        }
        let group = world.host_group(Group::PIPELINE, &[rank, rank + 1], rank);
        let pending = group.receive(1, 0, buffer(8));
        if rank == 1 {
            began.wait();
            // So that rank 0 is the first to give up.
            std::thread::sleep(Duration::from_millis(200));
        } else {
            began.wait();
        }
        drop(group.wait(pending));
    });
    let failure = world.failure().expect("rank 0 gives up");
    let reason = "after 1.5s, not started by rank 1; it waits for rank 1, which waits for rank 2, which waits for no other rank";
    assert_eq!((failure.rank, failure.peer, &*failure.reason), (0, Some(2), reason));
}

/// What stops a world of two ranks that each run `body`.
fn disagreement(body: impl Fn(&ThreadsGroup) + Sync) -> String {
    let world = world(2);
    run(&world, 2, |rank| body(&world.host_group(Group::TENSOR, &[0, 1], rank)));
    world.failure().expect("disagreement").reason
}

#[test]
fn ranks_that_start_different_collectives_are_told_so() {
    let lengths = disagreement(|group| drop(group.run(Collective::AllReduce, buffer(8 + group.rank()))));
    assert!(lengths.contains("all_reduce of 8 F32") && lengths.contains("all_reduce of 9 F32"), "{lengths}");
    let kinds = disagreement(|group| {
        let collective = [Collective::AllReduce, Collective::AllGather][group.rank()];
        drop(group.run(collective, buffer(8)));
    });
    assert!(kinds.contains("all_reduce of 8 F32") && kinds.contains("all_gather of 8 F32"), "{kinds}");
}

#[test]
fn the_ends_of_a_message_must_have_the_same_size_and_type() {
    let reason = disagreement(|group| {
        let pending = match group.rank() {
            0 => group.send(1, 3, buffer(8)),
            _ => group.receive(0, 3, TestBuffers::new().buffer(&[0.0; 4], DType::BF16)),
        };
        drop(group.wait(pending));
    });
    assert_eq!(reason, "8 F32 are sent and 4 BF16 received");
}

#[test]
#[should_panic(expected = "cannot exchange a message with rank 0")]
fn a_rank_does_not_send_to_itself() {
    let _ = world(2).host_group(Group::PIPELINE, &[0, 1], 0).send(0, 0, buffer(1));
}

#[test]
#[should_panic(expected = "token ids and bytes are not summed")]
fn token_ids_are_not_summed() {
    let tokens = TestBuffers::new().buffer(&[1.0], DType::U32);
    let _ = world(2).host_group(Group::TENSOR, &[0, 1], 0).start(Collective::ReduceScatter, tokens, 0..1);
}

#[test]
#[should_panic(expected = "in the group that started it")]
fn a_collective_is_waited_for_where_it_was_started() {
    let world = world(2);
    run(&world, 1, |rank| {
        let [tp, dp] = [Group::TENSOR, Group::DATA].map(|group| world.host_group(group, &[0, 1], rank));
        let _elsewhere = dp.start(Collective::AllReduce, buffer(4), 0..4);
        dp.wait(tp.start(Collective::AllReduce, buffer(4), 0..4));
    });
}

#[test]
#[should_panic(expected = "rank 5 is not in group dp")]
fn a_group_is_for_its_members() {
    world(6).host_group(Group::DATA, &[0, 1], 5);
}

#[test]
#[should_panic(expected = "group dp of ranks [0, 6] in a world of 6")]
fn members_are_ranks_of_the_world() {
    world(6).host_group(Group::DATA, &[0, 6], 0);
}

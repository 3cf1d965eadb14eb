//! Messages: matching, order, and who is charged.

use kintsugi_spec::{Group, Level, Topology};
use kintsugi_tensor::DType;

use super::{HOUR, TestBuffers, run, world};
use crate::threads::ThreadsWorld;
use crate::{Communicator, Operation, Traffic, World};

#[test]
fn messages_go_around_even_if_everybody_waits_for_the_send_first() {
    let topology = Topology { per_package: 2, per_node: Some(4) };
    let world = ThreadsWorld::new(topology, 5, HOUR);
    run(&world, 5, |rank| {
        let group = world.host_group(Group::PIPELINE, &[0, 1, 2, 3, 4], rank);
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16, DType::U32] {
            let (next, previous) = ((rank + 1) % 5, (rank + 4) % 5);
            let sent = group.send(next, 1, TestBuffers::new().buffer(&[rank as f64; 9], dtype));
            let received = group.receive(previous, 1, TestBuffers::new().buffer(&[99.0; 9], dtype));
            group.wait(sent);
            assert_eq!(TestBuffers::values(&group.wait(received)), [previous as f64; 9]);
        }
    });
    let bytes = 9 * (8 + 4 + 2 + 2 + 4);
    for (rank, level) in [(0, Level::Package), (1, Level::Node), (3, Level::Cluster), (4, Level::Cluster)] {
        let mut expected = Traffic::default();
        expected.add(level, Operation::Send, bytes);
        assert_eq!(world.traffic(rank), expected, "the sender {rank} is charged, whoever copies");
    }
}

#[test]
fn tags_tell_messages_apart_and_equal_tags_keep_their_order() {
    let world = world(2);
    run(&world, 2, |rank| {
        let group = world.host_group(Group::PIPELINE, &[0, 1], rank);
        let buffers = TestBuffers::new();
        if rank == 0 {
            let messages = [(7, 1.0), (8, 2.0), (7, 3.0), (7, 4.0)];
            let pending = messages.map(|(tag, x)| group.send(1, tag, buffers.buffer(&[x], DType::F32)));
            pending.into_iter().rev().for_each(|sent| drop(group.wait(sent)));
        } else {
            let empty = || buffers.buffer(&[0.0], DType::F32);
            let pending = [8, 7, 7].map(|tag| group.receive(0, tag, empty()));
            let values = pending.map(|received| TestBuffers::values(&group.wait(received))[0]);
            assert_eq!(values, [2.0, 1.0, 3.0]);
            let last = group.receive(0, 7, empty());
            assert_eq!(TestBuffers::values(&group.wait(last)), [4.0]);
        }
    });
    let shared = world.host_group(Group::PIPELINE, &[0, 1], 0).shared;
    assert!(shared.lock().messages.is_empty(), "all messages are cleared away");
}

#[test]
fn receives_may_be_waited_for_in_any_order() {
    let world = world(2);
    run(&world, 2, |rank| {
        let group = world.host_group(Group::PIPELINE, &[0, 1], rank);
        let buffers = TestBuffers::new();
        if rank == 0 {
            let [a, b] = [1.0, 2.0].map(|x| group.receive(1, 0, buffers.buffer(&[x], DType::F64)));
            assert_eq!(TestBuffers::values(&group.wait(b)), [20.0]);
            assert_eq!(TestBuffers::values(&group.wait(a)), [10.0]);
        } else {
            let [a, b] = [10.0, 20.0].map(|x| group.send(0, 0, buffers.buffer(&[x], DType::F64)));
            drop((group.wait(a), group.wait(b)));
        }
    });
}

//! No schedule deadlocks on a transport without tags whose transfers run in order.
//!
//! NCCL runs the transfers of a communicator in the order in which a rank starts them, and pairs messages by that order alone.
//! Here every rank has a queue for the operations and a queue for every communicator. A start puts a transfer into the queue of
//! its communicator. A wait holds the operations up until the transfer has run. A transfer runs when it is at the head of the
//! queues of all ranks that take part.

use std::collections::{BTreeMap, HashSet, VecDeque};

use kintsugi_plan::{Axis, Group, Message, MessageKind, Op, Program, Transfer};
use proptest::prelude::*;

use crate::support::{layouts, plan, programs};

/// A communicator of a rank. Messages have one for every direction between two stages, and for every kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Queue {
    Link {
        kind: MessageKind,
        from: usize,
        to: usize,
    },
    Stages,
    Tied,
    /// Data or tensor parallel. All its ranks run the same program, so one rank stands for all.
    SameStage(Group),
}

/// The part of an op in transfers. A transfer is named equally by all ranks that take part.
enum Part {
    None,
    Start(Queue, Transfer),
    Wait(Transfer),
}

fn part(stage: usize, op: Op) -> Part {
    match op {
        Op::Start(transfer) => Part::Start(queue(stage, transfer), named(transfer)),
        Op::Wait(transfer) => Part::Wait(named(transfer)),
        _ => Part::None,
    }
}

/// The same name for both ends of a message.
fn named(transfer: Transfer) -> Transfer {
    let message = transfer.message();
    message.map_or(transfer, |message| Transfer::Send(Message { peer: 0, ..message }))
}

fn queue(stage: usize, transfer: Transfer) -> Queue {
    let link = |message: Message, from, to| Queue::Link { kind: message.kind, from, to };
    match (transfer, transfer.group()) {
        (Transfer::Send(message), _) => link(message, stage, message.peer),
        (Transfer::Receive(message), _) => link(message, message.peer, stage),
        (_, Some(Group::Tied)) => Queue::Tied,
        (_, Some(Group::Along(Axis::Pipeline, _))) => Queue::Stages,
        (_, Some(group @ Group::Along(..))) => Queue::SameStage(group),
        (_, Some(Group::Nodes) | None) => panic!("{transfer} is neither a message nor in a group"),
    }
}

/// One rank of a stage.
struct Rank<'a> {
    program: &'a Program,
    next: usize,
    queues: BTreeMap<Queue, VecDeque<Transfer>>,
    done: HashSet<Transfer>,
}

impl Rank<'_> {
    /// Runs operations up to a wait for a transfer that has not run. Returns whether there were any.
    fn advance(&mut self) -> bool {
        let before = self.next;
        while let Some(&op) = self.program.ops.get(self.next) {
            match part(self.program.stage, op) {
                Part::None => {}
                Part::Start(queue, transfer) => self.queues.entry(queue).or_default().push_back(transfer),
                Part::Wait(transfer) if self.done.remove(&transfer) => {}
                Part::Wait(_) => break,
            }
            self.next += 1;
        }
        self.next > before
    }

    fn head(&self, queue: Queue) -> Option<Transfer> {
        self.queues.get(&queue).and_then(|queue| queue.front()).copied()
    }
}

/// Whether any rank of the program ever starts a transfer in a queue.
fn takes_part(program: &Program, queue: Queue) -> bool {
    program.ops.iter().any(|&op| matches!(part(program.stage, op), Part::Start(of, _) if of == queue))
}

/// Runs the head of a queue, if it has come to the head on all ranks that take part. Panics if those have different transfers at
/// their heads.
fn run_head(ranks: &mut [Rank], queue: Queue, stage: usize) -> bool {
    let members: Vec<usize> = match queue {
        Queue::SameStage(_) => vec![stage],
        _ => (0..ranks.len()).filter(|&rank| takes_part(ranks[rank].program, queue)).collect(),
    };
    let heads: Option<Vec<Transfer>> = members.iter().map(|&member| ranks[member].head(queue)).collect();
    let Some(heads) = heads else { return false };
    if let Queue::Link { .. } = queue {
        assert_eq!(members.len(), 2, "{queue:?} has two ends");
        assert_eq!(heads[0], heads[1], "the ends of {queue:?} start messages in different orders");
    }
    for (&member, head) in members.iter().zip(heads) {
        let rank = &mut ranks[member];
        rank.queues.get_mut(&queue).expect("it has a head").pop_front();
        assert!(rank.done.insert(head), "{head:?} is in flight twice");
    }
    true
}

/// The ops at which ranks wait forever.
fn stuck(programs: &[Program]) -> Vec<(usize, Op)> {
    let start = |program| Rank { program, next: 0, queues: BTreeMap::new(), done: HashSet::new() };
    let mut ranks: Vec<Rank> = programs.iter().map(start).collect();
    loop {
        let mut moved = ranks.iter_mut().fold(false, |moved, rank| rank.advance() | moved);
        for stage in 0..ranks.len() {
            for queue in ranks[stage].queues.keys().copied().collect::<Vec<_>>() {
                moved |= run_head(&mut ranks, queue, stage);
            }
        }
        if !moved {
            let waiting = |rank: &Rank| Some((rank.program.stage, *rank.program.ops.get(rank.next)?));
            return ranks.iter().filter_map(waiting).collect();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn messages_pair_up_and_no_schedule_deadlocks(sets in layouts(), evaluated in 1..8_usize) {
        let plan = plan(&sets);
        let stages = 0..plan.mesh.pp();
        let evaluations: Vec<Program> = stages.map(|stage| plan.evaluation(stage, evaluated)).collect();
        for programs in [programs(&plan), evaluations] {
            let stuck = stuck(&programs);
            prop_assert!(stuck.is_empty(), "{stuck:?}");
        }
    }
}

/// Two stages that exchange two messages in each direction.
fn exchange(receives: [usize; 2]) -> [Program; 2] {
    let message = |kind, micro, peer| Message { kind, block: kintsugi_plan::Block::Layer(1), micro, peer };
    [0, 1].map(|stage| {
        let send = |micro| message(MessageKind::Activation, micro, 1);
        let receive = |micro| message(MessageKind::Activation, micro, 0);
        let ops = if stage == 0 {
            [0, 1].map(|micro| Op::Start(Transfer::Send(send(micro)))).to_vec()
        } else {
            receives.map(|micro| Op::Start(Transfer::Receive(receive(micro)))).to_vec()
        };
        let waits = ops.iter().filter_map(|op| op.transfer()).map(Op::Wait);
        Program { stage, ops: ops.iter().copied().chain(waits).collect() }
    })
}

#[test]
fn messages_in_the_order_of_their_sends_arrive() {
    assert!(stuck(&exchange([0, 1])).is_empty());
}

#[test]
#[should_panic(expected = "start messages in different orders")]
fn messages_in_another_order_are_noticed() {
    stuck(&exchange([1, 0]));
}

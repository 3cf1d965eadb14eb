//! No schedule deadlocks, however strict the transport is.

use std::collections::HashMap;

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Block, Group, Message, MessageKind, Op, Plan, Program, Transfer};
use proptest::prelude::*;
use proptest::sample::select;

/// The demo as a pipeline of one replica, with two layers in every chunk.
fn pipeline(schedule: &str, pp: usize, micro_batches: usize, virtual_stages: usize, rest: &[&str]) -> Plan {
    let mut sets = vec![
        format!("parallel.schedule={schedule}"),
        format!("parallel.pp={pp}"),
        format!("parallel.virtual_stages={virtual_stages}"),
        format!("model.layers={}", 2 * pp * virtual_stages),
        "parallel.dp=1".to_owned(),
        "parallel.tp=1".to_owned(),
        "batch.micro=1".to_owned(),
        format!("batch.global={micro_batches}"),
    ];
    sets.extend(rest.iter().map(|&set| set.to_owned()));
    ConfigSource::demo().sets(&sets).plan().unwrap_or_else(|error| panic!("{sets:?}: {error}"))
}

/// The ops at which stages block forever, on a transport whose sends complete only when the receiver waits for the
/// message. No transport is stricter.
fn stuck(programs: &[Program]) -> Vec<(usize, Op)> {
    let mut next = vec![0; programs.len()];
    // The number of stages that have reached each rendezvous; for messages, whether the receiver waits.
    let mut begun: HashMap<String, usize> = HashMap::new();
    loop {
        let before = next.clone();
        for (program, next) in programs.iter().zip(&mut next) {
            while let Some(&op) = program.ops.get(*next) {
                if !passes(program.stage, op, programs.len(), &mut begun) {
                    break;
                }
                *next += 1;
            }
        }
        if next == before {
            let waiting = |(program, next): (&Program, usize)| Some((program.stage, *program.ops.get(next)?));
            return programs.iter().zip(next).filter_map(waiting).collect();
        }
    }
}

/// Whether a stage can pass an op. Records it for the other stages.
fn passes(stage: usize, op: Op, stages: usize, begun: &mut HashMap<String, usize>) -> bool {
    let sent =
        |message: Message| format!("{stage} to {}: {:?}", message.peer, Message { peer: 0, ..message });
    let received =
        |message: Message| format!("{} to {stage}: {:?}", message.peer, Message { peer: 0, ..message });
    let mut begin = |what: String| *begun.entry(what).or_default() += 1;
    match op {
        Op::Start(Transfer::Send(message)) => begin(format!("send {}", sent(message))),
        Op::Wait(Transfer::Receive(message)) => {
            // The receiver waits from here on, so the sender can complete.
            begin(format!("take {}", received(message)));
            return begun.contains_key(&format!("send {}", received(message)));
        }
        Op::Wait(Transfer::Send(message)) => {
            return begun.contains_key(&format!("take {}", sent(message)));
        }
        Op::Start(Transfer::Receive(_)) => {}
        Op::Start(transfer) if transfer.crosses_stages() => {
            begin(if transfer.group() == Some(Group::Tied) { "tied" } else { "sum" }.into());
        }
        Op::Wait(transfer) if transfer.group() == Some(Group::Tied) => return begun.get("tied") == Some(&2),
        Op::Wait(transfer) if transfer.crosses_stages() => return begun.get("sum") == Some(&stages),
        _ => {}
    }
    true
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn no_schedule_deadlocks_with_synchronous_sends(
        schedule in select(vec!["gpipe", "1f1b", "interleaved", "zero-bubble"]),
        pp in 1..=6_usize,
        micro_batches in 1..=12_usize,
        v in 2..=3_usize,
        overlap in any::<bool>(),
        tied in any::<bool>(),
        recompute in select(vec!["none", "full"]),
        evaluated in 1..=9_usize,
        frozen in 0..=4_usize,
    ) {
        let (pp, v) = if schedule == "interleaved" { (pp.max(2), v) } else { (pp, 1) };
        let micro_batches = if v > 1 { micro_batches.next_multiple_of(pp) } else { micro_batches };
        // The embedding and the first layers, so that some stages may have no backward.
        let embedding = ["table".to_owned(), "positions".to_owned()];
        let units = embedding.into_iter().chain((1..frozen.min(2 * pp * v)).map(|i| format!("layer.{}", i - 1)));
        let groups: Vec<String> = units
            .filter(|_| frozen > 0)
            .map(|unit| format!("{{ parameters = \"{unit}.*\", frozen = true }}"))
            .collect();
        let rest = [
            &*format!("optimizer.groups=[{}]", groups.join(", ")),
            &*format!("parallel.overlap={overlap}"),
            &*format!("model.tied={tied}"),
            &*format!("memory.recompute={recompute}"),
        ];
        let plan = pipeline(schedule, pp, micro_batches, v, &rest);
        let evaluations: Vec<Program> = (0..pp).map(|stage| plan.evaluation(stage, evaluated)).collect();
        let steps: Vec<Program> = (0..pp).map(|stage| plan.program(stage)).collect();
        for programs in [steps, evaluations] {
            let stuck = stuck(&programs);
            prop_assert!(stuck.is_empty(), "{stuck:?}");
        }
    }
}

#[test]
fn two_stages_that_send_before_they_receive_deadlock() {
    let exchange = |stage: usize| {
        let message =
            Message { kind: MessageKind::Activation, block: Block::Layer(1), micro: 0, peer: 1 - stage };
        let ops = vec![
            Op::Start(Transfer::Send(message)),
            Op::Wait(Transfer::Send(message)),
            Op::Start(Transfer::Receive(message)),
            Op::Wait(Transfer::Receive(message)),
        ];
        Program { stage, ops }
    };
    let stuck = stuck(&[exchange(0), exchange(1)]);
    assert!(stuck.iter().map(|(stage, _)| *stage).eq([0, 1]), "{stuck:?}");
    assert!(stuck.iter().all(|(_, op)| matches!(op, Op::Wait(Transfer::Send(_)))), "{stuck:?}");
}

//! Plays programs against a virtual clock, one clock per stage.
//!
//! All ranks of a stage act as one, so transfers inside a stage are over at once. A message can be received from the
//! start of its send on (plus the time it travels). What stages do together, the tied table and the sums over pp,
//! ends when the last of them has begun.

use std::collections::HashMap;
use std::fmt;

use kintsugi_plan::{Axis, Message, Op, Over, Plan, Program};

use super::{Costs, Span, Timeline};

/// When a send is over, that is, when its `SendWait` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendEnds {
    /// As soon as the receiver has made room for the message: at its `ReceiveStart`.
    WhenExpected,
    /// Only when the receiver has taken it: at its `ReceiveWait`. No transport is stricter, so a program that does
    /// not deadlock so never does.
    WhenTaken,
}

/// Every stage that has not finished waits for another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// The stages that wait, and in which op.
    pub stuck: Vec<(usize, Op)>,
}

/// Plays one training step of a plan.
pub fn play(plan: &Plan, costs: &Costs) -> Result<Timeline, Deadlock> {
    let programs: Vec<Program> = (0..plan.mesh.pp).map(|stage| plan.program(stage)).collect();
    play_programs(&programs, |_, op| costs.of(op), costs.message, SendEnds::WhenExpected)
}

/// Plays the programs of all stages, in stage order. `cost` tells how long an op keeps a stage busy, `message` how
/// long a message travels.
pub fn play_programs(
    programs: &[Program],
    cost: impl Fn(usize, Op) -> f64,
    message: f64,
    send_ends: SendEnds,
) -> Result<Timeline, Deadlock> {
    let mut player = Player {
        send_ends,
        message,
        stages: programs.len(),
        sent: HashMap::new(),
        expected: HashMap::new(),
        taken: HashMap::new(),
        joined: HashMap::new(),
    };
    let mut stages: Vec<Vec<Span>> = programs.iter().map(|p| Vec::with_capacity(p.ops.len())).collect();
    let mut moved = true;
    while moved {
        moved = false;
        for (program, spans) in programs.iter().zip(&mut stages) {
            moved |= player.advance(program, spans, &cost);
        }
    }
    let stuck: Vec<(usize, Op)> = programs
        .iter()
        .zip(&stages)
        .filter_map(|(program, spans)| Some((program.stage, *program.ops.get(spans.len())?)))
        .collect();
    if !stuck.is_empty() {
        return Err(Deadlock { stuck });
    }
    let makespan = stages.iter().filter_map(|spans| spans.last()).map(|span| span.end).fold(0.0, f64::max);
    Ok(Timeline { stages, makespan })
}

/// A message as both of its stages name it: the sender, and the message with the receiver as peer.
type Key = (usize, Message);

/// What stages do together.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Joint {
    Tied,
    Sum,
}

struct Player {
    send_ends: SendEnds,
    message: f64,
    stages: usize,
    /// When each message's send, receive and taking were begun.
    sent: HashMap<Key, f64>,
    expected: HashMap<Key, f64>,
    taken: HashMap<Key, f64>,
    /// How many stages have begun, and when the last did.
    joined: HashMap<Joint, (usize, f64)>,
}

impl Player {
    /// Runs a stage until it must wait for another; whether it got anywhere.
    fn advance(&mut self, program: &Program, spans: &mut Vec<Span>, cost: impl Fn(usize, Op) -> f64) -> bool {
        let from = spans.len();
        for &op in &program.ops[from..] {
            let start = spans.last().map_or(0.0, |span| span.end);
            let Some(ready) = self.ready(program.stage, op) else { break };
            let end = start.max(ready) + cost(program.stage, op);
            self.note(program.stage, op, end);
            spans.push(Span { start, end, op });
        }
        spans.len() > from
    }

    /// When what an op waits for is there; `None` while that is not known.
    fn ready(&self, stage: usize, op: Op) -> Option<f64> {
        match op {
            Op::SendWait { message } => {
                let key = outgoing(stage, message);
                match self.send_ends {
                    SendEnds::WhenExpected => self.expected.get(&key).copied(),
                    SendEnds::WhenTaken => self.taken.get(&key).copied(),
                }
            }
            Op::ReceiveWait { message } => {
                self.sent.get(&incoming(stage, message)).map(|at| at + self.message)
            }
            Op::ReduceWait { over: Over::Tied, .. } => self.complete(Joint::Tied, 2),
            Op::NormWait { axis: Axis::Pipeline } | Op::ShareWait => self.complete(Joint::Sum, self.stages),
            _ => Some(0.0),
        }
    }

    fn complete(&self, joint: Joint, stages: usize) -> Option<f64> {
        self.joined.get(&joint).filter(|(count, _)| *count == stages).map(|&(_, last)| last)
    }

    /// Tells the other stages what was done.
    fn note(&mut self, stage: usize, op: Op, now: f64) {
        match op {
            Op::SendStart { message } => _ = self.sent.insert(outgoing(stage, message), now),
            Op::ReceiveStart { message } => _ = self.expected.insert(incoming(stage, message), now),
            Op::ReceiveWait { message } => _ = self.taken.insert(incoming(stage, message), now),
            Op::ReduceStart { over: Over::Tied, .. } => self.join(Joint::Tied, now),
            Op::NormStart { axis: Axis::Pipeline } | Op::ShareStart => self.join(Joint::Sum, now),
            _ => {}
        }
    }

    fn join(&mut self, joint: Joint, now: f64) {
        let (count, last) = self.joined.entry(joint).or_insert((0, 0.0));
        *count += 1;
        *last = last.max(now);
    }
}

fn outgoing(stage: usize, message: Message) -> Key {
    (stage, message)
}

fn incoming(stage: usize, message: Message) -> Key {
    (message.peer, Message { peer: stage, ..message })
}

impl fmt::Display for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("deadlock:")?;
        for (i, (stage, op)) in self.stuck.iter().enumerate() {
            let comma = if i == 0 { "" } else { ";" };
            write!(f, "{comma} stage {stage} is in \"{op}\"")?;
        }
        Ok(())
    }
}

impl std::error::Error for Deadlock {}

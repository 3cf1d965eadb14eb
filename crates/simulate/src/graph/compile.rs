//! Compiles programs into nodes: the one place beside the interpreter in `rank` that decides what an op does.

use std::mem::Discriminant;

use kintsugi_plan::{
    Axis, Block, Group, Message, MessageKind, Op, OpKind, Plan, Sharding, StepOp, Transfer, Unit, When,
};
use rustc_hash::FxHashMap;

use super::period::Periods;

/// How much of a program is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of it.
    Step,
    /// Up to the last pass, and the message that it sends.
    Passes,
}

/// Whether ops that run back to back share a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Consecutive ops share one node, so that fewer nodes are evaluated.
    Merged,
    /// Every op has its own node, so that its span can be recorded.
    Single,
}

/// A timed operation of one stage. An op is one or more nodes: a block may start and await transfers between its
/// kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// Runs the ops of a row back to back.
    Run(u16),
    /// Runs an op whose cost depends on everything that the stage holds.
    RunStep(StepOp),
    /// Starts a stage's own transfer. Its end is stored in a slot.
    Start { cost: u16, slot: u32 },
    /// Waits for that transfer.
    Wait { cost: u16, slot: u32 },
    /// Starts sending a message.
    Send { rendezvous: Rendezvous, first: bool },
    /// This side is ready: to receive a message, or for a transfer between stages.
    Join { rendezvous: Rendezvous, first: bool },
    /// Waits until all sides are ready and the data has arrived.
    Arrive { rendezvous: Rendezvous, last: bool },
}

/// A point at which several stages meet: a message between two, the sum of a tied table, a sum over all stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rendezvous {
    /// The activations into chunk `c` have channel `c`. The gradients and the joint operations of a step follow.
    pub channel: u16,
    /// Distinguishes the messages of a channel.
    pub micro: u32,
}

/// A node, and the op of the stage's program to which it belongs. A row of several ops has the number of its first op.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub node: Node,
    pub op: u32,
}

impl Node {
    /// The same node for a micro-batch that comes `by` later.
    pub fn later(self, by: u32) -> Node {
        let shift = |at: Rendezvous| Rendezvous { micro: at.micro + by, ..at };
        match self {
            Node::Send { rendezvous, first } => Node::Send { rendezvous: shift(rendezvous), first },
            Node::Join { rendezvous, first } => Node::Join { rendezvous: shift(rendezvous), first },
            Node::Arrive { rendezvous, last } => Node::Arrive { rendezvous: shift(rendezvous), last },
            Node::Run(_) | Node::RunStep(_) | Node::Start { .. } | Node::Wait { .. } => self,
        }
    }
}

/// The nodes of every stage.
#[derive(Debug)]
pub(super) struct GraphNodes {
    pub stages: Vec<StageNodes>,
    /// The ops with a cost, one of each kind. Nodes refer to them by number.
    pub kinds: Vec<OpKind>,
    /// Each row is a sequence of op kinds that one node runs.
    pub rows: Vec<Vec<u16>>,
    /// How many stages take part in the rendezvous of each channel.
    pub sides: Vec<usize>,
    /// The stage of each slot for a stage's own transfer.
    pub slots: Vec<u16>,
}

/// The nodes of one stage, and the starts of the periods of its schedule.
#[derive(Debug, Default)]
pub(super) struct StageNodes {
    pub steps: Vec<Step>,
    /// The index of each period's first forward. Empty for interleaved schedules.
    pub forwards: Vec<usize>,
    /// The index of each period's first backward, for GPipe and interleaved schedules. For interleaved ones it is the second
    /// backward, because that is the first one that waits for a send.
    pub backwards: Vec<usize>,
}

/// Compiles the programs of all stages.
pub(super) fn compile(plan: &Plan, extent: Extent, rows: Rows) -> GraphNodes {
    let layers = plan.pipeline.layers.iter().enumerate();
    let mut compiler = Compiler {
        chunks: plan.chunks(),
        chunk_of_layer: layers.flat_map(|(chunk, &count)| vec![chunk; count]).collect(),
        merge: rows == Rows::Merged,
        kinds: Numbers::default(),
        rows: Numbers::default(),
        slots: Numbers::default(),
        stage: StageNodes::default(),
        row: Vec::new(),
        row_op: 0,
    };
    let stages = (0..plan.mesh.pp()).map(|stage| compiler.stage(plan, stage, extent)).collect();
    let mut sides = vec![2; compiler.chunks * 2 + 2];
    sides[compiler.chunks * 2 + SUM] = plan.mesh.pp();
    GraphNodes {
        stages,
        kinds: compiler.kinds.all,
        rows: compiler.rows.all,
        sides,
        slots: compiler.slots.all.iter().map(|&(stage, ..)| stage as u16).collect(),
    }
}

/// The channels after those of messages.
const TIED: usize = 0;
const SUM: usize = 1;

struct Compiler {
    chunks: usize,
    chunk_of_layer: Vec<usize>,
    merge: bool,
    kinds: Numbers<OpKind>,
    rows: Numbers<Vec<u16>>,
    /// By stage, transfer and unit.
    slots: Numbers<(usize, Discriminant<Transfer>, Option<Unit>)>,
    stage: StageNodes,
    /// The row under construction, and its first op.
    row: Vec<u16>,
    row_op: u32,
}

/// Assigns numbers to values, in the order of their first occurrence.
struct Numbers<T> {
    all: Vec<T>,
    number: FxHashMap<T, u32>,
}

impl<T> Default for Numbers<T> {
    fn default() -> Self {
        Numbers { all: Vec::new(), number: FxHashMap::default() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Numbers<T> {
    fn of(&mut self, value: &T) -> u32 {
        if let Some(&number) = self.number.get(value) {
            return number;
        }
        let number = self.all.len() as u32;
        self.all.push(value.clone());
        self.number.insert(value.clone(), number);
        number
    }
}

/// Whether an op belongs to a whole step, however many portions of micro-batches it has.
fn runs_once_a_step(plan: &Plan, op: Op) -> bool {
    let Sharding { weights, gather, .. } = plan.sharding;
    let gathers = matches!(op.transfer(), Some(Transfer::Gather { .. }));
    let reduces = matches!(op.transfer(), Some(Transfer::Reduce { .. }));
    op == Op::Step(StepOp::Begin)
        || gathers && weights > 1 && gather == When::Step
        || reduces && !plan.sharding.reduces_every_micro_batch()
}

impl Compiler {
    fn stage(&mut self, plan: &Plan, stage: usize, extent: Extent) -> StageNodes {
        let mut program = plan.program(stage);
        if extent == Extent::Passes {
            let last = program.ops.iter().rposition(|op| op.computation().is_some()).unwrap_or(0);
            let rest = program.ops.split_off(last + 1);
            program.ops.extend(rest.into_iter().filter(|op| matches!(op, Op::Start(Transfer::Send(_)))));
            program.ops.retain(|&op| !runs_once_a_step(plan, op));
        }
        let mut periods = Periods::new(plan, stage);
        for (index, &op) in program.ops.iter().enumerate() {
            if periods.begins_forward(op) {
                self.finish_row();
                self.stage.forwards.push(self.stage.steps.len());
            }
            if periods.begins_backward(op) {
                self.finish_row();
                self.stage.backwards.push(self.stage.steps.len());
            }
            self.op(stage, op, index as u32);
        }
        self.finish_row();
        std::mem::take(&mut self.stage)
    }

    /// Appends the nodes of an op.
    fn op(&mut self, stage: usize, op: Op, index: u32) {
        match op {
            Op::Step(op) => self.push(Node::RunStep(op), index),
            Op::Load { .. } | Op::Compute { .. } | Op::Matrices { .. } => self.run(op, index),
            Op::Start(transfer) => {
                self.run_if_of_unit(op, index);
                let node = match (transfer, self.rendezvous(transfer)) {
                    (Transfer::Send(_), Some(rendezvous)) => Node::Send { rendezvous, first: false },
                    (_, Some(rendezvous)) => Node::Join { rendezvous, first: false },
                    (_, None) => {
                        let (cost, slot) = self.own_transfer(stage, transfer);
                        Node::Start { cost, slot }
                    }
                };
                self.push(node, index);
            }
            Op::Wait(transfer) => {
                let node = if let Some(rendezvous) = self.rendezvous(transfer) {
                    Node::Arrive { rendezvous, last: false }
                } else {
                    let (cost, slot) = self.own_transfer(stage, transfer);
                    Node::Wait { cost, slot }
                };
                self.push(node, index);
                self.run_if_of_unit(op, index);
            }
            // Frees memory: no kernel, no transfer.
            Op::Release { .. } | Op::Discard { .. } => {}
            Op::Feed { .. } | Op::Choose { .. } => unreachable!("a training step has no \"{op}\""),
        }
    }

    /// Runs the kernels of an op that transfers something of a unit: copies and codes before its start and after its wait.
    fn run_if_of_unit(&mut self, op: Op, index: u32) {
        if op.unit().is_some() {
            self.run(op, index);
        }
    }

    fn run(&mut self, op: Op, index: u32) {
        if self.row.is_empty() {
            self.row_op = index;
        }
        self.row.push(self.kinds.of(&op.kind()) as u16);
        if !self.merge {
            self.finish_row();
        }
    }

    fn finish_row(&mut self) {
        if !self.row.is_empty() {
            let row = self.rows.of(&self.row) as u16;
            self.stage.steps.push(Step { node: Node::Run(row), op: self.row_op });
            self.row.clear();
        }
    }

    fn push(&mut self, node: Node, op: u32) {
        self.finish_row();
        self.stage.steps.push(Step { node, op });
    }

    /// The kind of the op that starts a stage's own transfer, and the slot for its end. A stage has at most one transfer of
    /// a kind and unit at a time.
    fn own_transfer(&mut self, stage: usize, transfer: Transfer) -> (u16, u32) {
        let started = self.kinds.of(&Op::Start(transfer).kind()) as u16;
        (started, self.slots.of(&(stage, std::mem::discriminant(&transfer), transfer.unit())))
    }

    /// Where several stages meet for a transfer, if they do.
    fn rendezvous(&self, transfer: Transfer) -> Option<Rendezvous> {
        match (transfer.message(), transfer.group()) {
            (Some(message), _) => Some(self.message(message)),
            (None, Some(Group::Tied)) => Some(self.once_a_step(TIED)),
            (None, Some(Group::Along(Axis::Pipeline, _))) => {
                let is_norm = matches!(transfer, Transfer::Norm { .. });
                assert!(is_norm, "{transfer} needs a channel of its own");
                Some(self.once_a_step(SUM))
            }
            (None, Some(Group::Along(..) | Group::Nodes) | None) => None,
        }
    }

    /// Sender and receiver name a message by the block that receives it, so its chunk distinguishes it from all others of its
    /// kind and micro-batch.
    fn message(&self, message: Message) -> Rendezvous {
        let Block::Layer(layer) = message.block else { unreachable!("chunks meet between layers") };
        let chunk = self.chunk_of_layer[layer];
        let channel = match message.kind {
            MessageKind::Activation => chunk,
            MessageKind::Gradient => self.chunks + chunk,
        };
        Rendezvous { channel: channel as u16, micro: message.micro as u32 }
    }

    fn once_a_step(&self, what: usize) -> Rendezvous {
        Rendezvous { channel: (2 * self.chunks + what) as u16, micro: 0 }
    }
}

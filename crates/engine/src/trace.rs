//! When each op of a step ran on a rank, and each kernel where the device has kernels.

use std::rc::Rc;
use std::time::Duration;

use kintsugi_plan::Op;
use kintsugi_tensor::{Backend, Launch, Mark};

/// How long something took on a rank, by the clock of its device.
#[derive(Clone, Debug)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// What it did.
    pub work: Work,
    /// Since the step began.
    pub start: Duration,
    /// How long.
    pub duration: Duration,
}

/// What a rank did.
#[derive(Clone, Debug)]
pub enum Work {
    /// An op of the program, with what the device did of it and the time it waited.
    Op(Op),
    /// Something that the device ran as a part of an op.
    Kernel(String),
}

/// Times one step of a rank: each op lasts until the next begins.
pub(crate) struct Timer {
    rank: usize,
    backend: Rc<dyn Backend>,
    begun: Mark,
    ops: Vec<(Op, Mark)>,
}

impl Timer {
    /// The step begins.
    pub fn begin(rank: usize, backend: &Rc<dyn Backend>) -> Self {
        backend.note_launches();
        Timer { rank, backend: Rc::clone(backend), begun: backend.mark(), ops: Vec::new() }
    }

    /// An op begins.
    pub fn op(&mut self, op: Op) {
        self.ops.push((op, self.backend.mark()));
    }

    /// The step is over, and is waited for.
    pub fn end(self) -> Vec<Span> {
        let (end, launches) = (self.backend.mark(), self.backend.launches());
        let ends = self.ops.iter().skip(1).map(|(_, mark)| mark).chain([&end]);
        let ops = self.ops.iter().zip(ends).map(|((op, mark), end)| self.span(Work::Op(*op), mark, end));
        let kernel =
            |Launch { name, begun, ended }: &Launch| self.span(Work::Kernel(name.clone()), begun, ended);
        ops.chain(launches.iter().map(kernel)).collect()
    }

    fn span(&self, work: Work, from: &Mark, to: &Mark) -> Span {
        Span { rank: self.rank, work, start: from.since(&self.begun), duration: to.since(from) }
    }
}

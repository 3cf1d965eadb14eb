//! Copies of states in the memory of nodes: made while a run trains, and what a restarted run begins with.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use kintsugi_checkpoint::{CopyFolder, CopyPass, CopySet, CopyWriter, RunProgress};
use kintsugi_comm::Traffic;
use kintsugi_plan::{Op, Plan, Program};
use kintsugi_rank::{CopyKeeper, NoTokens, PassedCopy, StoreError};
use serde::{Deserialize, Serialize};

use crate::{RankError, Start, Worker};

/// A run that begins with copies of states.
#[derive(Clone, Debug)]
pub struct CopiedStart {
    /// The copies in the memory of this node.
    pub folder: CopyFolder,
    /// Those that the run begins with.
    pub set: CopySet,
    /// What the run would have started from without copies. A run that goes back after a spike, and finds no checkpoint, begins there.
    pub origin: Start,
}

impl CopiedStart {
    /// Sets a rank's weights and states.
    pub(crate) fn load(&self, worker: &mut Worker, plan: &Plan) -> Result<(), RankError> {
        let CopiedStart { folder, set: CopySet { progress, passes }, .. } = self;
        for pass in passes {
            self.pass(pass, worker, plan)?;
        }
        let copy = folder.open(worker.number, progress)?;
        worker.rank.restore(&mut &copy).map_err(StoreError::new)?;
        worker.run(&plan.restoration(worker.at.pp()), &mut NoTokens, |_, _| {})?;
        Ok(())
    }

    /// Takes part in the way of a copy to the rank that needs it, if this rank is on it.
    fn pass(&self, pass: &CopyPass, worker: &Worker, plan: &Plan) -> Result<(), RankError> {
        let CopiedStart { folder, set: CopySet { progress, .. }, .. } = self;
        let left = (0..=pass.nodes).find(|&left| plan.rank_before(pass.rank, left) == worker.number);
        let Some(left) = left else { return Ok(()) };
        let bytes = plan.copied_bytes(plan.mesh.coordinate(pass.rank).pp());
        if left == 0 {
            let mut writer = CopyWriter::new(folder.clone(), plan, worker.number);
            writer.write_again(progress, |to| worker.rank.pass_copy(bytes, PassedCopy::To(to)))?;
        } else if left == pass.nodes {
            let copy = folder.open(pass.rank, progress)?;
            worker.rank.pass_copy(bytes, PassedCopy::From(&mut &copy)).map_err(StoreError::new)?;
        } else {
            worker.rank.pass_copy(bytes, PassedCopy::Through).map_err(StoreError::new)?;
        }
        // A failed transfer leaves its buffer undefined.
        worker.world.failure().map_or(Ok(()), |failure| Err(failure.into()))
    }
}

/// The copying of a rank's states between steps.
pub(crate) struct Replication {
    program: Program,
    writer: Rc<RefCell<CopyWriter>>,
    measured: MeasuredCopies,
}

/// What copying has cost a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MeasuredCopies {
    /// Bytes that it has sent for the first set.
    pub traffic: Traffic,
    /// Bytes of its files.
    pub bytes: u64,
    /// Seconds of all sets.
    seconds: f64,
    sets: u64,
}

impl MeasuredCopies {
    /// Seconds of a set.
    pub fn seconds(&self) -> Option<f64> {
        (self.sets > 0).then(|| self.seconds / self.sets as f64)
    }
}

impl Replication {
    /// Gives the copies of a rank to the files of its node.
    pub fn new(folder: &CopyFolder, worker: &mut Worker, plan: &Plan) -> Self {
        let writer = CopyWriter::new(folder.clone(), plan, worker.number);
        let bytes = writer.reserved_bytes();
        let writer = Rc::new(RefCell::new(writer));
        worker.rank.keep_copies(Rc::<RefCell<CopyWriter>>::clone(&writer) as Rc<RefCell<dyn CopyKeeper>>);
        let measured = MeasuredCopies { traffic: Traffic::default(), bytes, seconds: 0.0, sets: 0 };
        Replication { program: plan.replication(worker.at.pp()), writer, measured }
    }

    /// Copies the states after a step. Every rank calls it.
    pub fn run(
        &mut self,
        worker: &mut Worker,
        progress: &RunProgress,
        mut watch: impl FnMut(&Op),
    ) -> Result<(), RankError> {
        let (begun, before) = (Instant::now(), worker.world.traffic(worker.number));
        self.writer.borrow_mut().begin(progress.step)?;
        worker.run(&self.program, &mut NoTokens, |_, op| watch(op))?;
        self.writer.borrow_mut().finish(progress)?;
        if self.measured.sets == 0 {
            self.measured.traffic = worker.world.traffic(worker.number).since(&before);
        }
        self.measured.sets += 1;
        self.measured.seconds += begun.elapsed().as_secs_f64();
        Ok(())
    }

    pub fn into_measured(self) -> MeasuredCopies {
        self.measured
    }
}

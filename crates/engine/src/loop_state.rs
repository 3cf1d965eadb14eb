//! What the training loop of a rank knows between two steps: what is due, what was saved, and why the run ends or goes back.

use std::ops::Range;

use kintsugi_checkpoint::{CheckpointError, SpikeRecord};
use kintsugi_comm::Traffic;
use kintsugi_data::DataError;
use kintsugi_plan::{OnSpike, Plan};
use kintsugi_rank::NonFinite;
use kintsugi_run::Spike;
use serde::{Deserialize, Serialize};

use crate::op_watch::OpWatch;
use crate::replication::Replication;
use crate::report::History;
use crate::spikes::SpikeDetector;
use crate::stragglers::{ComputeTime, Stragglers};
use crate::trace::MeasuredSpan;
use crate::{Start, TrainOptions};

/// The state of a rank's training loop.
pub(crate) struct LoopState {
    pub watch: OpWatch,
    /// How long this rank computes in a step. `None` if that is not measured.
    pub computing: Option<ComputeTime>,
    /// In rank 0, if ranks are compared.
    pub stragglers: Option<Stragglers>,
    pub history: History,
    /// Steps that the device replayed from a captured graph.
    pub replayed: u64,
    /// Consecutive skipped steps, up to the last finished step.
    pub skipped_in_a_row: u64,
    /// Whether a checkpoint is still to be saved because its step was skipped.
    pub save_due: bool,
    /// The step of the last checkpoint, if no step has succeeded since then.
    pub unconfirmed_save: Option<u64>,
    /// The step of the last checkpoint that a good step has followed.
    pub last_good_save: Option<u64>,
    /// Checkpoints of this run, also those that could not be written.
    pub saves: u64,
    pub spikes: SpikeDetector,
    /// A spike that the run must go back for.
    pub spike: Option<FoundSpike>,
    /// How often this run went back. [`SpikeRecord`] also counts earlier runs.
    pub rollbacks: usize,
    /// Bytes sent in the first step of this run.
    pub traffic: Option<Traffic>,
    /// The copying of states, if they are copied.
    pub replication: Option<Replication>,
    pub spans: Vec<MeasuredSpan>,
    /// Why the tokens of the next step could not be read, if they could not.
    pub data_error: Option<DataError>,
    pub stop_agreed: bool,
    /// Why the run ends before its last step, if it does.
    pub early_end: Option<EarlyEnd>,
    /// If the run gave up: the values of this rank that are not finite.
    pub non_finite: Option<NonFinite>,
}

impl LoopState {
    /// The state before the first step of this run.
    pub fn new(plan: &Plan, options: &TrainOptions, watch: OpWatch) -> Self {
        let before = options.start.progress();
        let mut record = before.spikes.clone();
        record.skipped.add_all(&options.skipped);
        LoopState {
            watch,
            computing: None,
            stragglers: None,
            history: History::new(&before),
            replayed: 0,
            skipped_in_a_row: 0,
            save_due: false,
            unconfirmed_save: None,
            last_good_save: None,
            saves: 0,
            spikes: SpikeDetector::new(&plan.run, record),
            spike: None,
            rollbacks: 0,
            traffic: None,
            replication: None,
            spans: Vec::new(),
            data_error: None,
            stop_agreed: false,
            early_end: None,
            non_finite: None,
        }
    }

    /// Whether the run goes back to a checkpoint at the next spike.
    pub fn may_go_back(&self, plan: &Plan) -> bool {
        plan.run.on_spike == OnSpike::Rollback && self.spikes.record.rollbacks < plan.run.max_rollbacks
    }

    /// The spike that the run goes back for. If it may not, it ends.
    pub fn take_spike(&mut self, plan: &Plan) -> Option<FoundSpike> {
        let spike = self.spike.take();
        if !self.may_go_back(plan) {
            self.early_end = spike.map(|spike| EarlyEnd::Spike(spike.spike));
            return None;
        }
        spike
    }

    /// The state after the run went back to `start`.
    pub fn go_back(&mut self, spike: &FoundSpike, start: &Start, plan: &Plan) -> Result<(), CheckpointError> {
        let before = start.progress();
        let record = &mut self.spikes.record;
        record.skipped.add(spike.samples(start, record, plan)?);
        record.rollbacks += 1;
        record.losses.clone_from(&before.spikes.losses);
        record.norms.clone_from(&before.spikes.norms);
        self.history.go_back(&before);
        self.rollbacks += 1;
        self.skipped_in_a_row = 0;
        self.save_due = false;
        self.unconfirmed_save = None;
        Ok(())
    }
}

/// Why a run ends before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum EarlyEnd {
    /// It was asked to stop, or a rank cannot read its tokens.
    Stopped,
    /// Too many steps in a row were skipped.
    GaveUp,
    /// A step was a spike, and the run may not go back again.
    Spike(Spike),
}

/// A spike that the run goes back for.
pub(crate) struct FoundSpike {
    /// From 1.
    pub step: u64,
    /// The global batch that it read.
    pub batch: u64,
    pub spike: Spike,
}

impl FoundSpike {
    /// The samples that are skipped if the run continues from `start`. Until now it has skipped those in `record`.
    pub fn samples(
        &self,
        start: &Start,
        record: &SpikeRecord,
        plan: &Plan,
    ) -> Result<Range<u64>, CheckpointError> {
        let batches = match self.spike {
            Spike::Loss(_) | Spike::GradNorm(_) => plan.run.spike_batches,
            Spike::NotFinite { steps } => steps,
        };
        let end = self.batch + 1;
        let first = end.saturating_sub(batches).max(start.batches_consumed(plan)?);
        let global = plan.batch.global as u64;
        Ok(record.skipped.indices(first * global..end * global))
    }
}

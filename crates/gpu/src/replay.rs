//! Replay of a training step as a graph: captured once, then launched with one call.
//!
//! The backend detects by itself that steps are identical. Every enqueued operation and every allocated address is
//! added to a digest ([`Stream::add_to_digest`]), and so is everything that happens only at first calls
//! ([`Stream::mark_not_repeatable`]). Once two consecutive steps have the same digest, the next one is captured. A
//! graph reads its tokens from its own page-locked memory. Two graphs alternate: the host fills the memory of one while
//! the other runs.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use super::memory::DeviceSlab;
use super::pinned::Pinned;
use super::stream::Stream;
use crate::driver::{Event, Graph};
use crate::error::GpuError;
use kintsugi_tensor::{ReplayOutcome, ReplayRequest};

/// Graphs that alternate.
const GRAPHS: usize = 2;

/// Why a captured step was rejected.
const DIFFERS: &str = "a step differs from the two before it";

/// Detects, captures and replays the identical steps of one stream.
pub(crate) struct Replay {
    stream: Stream,
    slab: Rc<DeviceSlab>,
    history: RefCell<StepHistory>,
    graphs: RefCell<Vec<CapturedStep>>,
    /// Index of the graph that runs next.
    turn: Cell<usize>,
    mode: RefCell<Mode>,
    /// Whether a capture has failed; then none is tried repeated.
    refused: Cell<bool>,
}

/// What happens to operations that are enqueued now.
enum Mode {
    /// No step is running, or it is not recorded.
    Idle,
    /// A step is enqueued and its signature recorded. So far it has uploaded this many bytes of tokens.
    Recording { bytes: usize },
    /// A step is captured. Its operations have not run, so after a failure the step can start repeated.
    Capturing { tokens: PinnedTokens, failure: Option<GpuError> },
}

/// Identifies a step: steps with equal signatures do the same work.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StepSignature {
    /// Digest of all enqueued operations and allocated addresses.
    digest: u64,
    /// Memory that was free when the step began.
    free: Vec<(u64, u64)>,
    /// Bytes of its tokens.
    bytes: usize,
}

/// The last step's signature, and whether the step before it had the same.
#[derive(Debug, Default)]
struct StepHistory {
    last: Option<StepSignature>,
    repeated: bool,
}

impl StepHistory {
    fn record(&mut self, step: StepSignature) {
        self.repeated = self.last.as_ref() == Some(&step);
        self.last = Some(step);
    }

    /// The signature of the next step, if the last two steps were equal and the same memory is free.
    fn expected(&self, free: &[(u64, u64)]) -> Option<StepSignature> {
        self.last.clone().filter(|last| self.repeated && last.free == free)
    }
}

/// The tokens of a step, in page-locked memory at a fixed address.
struct PinnedTokens {
    memory: Pinned,
    bytes: usize,
}

struct CapturedStep {
    graph: Box<dyn Graph>,
    tokens: PinnedTokens,
    /// Memory that was free when the step was captured. The graph's addresses are valid only if the same memory is
    /// free.
    free: Vec<(u64, u64)>,
    /// Completion of its last launch.
    ran: Box<dyn Event>,
}

impl Replay {
    /// No step has run yet.
    pub(crate) fn new(stream: &Stream, slab: &Rc<DeviceSlab>) -> Self {
        Replay {
            stream: stream.clone(),
            slab: Rc::clone(slab),
            history: RefCell::default(),
            graphs: RefCell::default(),
            turn: Cell::new(0),
            mode: RefCell::new(Mode::Idle),
            refused: Cell::new(false),
        }
    }

    /// See [`Backend::replay_step`](kintsugi_tensor::Backend::replay_step).
    pub(crate) fn replay_step(&self, step: &mut dyn FnMut(ReplayRequest)) -> Result<ReplayOutcome, GpuError> {
        if self.refused.get() {
            step(ReplayRequest::WholeStep);
            return Ok(ReplayOutcome::Enqueued);
        }
        let free = self.slab.free();
        if let Some(captured) = self.graphs.borrow().get(self.turn.get())
            && captured.free == free
        {
            captured.refill(&self.stream, step)?;
            self.launch(captured)?;
            return Ok(ReplayOutcome::Replayed);
        }
        let expected = self.history.borrow().expected(&free);
        let Some(expected) = expected else {
            self.enqueue_and_record(free, step);
            return Ok(ReplayOutcome::Enqueued);
        };
        if let Err(error) = self.capture(expected, step).and_then(|captured| self.first_launch(captured)) {
            self.refused.set(true);
            self.graphs.borrow_mut().clear();
            step(ReplayRequest::WholeStep);
            return Ok(ReplayOutcome::Refused(error.to_string()));
        }
        Ok(ReplayOutcome::Enqueued)
    }

    /// Uploads tokens as part of a captured step. Returns `false` if no capture is under way and the caller must upload
    /// them.
    ///
    /// # Safety
    /// `to` must be device memory with room for `bytes`.
    pub(crate) unsafe fn upload(&self, bytes: &[u8], to: u64) -> Result<bool, GpuError> {
        match &mut *self.mode.borrow_mut() {
            Mode::Idle => Ok(false),
            Mode::Recording { bytes: sum } => {
                *sum += bytes.len();
                Ok(false)
            }
            Mode::Capturing { tokens, .. } => {
                let at = tokens.bytes;
                tokens.bytes += bytes.len();
                if tokens.bytes > tokens.memory.bytes() {
                    return Err(GpuError::Unsupported(DIFFERS.to_owned()));
                }
                // SAFETY: nothing reads these bytes before the graph is launched; the rest is the caller's promise.
                unsafe {
                    tokens.memory.put(at, bytes);
                    tokens.memory.upload(at, bytes.len(), to)?;
                }
                Ok(true)
            }
        }
    }

    /// Stores a failure if a step is being captured; returns it otherwise.
    pub(crate) fn defer_failure(&self, error: GpuError) -> Result<(), GpuError> {
        match &mut *self.mode.borrow_mut() {
            Mode::Capturing { failure, .. } => {
                failure.get_or_insert(error);
                Ok(())
            }
            Mode::Idle | Mode::Recording { .. } => Err(error),
        }
    }

    /// Drops all graphs after they have run. Later steps may be captured again.
    pub(crate) fn drop_graphs(&self) {
        let graphs = self.graphs.take();
        for graph in &graphs {
            // A failure belongs to an operation of the graph. Whoever reads its result reports it.
            let _ = graph.ran.synchronize();
        }
        self.history.take();
    }

    /// Enqueues a step operation by operation, and records its signature.
    fn enqueue_and_record(&self, free: Vec<(u64, u64)>, step: &mut dyn FnMut(ReplayRequest)) {
        self.mode.replace(Mode::Recording { bytes: 0 });
        self.stream.begin_digest();
        step(ReplayRequest::WholeStep);
        if let Mode::Recording { bytes } = self.mode.replace(Mode::Idle) {
            let signature = StepSignature { digest: self.stream.digest(), free, bytes };
            self.history.borrow_mut().record(signature);
        }
    }

    /// Captures a step instead of running it.
    fn capture(
        &self,
        expected: StepSignature,
        step: &mut dyn FnMut(ReplayRequest),
    ) -> Result<CapturedStep, GpuError> {
        let ran = self.stream.driver().event(false)?;
        let tokens = PinnedTokens { memory: Pinned::new(&self.stream, expected.bytes.max(1))?, bytes: 0 };
        let queue = self.stream.queue();
        queue.begin_capture()?;
        self.mode.replace(Mode::Capturing { tokens, failure: None });
        self.stream.begin_digest();
        step(ReplayRequest::WholeStep);
        let Mode::Capturing { tokens, failure } = self.mode.replace(Mode::Idle) else {
            unreachable!("a step does not end its own capture");
        };
        let graph = queue.end_capture();
        if let Some(failure) = failure {
            return Err(failure);
        }
        let graph = graph?.ok_or_else(|| GpuError::Unsupported("a captured step has no graph".to_owned()))?;
        if (self.stream.digest(), tokens.bytes) != (expected.digest, expected.bytes) {
            return Err(GpuError::Unsupported(DIFFERS.to_owned()));
        }
        Ok(CapturedStep { graph, tokens, free: expected.free, ran })
    }

    /// Launches a captured step for the first time. It replaces the graph that was captured when other memory was free.
    fn first_launch(&self, captured: CapturedStep) -> Result<(), GpuError> {
        let turn = self.turn.get();
        self.launch(&captured)?;
        let mut graphs = self.graphs.borrow_mut();
        match graphs.get_mut(turn) {
            Some(old) => *old = captured,
            None => graphs.push(captured),
        }
        Ok(())
    }

    fn launch(&self, captured: &CapturedStep) -> Result<(), GpuError> {
        captured.graph.launch()?;
        captured.ran.record(self.stream.queue())?;
        self.turn.set((self.turn.get() + 1) % GRAPHS);
        Ok(())
    }
}

impl CapturedStep {
    /// Writes new tokens over the old ones, after the last launch has read those.
    fn refill(&self, stream: &Stream, step: &mut dyn FnMut(ReplayRequest)) -> Result<(), GpuError> {
        // The result of that launch has been read, unless the caller has more steps in flight than there are graphs.
        if !self.ran.is_complete()? {
            stream.host_waits().counted(|| self.ran.synchronize())?;
        }
        let mut at = 0;
        step(ReplayRequest::Tokens(&mut |ids| {
            let bytes = token_bytes(ids);
            // SAFETY: the last launch, which alone read these bytes, has run.
            unsafe { self.tokens.memory.put(at, &bytes) };
            at += bytes.len();
        }));
        assert_eq!(at, self.tokens.bytes, "a replayed step has the same number of tokens every time");
        Ok(())
    }
}

/// Token ids as bytes.
pub(crate) fn token_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_ne_bytes()).collect()
}

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (graphs, refused) = (self.graphs.borrow().len(), self.refused.get());
        f.debug_struct("Replay").field("graphs", &graphs).field("refused", &refused).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_equal_steps_predict_a_third() {
        let step = |digest, free| StepSignature { digest, free: vec![(0, free)], bytes: 8 };
        let mut history = StepHistory::default();
        let predicted = |history: &StepHistory, free| history.expected(&[(0, free)]);
        for (step, expected) in [
            (step(1, 100), None),
            (step(2, 100), None),
            (step(2, 100), Some(step(2, 100))),
            (step(2, 100), Some(step(2, 100))),
            (step(3, 100), None),
            (step(3, 50), None),
            (step(3, 50), None),
        ] {
            history.record(step);
            assert_eq!(predicted(&history, 100), expected);
        }
        assert_eq!(predicted(&history, 50), Some(step(3, 50)), "if the same memory is free");
    }
}

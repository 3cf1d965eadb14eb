//! A step that is the same every time becomes a CUDA graph: captured once, then launched with one call.
//!
//! Nobody says that a step is the same; it is seen. Everything that is enqueued and every address that is given out goes
//! into a digest ([`Stream::note`]), and so does whatever happens at first calls only ([`Stream::novel`]). Once two steps
//! in a row have the same digest, the next is captured. A graph reads its tokens from page-locked memory of its own,
//! and there are two graphs in turn: the host fills the memory of one while the other runs.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaEvent, CudaGraph};

use super::error::CudaError;
use super::memory::DeviceSlab;
use super::pinned::Pinned;
use super::stream::Stream;
use crate::{ReplayOutcome, ReplayRequest};

/// Graphs that take turns.
const GRAPHS: usize = 2;

/// Why what was captured is no use.
const DIFFERS: &str = "a step differs from the two before it";

/// The repeated step of one stream.
pub(crate) struct Replay {
    stream: Stream,
    slab: Rc<DeviceSlab>,
    watch: RefCell<Watch>,
    graphs: RefCell<Vec<Captured>>,
    /// The graph whose turn it is.
    turn: Cell<usize>,
    mode: RefCell<Mode>,
    /// Whether capturing has failed.
    refused: Cell<bool>,
}

/// What is going on.
enum Mode {
    /// No step, or one that nobody watches.
    Idle,
    /// A step is enqueued one by one, with so many bytes of tokens so far.
    Watching { bytes: usize },
    /// A step is captured. What fails meanwhile has not been run, so the step can begin anew.
    Capturing { tokens: Tokens, failure: Option<CudaError> },
}

/// By what a step is known again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Footprint {
    /// Of everything that was enqueued and given out.
    digest: u64,
    /// Memory that was free when it began.
    free: Vec<(u64, u64)>,
    /// Bytes of its tokens.
    bytes: usize,
}

/// Sees when steps have become the same.
#[derive(Debug, Default)]
struct Watch {
    last: Option<Footprint>,
    again: bool,
}

impl Watch {
    fn saw(&mut self, step: Footprint) {
        self.again = self.last.as_ref() == Some(&step);
        self.last = Some(step);
    }

    /// The footprint that the next step will have, if that can be told.
    fn expected(&self, free: &[(u64, u64)]) -> Option<Footprint> {
        self.last.clone().filter(|last| self.again && last.free == free)
    }
}

/// The tokens of a step, at addresses that stay.
struct Tokens {
    memory: Pinned,
    bytes: usize,
}

struct Captured {
    graph: CudaGraph,
    tokens: Tokens,
    /// Memory that was free when it was captured: only then are its addresses those that the step would get.
    free: Vec<(u64, u64)>,
    /// Its last launch.
    ran: CudaEvent,
}

impl Replay {
    /// Nothing has been seen yet.
    pub(crate) fn new(stream: &Stream, slab: &Rc<DeviceSlab>) -> Self {
        Replay {
            stream: stream.clone(),
            slab: Rc::clone(slab),
            watch: RefCell::default(),
            graphs: RefCell::default(),
            turn: Cell::new(0),
            mode: RefCell::new(Mode::Idle),
            refused: Cell::new(false),
        }
    }

    /// See [`Backend::replay_step`](crate::Backend::replay_step).
    pub(crate) fn replay_step(
        &self,
        step: &mut dyn FnMut(ReplayRequest),
    ) -> Result<ReplayOutcome, CudaError> {
        if self.refused.get() {
            step(ReplayRequest::WholeStep);
            return Ok(ReplayOutcome::Enqueued);
        }
        let free = self.slab.free();
        if let Some(captured) = self.graphs.borrow().get(self.turn.get())
            && captured.free == free
        {
            captured.refill(step)?;
            self.launch(captured)?;
            return Ok(ReplayOutcome::Replayed);
        }
        let expected = self.watch.borrow().expected(&free);
        let Some(expected) = expected else {
            self.watch(free, step);
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

    /// Uploads a captured step's tokens; `false` if they are to go another way.
    ///
    /// # Safety
    /// `to` must be device memory with room for `bytes`.
    pub(crate) unsafe fn upload(&self, bytes: &[u8], to: u64) -> Result<bool, CudaError> {
        match &mut *self.mode.borrow_mut() {
            Mode::Idle => Ok(false),
            Mode::Watching { bytes: sum } => {
                *sum += bytes.len();
                Ok(false)
            }
            Mode::Capturing { tokens, .. } => {
                let at = tokens.bytes;
                tokens.bytes += bytes.len();
                if tokens.bytes > tokens.memory.bytes() {
                    return Err(CudaError::Unsupported(DIFFERS.to_owned()));
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

    /// Keeps a failure while a step is captured; gives it back otherwise.
    pub(crate) fn keep(&self, error: CudaError) -> Result<(), CudaError> {
        match &mut *self.mode.borrow_mut() {
            Mode::Capturing { failure, .. } => {
                failure.get_or_insert(error);
                Ok(())
            }
            Mode::Idle | Mode::Watching { .. } => Err(error),
        }
    }

    /// Has a step enqueued one by one, and remembers its footprint.
    fn watch(&self, free: Vec<(u64, u64)>, step: &mut dyn FnMut(ReplayRequest)) {
        self.mode.replace(Mode::Watching { bytes: 0 });
        self.stream.begin_digest();
        step(ReplayRequest::WholeStep);
        if let Mode::Watching { bytes } = self.mode.replace(Mode::Idle) {
            let footprint = Footprint { digest: self.stream.digest(), free, bytes };
            self.watch.borrow_mut().saw(footprint);
        }
    }

    /// Captures a step instead of running it.
    fn capture(
        &self,
        expected: Footprint,
        step: &mut dyn FnMut(ReplayRequest),
    ) -> Result<Captured, CudaError> {
        let ran = self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING))?;
        let tokens = Tokens { memory: Pinned::new(&self.stream, expected.bytes.max(1))?, bytes: 0 };
        let queue = self.stream.queue();
        queue.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        self.mode.replace(Mode::Capturing { tokens, failure: None });
        self.stream.begin_digest();
        step(ReplayRequest::WholeStep);
        let Mode::Capturing { tokens, failure } = self.mode.replace(Mode::Idle) else {
            unreachable!("a step does not end its own capture");
        };
        let graph = queue.end_capture(CUgraphInstantiate_flags(0));
        if let Some(failure) = failure {
            return Err(failure);
        }
        let graph = graph?.ok_or_else(|| CudaError::Driver("a captured step has no graph".to_owned()))?;
        if (self.stream.digest(), tokens.bytes) != (expected.digest, expected.bytes) {
            return Err(CudaError::Unsupported(DIFFERS.to_owned()));
        }
        Ok(Captured { graph, tokens, free: expected.free, ran })
    }

    /// Runs what was captured, and keeps it in the place of one that memory has changed for.
    fn first_launch(&self, captured: Captured) -> Result<(), CudaError> {
        let turn = self.turn.get();
        self.launch(&captured)?;
        let mut graphs = self.graphs.borrow_mut();
        match graphs.get_mut(turn) {
            Some(old) => *old = captured,
            None => graphs.push(captured),
        }
        Ok(())
    }

    fn launch(&self, captured: &Captured) -> Result<(), CudaError> {
        captured.graph.launch()?;
        captured.ran.record(self.stream.queue())?;
        self.turn.set((self.turn.get() + 1) % GRAPHS);
        Ok(())
    }
}

impl Captured {
    /// Puts new tokens in the place of the old ones, when those have been read.
    fn refill(&self, step: &mut dyn FnMut(ReplayRequest)) -> Result<(), CudaError> {
        self.ran.synchronize()?;
        let mut at = 0;
        step(ReplayRequest::Tokens(&mut |ids| {
            let bytes = token_bytes(ids);
            // SAFETY: the last launch, which alone read these bytes, has run.
            unsafe { self.tokens.memory.put(at, &bytes) };
            at += bytes.len();
        }));
        assert_eq!(at, self.tokens.bytes, "a repeated step has as many tokens every time");
        Ok(())
    }
}

/// Token ids as they lie in memory.
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
    fn two_steps_that_are_the_same_foretell_a_third() {
        let step = |digest, free| Footprint { digest, free: vec![(0, free)], bytes: 8 };
        let mut watch = Watch::default();
        let foretold = |watch: &Watch, free| watch.expected(&[(0, free)]);
        for (seen, expected) in [
            (step(1, 100), None),
            (step(2, 100), None),
            (step(2, 100), Some(step(2, 100))),
            (step(2, 100), Some(step(2, 100))),
            (step(3, 100), None),
            (step(3, 50), None),
            (step(3, 50), None),
        ] {
            watch.saw(seen);
            assert_eq!(foretold(&watch, 100), expected);
        }
        assert_eq!(foretold(&watch, 50), Some(step(3, 50)), "where memory is as it was");
    }
}

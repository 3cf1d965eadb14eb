//! Finding the fastest algorithm on real work: while a product is on trial, each call runs the next candidate.
//! Candidates differ in the algorithm, and in what is left to a kernel of ours, whose time counts.
//!
//! Nothing is computed twice and no result is disturbed, products that add to their output included; the data, the
//! factor of the output and the temperature of the card are those of training.

use std::collections::VecDeque;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, result};

use super::product::Chosen;
use crate::cuda::error::CudaError;
use crate::cuda::stream::Stream;

/// Timed runs that every candidate gets; the first also loads its kernel, so one is not enough.
const ROUNDS: usize = 3;

/// Candidates that take turns until each has been timed often enough.
#[derive(Debug)]
pub struct Trial {
    candidates: Vec<Candidate>,
    next: usize,
    running: VecDeque<Timing>,
}

#[derive(Debug)]
struct Candidate {
    chosen: Chosen,
    runs: usize,
    shortest: f32,
}

/// A run that may not have ended yet.
#[derive(Debug)]
struct Timing {
    candidate: usize,
    start: CudaEvent,
    end: CudaEvent,
}

impl Trial {
    /// A trial of at least one candidate.
    pub fn new(candidates: Vec<Chosen>) -> Self {
        assert!(!candidates.is_empty(), "a trial of nothing");
        let candidate = |chosen| Candidate { chosen, runs: 0, shortest: f32::INFINITY };
        let candidates = candidates.into_iter().map(candidate).collect();
        Trial { candidates, next: 0, running: VecDeque::new() }
    }

    /// Runs one product with the next candidate. One that fails is out, and the one after it runs instead.
    pub fn run(
        &mut self,
        stream: &Stream,
        product: impl Fn(Chosen) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        stream.novel();
        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let (start, end) = (event()?, event()?);
        record(&start, stream)?;
        let candidate = loop {
            let candidate = self.next % self.candidates.len();
            match product(self.candidates[candidate].chosen) {
                Ok(()) => break candidate,
                Err(error) if self.candidates.len() == 1 => return Err(error),
                Err(_) => self.drop_out(candidate),
            }
        };
        record(&end, stream)?;
        self.running.push_back(Timing { candidate, start, end });
        self.next = candidate + 1;
        Ok(())
    }

    /// Removes a candidate. What still runs is no longer timed: its candidates have other places now.
    fn drop_out(&mut self, candidate: usize) {
        self.candidates.remove(candidate);
        self.running.clear();
    }

    /// The fastest candidate, once every one has been timed often enough. Never waits.
    pub fn verdict(&mut self) -> Result<Option<Chosen>, CudaError> {
        while let Some(timing) = self.running.front() {
            if !timing.end.try_is_complete()? {
                break;
            }
            let taken = timing.start.elapsed_ms(&timing.end)?;
            self.timed(timing.candidate, taken);
            self.running.pop_front();
        }
        Ok(self.fastest())
    }

    fn timed(&mut self, candidate: usize, taken: f32) {
        let Candidate { runs, shortest, .. } = &mut self.candidates[candidate];
        *runs += 1;
        *shortest = shortest.min(taken);
    }

    fn fastest(&self) -> Option<Chosen> {
        if self.candidates.iter().any(|candidate| candidate.runs < ROUNDS) {
            return None;
        }
        let fastest = self.candidates.iter().min_by(|a, b| a.shortest.total_cmp(&b.shortest));
        fastest.map(|candidate| candidate.chosen)
    }
}

fn record(event: &CudaEvent, stream: &Stream) -> Result<(), CudaError> {
    // SAFETY: both belong to the stream's context, and both live.
    unsafe { result::event::record(event.cu_event(), stream.handle())? };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::library::Algorithm;
    use super::*;

    #[test]
    fn the_shortest_run_decides_when_all_have_run_often_enough() {
        let chosen = |way| Chosen { way, algorithm: Algorithm { data: [0; 8] } };
        let mut trial = Trial::new(vec![chosen(1), chosen(2)]);
        for taken in [[9.0, 2.0], [1.0, 2.0], [4.0, 2.0]] {
            assert!(trial.fastest().is_none(), "a verdict before the last round");
            (0..2).for_each(|candidate| trial.timed(candidate, taken[candidate]));
        }
        assert_eq!(trial.fastest().map(|chosen| chosen.way), Some(1));
        trial.drop_out(0);
        assert_eq!(trial.fastest().map(|chosen| chosen.way), Some(2));
    }
}

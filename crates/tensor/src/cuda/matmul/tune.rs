//! Finding the fastest algorithm: when a kind of product is first met, all candidates do that product again and again.
//! They differ in the algorithm, and in what is left to a kernel of ours, whose time counts.
//!
//! A card that trains is at its power cap, where a product takes its energy divided by the cap, and not the cycles that
//! it takes alone on a cool card. So bursts only sort out what is far behind, and the others run back to back, on the
//! buffers and numbers of training, for as long as the card needs to settle.

use std::time::Duration;

use super::product::Chosen;
use crate::cuda::error::CudaError;
use crate::cuda::stream::Stream;

/// Calls of a burst: so many that starting the first is a small part of it.
const BURST_CALLS: usize = 4;

/// Bursts of every candidate, of which the shortest counts: nothing makes a burst too short.
const BURSTS: usize = 3;

/// Candidates that take so many times as long as the fastest in bursts are out. The ratio of two at an H200's cap is up to
/// 10 % from that in bursts.
const FAR_BEHIND: f32 = 1.15;

/// Most candidates that run back to back, so that a kind of product takes little more than a second.
const SURVIVORS: usize = 6;

/// Milliseconds below which bursts decide: launches and waits take as long as such a product, and no card gets hot.
const BRIEF_MS: f32 = 0.03;

/// Milliseconds of a run back to back, for most of which a card is settled at its cap.
const RUN_MS: f32 = 100.0;

/// Fewest calls of such a run, however long they are.
const RUN_CALLS: usize = 4;

/// Runs back to back of every survivor: the second in reverse order, since the card gets warmer meanwhile.
const TURNS: usize = 2;

/// The candidate that does a product fastest, of at least one: at the card's power cap, or `in_bursts`. All run `product`
/// many times, so it must be the same every time; one that fails is out. Waits for the card.
pub fn fastest(
    stream: &Stream,
    candidates: &[Chosen],
    in_bursts: bool,
    product: impl Fn(Chosen) -> Result<(), CudaError>,
) -> Result<Chosen, CudaError> {
    stream.novel();
    let trial = Trial { stream, candidates: loaded(candidates, &product)?, product };
    let bursts = trial.bursts()?;
    let survivors = survivors(&bursts, in_bursts);
    match *survivors {
        [only] => Ok(trial.candidates[only]),
        _ => Ok(trial.candidates[trial.best_back_to_back(&survivors, &bursts)?]),
    }
}

/// Candidates that have run once, by which their kernels are loaded.
fn loaded(
    candidates: &[Chosen],
    product: impl Fn(Chosen) -> Result<(), CudaError>,
) -> Result<Vec<Chosen>, CudaError> {
    let mut failure = None;
    let mut runs = |&chosen: &Chosen| product(chosen).map_err(|error| failure = Some(error)).is_ok();
    let loaded: Vec<Chosen> = candidates.iter().copied().filter(&mut runs).collect();
    match failure {
        Some(error) if loaded.is_empty() => Err(error),
        _ => Ok(loaded),
    }
}

/// Candidates on a stream; they go by their places.
struct Trial<'a, P> {
    stream: &'a Stream,
    candidates: Vec<Chosen>,
    product: P,
}

/// So many calls of a candidate, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    candidate: usize,
    calls: usize,
}

impl<P: Fn(Chosen) -> Result<(), CudaError>> Trial<'_, P> {
    /// Milliseconds of a call in the shortest burst of each candidate.
    fn bursts(&self) -> Result<Vec<f32>, CudaError> {
        let count = self.candidates.len();
        let burst = |i| Run { candidate: i % count, calls: BURST_CALLS };
        let times = self.time(&(0..BURSTS * count).map(burst).collect::<Vec<_>>())?;
        let shortest = |i| times.iter().skip(i).step_by(count).copied().fold(f32::INFINITY, f32::min);
        Ok((0..count).map(shortest).collect())
    }

    /// The survivor that takes the least time on a card that has settled.
    fn best_back_to_back(&self, survivors: &[usize], bursts: &[f32]) -> Result<usize, CudaError> {
        let runs = back_to_back(survivors, bursts);
        // A run that does not count makes the card warm for the first that does.
        let with_warm_up: Vec<Run> = runs.first().into_iter().chain(&runs).copied().collect();
        let times = self.time(&with_warm_up)?;
        Ok(verdict(&runs, &times[1..]))
    }

    /// Milliseconds of a call in each run. The host waits only when all are enqueued, so the card never rests.
    fn time(&self, runs: &[Run]) -> Result<Vec<f32>, CudaError> {
        let mut moments = vec![self.stream.moment()?];
        for run in runs {
            (0..run.calls).try_for_each(|_| (self.product)(self.candidates[run.candidate]))?;
            moments.push(self.stream.moment()?);
        }
        let times = runs.iter().zip(moments.windows(2));
        let ms = |between: Duration| between.as_secs_f32() * 1e3;
        times.map(|(run, ends)| Ok(ms(ends[1].since(&ends[0])?) / run.calls as f32)).collect()
    }
}

/// Candidates that are not far behind in bursts, the fastest first; that one alone where bursts decide.
fn survivors(bursts: &[f32], in_bursts: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..bursts.len()).collect();
    order.sort_by(|&a, &b| bursts[a].total_cmp(&bursts[b]));
    let fastest = bursts[order[0]];
    order.retain(|&candidate| bursts[candidate] <= FAR_BEHIND * fastest);
    order.truncate(if in_bursts || fastest < BRIEF_MS { 1 } else { SURVIVORS });
    order
}

/// The runs of survivors, all about as long.
fn back_to_back(survivors: &[usize], bursts: &[f32]) -> Vec<Run> {
    let run = |&candidate: &usize| {
        let calls = (RUN_MS / bursts[candidate]).ceil() as usize;
        Run { candidate, calls: calls.max(RUN_CALLS) }
    };
    let there: Vec<Run> = survivors.iter().map(run).collect();
    let back: Vec<Run> = there.iter().rev().copied().collect();
    [there, back].into_iter().cycle().take(TURNS).flatten().collect()
}

/// The candidate whose runs took the least time in sum; `times` are those of a call.
fn verdict(runs: &[Run], times: &[f32]) -> usize {
    let sum = |run: &Run| {
        let own = runs.iter().zip(times).filter(|(other, _)| other.candidate == run.candidate);
        own.map(|(_, time)| time).sum::<f32>()
    };
    let least = runs.iter().min_by(|a, b| sum(a).total_cmp(&sum(b)));
    least.expect("a verdict on nothing").candidate
}

#[cfg(test)]
mod tests {
    use super::super::library::Algorithm;
    use super::*;

    #[test]
    fn what_is_far_behind_in_bursts_is_out() {
        let times = [1.2, 1.0, 1.14, 1.1];
        assert_eq!(survivors(&times, false), [1, 3, 2]);
        assert_eq!(survivors(&times, true), [1]);
        let many: Vec<f32> = (0..9).map(|i| 2.0 - 0.01 * i as f32).collect();
        assert_eq!(survivors(&many, false), [8, 7, 6, 5, 4, 3]);
        assert_eq!(survivors(&[0.026, 0.025, 0.027], false), [1], "no card gets hot of that");
        assert_eq!(survivors(&[0.5], false), [0]);
    }

    #[test]
    fn survivors_run_as_long_there_and_back() {
        let runs = back_to_back(&[2, 0], &[0.3, 9.0, 40.0]);
        let [long, short] = [Run { candidate: 2, calls: RUN_CALLS }, Run { candidate: 0, calls: 334 }];
        assert_eq!(runs, [long, short, short, long]);
    }

    #[test]
    fn the_least_time_in_all_turns_wins_and_not_the_shortest_run() {
        let runs = back_to_back(&[1, 0, 2], &[1.0; 3]);
        assert_eq!(verdict(&runs, &[1.00, 0.90, 0.95, 0.99, 1.06, 1.01]), 2, "1.94 of 2.01, 1.96 and 1.94");
    }

    #[test]
    fn candidates_that_fail_are_out_and_if_all_do_their_error_is_told() {
        let candidates = [0, 1, 2].map(|way| Chosen { way, algorithm: Algorithm { data: [0; 8] } });
        let fail = |fails: fn(usize) -> bool| {
            let error = |way| CudaError::Unsupported(format!("way {way}"));
            move |Chosen { way, .. }: Chosen| if fails(way) { Err(error(way)) } else { Ok(()) }
        };
        let ways = |chosen: Vec<Chosen>| chosen.iter().map(|chosen| chosen.way).collect::<Vec<_>>();
        assert_eq!(loaded(&candidates, fail(|way| way == 1)).map(ways).unwrap(), [0, 2]);
        assert!(loaded(&candidates, fail(|_| true)).unwrap_err().to_string().contains("way 2"));
    }
}

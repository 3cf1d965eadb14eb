//! Tuning: when a kind of product first occurs, every candidate runs it many times. Candidates differ in the algorithm
//! and in what a kernel of ours does; its time counts too.
//!
//! In training a GPU runs at its power cap. There a product's time is its energy divided by the cap, not the cycles
//! that it needs on a cool GPU. So short bursts only eliminate slow candidates. The others run back to back, on the
//! buffers and numbers of training, until the GPU's clock is stable.
//!
//! The time of the trials is bounded for each product, however long it takes and however many candidates there are.

use std::time::Duration;

use super::product::Choice;
use crate::error::GpuError;
use crate::stream::Stream;

/// Most calls per burst: enough that the first call's launch is a small part of it.
const BURST_CALLS: f32 = 4.0;

/// Milliseconds of a burst, if it has more than one call. The launch is a small part of a call that takes as long.
const BURST_MS: f32 = 2.0;

/// Bursts per candidate. The shortest counts, because disturbances only make a burst longer.
const BURSTS: usize = 3;

/// Candidates slower than the fastest by this factor in bursts are eliminated. At an H200's power cap the ratio of two
/// candidates differs by up to 10 % from their ratio in bursts.
const FAR_BEHIND: f32 = 1.15;

/// Most candidates that run back to back.
const SURVIVORS: usize = 6;

/// If a product takes fewer milliseconds than this, bursts decide: launch overhead dominates, and the GPU does not heat
/// up.
const BRIEF_MS: f32 = 0.03;

/// Most milliseconds of a back-to-back run. For most of it the GPU is stable at its power cap.
const RUN_MS: f32 = 100.0;

/// Milliseconds of all back-to-back runs of a product together, if none of them is a single call that takes longer. So fewer
/// survivors run longer each.
const BUDGET_MS: f32 = 500.0;

/// Back-to-back runs per survivor. The second round has the reverse order, because the GPU warms up meanwhile.
const TURNS: usize = 2;

/// The fastest of at least one candidate: at the GPU's power cap, or `in_bursts`. All candidates run `product` many
/// times, so it must be repeatable. A candidate that fails is eliminated. Waits for the GPU.
pub fn fastest(
    stream: &Stream,
    candidates: &[Choice],
    in_bursts: bool,
    product: impl Fn(Choice) -> Result<(), GpuError>,
) -> Result<Choice, GpuError> {
    stream.mark_not_repeatable();
    let tuning = Tuning { stream, candidates: loaded(candidates, &product)?, product };
    let bursts = tuning.bursts()?;
    let survivors = survivors(&bursts, in_bursts);
    match *survivors {
        [only] => Ok(tuning.candidates[only]),
        _ => Ok(tuning.candidates[tuning.best_back_to_back(&survivors, &bursts)?]),
    }
}

/// The candidates that run without error. Each runs once, which also loads its kernels.
fn loaded(
    candidates: &[Choice],
    product: impl Fn(Choice) -> Result<(), GpuError>,
) -> Result<Vec<Choice>, GpuError> {
    let mut failure = None;
    let mut runs = |&choice: &Choice| product(choice).map_err(|error| failure = Some(error)).is_ok();
    let loaded: Vec<Choice> = candidates.iter().copied().filter(&mut runs).collect();
    match failure {
        Some(error) if loaded.is_empty() => Err(error),
        _ => Ok(loaded),
    }
}

/// The candidates of one product on a stream, referred to by index.
struct Tuning<'a, P> {
    stream: &'a Stream,
    candidates: Vec<Choice>,
    product: P,
}

/// Consecutive calls of one candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    candidate: usize,
    calls: usize,
}

impl<P: Fn(Choice) -> Result<(), GpuError>> Tuning<'_, P> {
    /// Milliseconds per call in each candidate's shortest burst.
    fn bursts(&self) -> Result<Vec<f32>, GpuError> {
        let count = self.candidates.len();
        let round = |calls| (0..count).map(move |candidate| Run { candidate, calls });
        let mut times = self.time(&round(1).collect::<Vec<_>>())?;
        let calls = burst_calls(times.iter().copied().fold(f32::INFINITY, f32::min));
        times.extend(self.time(&(1..BURSTS).flat_map(|_| round(calls)).collect::<Vec<_>>())?);
        let shortest = |i| times.iter().skip(i).step_by(count).copied().fold(f32::INFINITY, f32::min);
        Ok((0..count).map(shortest).collect())
    }

    /// The survivor with the least time once the GPU is stable at its power cap.
    fn best_back_to_back(&self, survivors: &[usize], bursts: &[f32]) -> Result<usize, GpuError> {
        let runs = back_to_back(survivors, bursts);
        // A run that is not counted warms up the GPU.
        let with_warm_up: Vec<Run> = runs.first().into_iter().chain(&runs).copied().collect();
        let times = self.time(&with_warm_up)?;
        Ok(least_total(&runs, &times[1..]))
    }

    /// Milliseconds per call of each run. The host waits only after everything is enqueued, so the GPU is never idle.
    fn time(&self, runs: &[Run]) -> Result<Vec<f32>, GpuError> {
        let mut moments = vec![self.stream.timing_event()?];
        for run in runs {
            (0..run.calls).try_for_each(|_| (self.product)(self.candidates[run.candidate]))?;
            moments.push(self.stream.timing_event()?);
        }
        let times = runs.iter().zip(moments.windows(2));
        let ms = |between: Duration| between.as_secs_f32() * 1e3;
        times.map(|(run, ends)| Ok(ms(ends[1].since(&ends[0])?) / run.calls as f32)).collect()
    }
}

/// Calls of a burst, if the fastest candidate takes this many milliseconds.
fn burst_calls(fastest: f32) -> usize {
    (BURST_MS / fastest).clamp(1.0, BURST_CALLS) as usize
}

/// Candidates that bursts do not eliminate, the fastest first. Only the fastest if bursts decide.
fn survivors(bursts: &[f32], in_bursts: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..bursts.len()).collect();
    order.sort_by(|&a, &b| bursts[a].total_cmp(&bursts[b]));
    let fastest = bursts[order[0]];
    order.retain(|&candidate| bursts[candidate] <= FAR_BEHIND * fastest);
    order.truncate(if in_bursts || fastest < BRIEF_MS { 1 } else { SURVIVORS });
    order
}

/// The back-to-back runs of the survivors, all about equally long.
fn back_to_back(survivors: &[usize], bursts: &[f32]) -> Vec<Run> {
    // One more warms up the GPU.
    let runs = survivors.len() * TURNS + 1;
    let ms = RUN_MS.min(BUDGET_MS / runs as f32);
    let run = |&candidate: &usize| Run { candidate, calls: (ms / bursts[candidate]).ceil() as usize };
    let there: Vec<Run> = survivors.iter().map(run).collect();
    let back: Vec<Run> = there.iter().rev().copied().collect();
    [there, back].into_iter().cycle().take(TURNS).flatten().collect()
}

/// The candidate with the smallest total time over its runs; `times` are per call.
fn least_total(runs: &[Run], times: &[f32]) -> usize {
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
    fn slow_candidates_are_eliminated_by_bursts() {
        let times = [1.2, 1.0, 1.14, 1.1];
        assert_eq!(survivors(&times, false), [1, 3, 2]);
        assert_eq!(survivors(&times, true), [1]);
        let many: Vec<f32> = (0..9).map(|i| 2.0 - 0.01 * i as f32).collect();
        assert_eq!(survivors(&many, false), [8, 7, 6, 5, 4, 3]);
        assert_eq!(survivors(&[0.026, 0.025, 0.027], false), [1], "too short to heat up the GPU");
        assert_eq!(survivors(&[0.5], false), [0]);
    }

    #[test]
    fn survivors_run_equally_long_in_both_orders() {
        let runs = back_to_back(&[2, 0], &[0.3, 9.0, 40.0]);
        let [long, short] = [Run { candidate: 2, calls: 3 }, Run { candidate: 0, calls: 334 }];
        assert_eq!(runs, [long, short, short, long]);
    }

    #[test]
    fn trials_take_half_a_second_or_a_few_calls() {
        for ms in [0.05, 0.5, 8.0, 30.0, 400.0] {
            for count in [2, 4, 6] {
                let runs = back_to_back(&(0..count).collect::<Vec<_>>(), &vec![ms; count]);
                assert_eq!(runs.len(), TURNS * count);
                let warm_up = runs[0].calls;
                let total = runs.iter().map(|run| run.calls).sum::<usize>() + warm_up;
                let (took, longest) = (total as f32 * ms, BUDGET_MS + (runs.len() + 1) as f32 * ms);
                assert!(took <= longest, "{count} survivors of {ms} ms take {took} ms");
            }
        }
        assert_eq!([0.01, 0.5, 0.9, 1.5, 20.0].map(burst_calls), [4, 4, 2, 1, 1]);
    }

    #[test]
    fn the_smallest_total_time_wins_not_the_shortest_run() {
        let runs = back_to_back(&[1, 0, 2], &[1.0; 3]);
        assert_eq!(
            least_total(&runs, &[1.00, 0.90, 0.95, 0.99, 1.06, 1.01]),
            2,
            "1.94 of 2.01, 1.96 and 1.94"
        );
    }

    #[test]
    fn failing_candidates_are_eliminated_and_if_all_fail_the_error_is_returned() {
        let candidates = [0, 1, 2].map(|variant| Choice { variant, algorithm: Algorithm { data: [0; 8] } });
        let fail = |fails: fn(usize) -> bool| {
            let error = |variant| GpuError::Unsupported(format!("variant {variant}"));
            move |Choice { variant, .. }: Choice| if fails(variant) { Err(error(variant)) } else { Ok(()) }
        };
        let variants = |choice: Vec<Choice>| choice.iter().map(|choice| choice.variant).collect::<Vec<_>>();
        assert_eq!(loaded(&candidates, fail(|variant| variant == 1)).map(variants).unwrap(), [0, 2]);
        assert!(loaded(&candidates, fail(|_| true)).unwrap_err().to_string().contains("variant 2"));
    }
}

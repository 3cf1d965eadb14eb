//! How long a rank computes in a step, and which ranks take longer than the others of their stage.
//!
//! All ranks take the same time for a step, because they wait for each other. What tells them apart is the time in which a rank
//! does not wait. Ranks of different stages do different work, so a rank is compared with those of its own stage.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use kintsugi_comm::paper::Entry;
use kintsugi_comm::{TransferObserver, World};
use kintsugi_plan::Mesh;
use kintsugi_run::Straggler;

/// A rank so many times slower than the median is a straggler.
const SLOW: f64 = 1.2;

/// Steps for which a rank must be slow, and of which its time is the median.
const STEPS: u64 = 10;

/// How long a rank must be slow. Ranks tell rank 0 their times every second.
const SUSTAINED: Duration = Duration::from_secs(5);

/// The time that a rank has waited for transfers.
#[derive(Debug, Default)]
pub(crate) struct WaitClock {
    since: Cell<Option<Instant>>,
    waited: Cell<Duration>,
}

impl TransferObserver for WaitClock {
    fn starts(&self, _: Entry, _: u64) {}

    fn waits(&self, _: u64) {
        self.since.set(Some(Instant::now()));
    }

    fn ended(&self, _: u64) {
        let waited = self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        self.waited.set(self.waited.get() + waited);
    }
}

/// The time that a rank computes in a step.
pub(crate) struct ComputeTime {
    clock: Rc<WaitClock>,
    begun: Instant,
    recent: VecDeque<Duration>,
}

impl ComputeTime {
    /// The time of a rank whose transfers the clock observes.
    pub fn new(clock: Rc<WaitClock>) -> Self {
        ComputeTime { clock, begun: Instant::now(), recent: VecDeque::new() }
    }

    /// A step begins.
    pub fn begin_step(&mut self) {
        self.clock.waited.set(Duration::ZERO);
        self.begun = Instant::now();
    }

    /// A step has ended. Returns the median over the last steps.
    pub fn end_step(&mut self) -> Duration {
        self.recent.push_back(self.begun.elapsed().saturating_sub(self.clock.waited.get()));
        if self.recent.len() > STEPS as usize {
            self.recent.pop_front();
        }
        median(self.recent.iter().copied().collect())
    }
}

/// The lower one if there are two in the middle.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// Which ranks are slow, and since when.
pub(crate) struct Stragglers {
    /// The stage of every rank.
    stages: Vec<usize>,
    /// For how many steps a rank has been slow, and since when. Steps that run again after a rollback count again.
    slow: Vec<Option<(u64, Instant)>>,
}

impl Stragglers {
    /// For the ranks of a mesh.
    pub fn new(mesh: Mesh) -> Self {
        let stages: Vec<usize> = (0..mesh.ranks()).map(|rank| mesh.coordinate(rank).pp()).collect();
        Stragglers { slow: vec![None; stages.len()], stages }
    }

    /// The stragglers after a step, by the last times of all ranks.
    pub fn after_step(&mut self, world: &dyn World) -> Vec<Straggler> {
        let mut found = self.look(Instant::now(), &world.compute_times());
        for straggler in &mut found {
            straggler.host = world.host_of(straggler.rank);
        }
        found
    }

    fn look(&mut self, now: Instant, times: &[Duration]) -> Vec<Straggler> {
        let mut found = Vec::new();
        for (rank, &time) in times.iter().enumerate().take(self.stages.len()) {
            let stage = self.stages[rank];
            let same = times.iter().zip(&self.stages).filter(|(time, at)| **at == stage && !time.is_zero());
            let median = median(same.map(|(time, _)| *time).collect());
            if median.is_zero() || time.as_secs_f64() < SLOW * median.as_secs_f64() {
                self.slow[rank] = None;
                continue;
            }
            let (steps, since) = self.slow[rank].get_or_insert((0, now));
            *steps += 1;
            if *steps > STEPS && now.saturating_duration_since(*since) >= SUSTAINED {
                let (compute_s, median_s) = (time.as_secs_f64(), median.as_secs_f64());
                found.push(Straggler { rank, host: None, compute_s, median_s });
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_rank_that_is_slower_than_its_stage_for_some_steps_is_a_straggler() {
        let sets = ["parallel.tp=1", "parallel.pp=2", "parallel.dp=3", "batch.global=24"];
        let plan = ConfigSource::demo().sets(sets).plan().expect("a plan");
        let mut stragglers = Stragglers::new(plan.mesh);
        let slow = (0..6).find(|&rank| plan.mesh.coordinate(rank).pp() == 1).expect("two stages");
        // The second stage computes longer, and one of its ranks 1.3 times as long.
        let times: Vec<Duration> = (0..6)
            .map(|rank| match plan.mesh.coordinate(rank).pp() {
                0 => 100 * MS,
                _ if rank == slow => 260 * MS,
                _ => 200 * MS,
            })
            .collect();
        let begun = Instant::now();
        let at = |step: u64| begun + 600 * step as u32 * MS;
        let named: Vec<Vec<usize>> = (1..=12)
            .map(|step| stragglers.look(at(step), &times).iter().map(|found| found.rank).collect())
            .collect();
        assert!(named[..10].iter().all(Vec::is_empty), "{named:?}");
        assert_eq!(named[10..], [[slow], [slow]]);
        let mut recovered = times.clone();
        recovered[slow] = 220 * MS;
        assert_eq!(stragglers.look(at(13), &recovered), []);
        assert_eq!(stragglers.look(at(14), &times), [], "it counts from the beginning");
        // Ranks that have told nothing are not compared.
        assert_eq!(stragglers.look(at(40), &[Duration::ZERO; 6]), []);
    }

    #[test]
    fn waits_do_not_count_as_computing() {
        let clock = Rc::new(WaitClock::default());
        let mut time = ComputeTime::new(Rc::clone(&clock));
        time.begin_step();
        clock.waits(0);
        std::thread::sleep(200 * MS);
        clock.ended(0);
        let computed = time.end_step();
        assert!(computed < 100 * MS, "{computed:?}");
        time.begin_step();
        std::thread::sleep(20 * MS);
        assert!(time.end_step() < 20 * MS, "the median of two is the lower one");
        time.begin_step();
        std::thread::sleep(20 * MS);
        assert!(time.end_step() >= 20 * MS);
    }
}

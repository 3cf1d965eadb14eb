//! Finds the times in which this process itself was stopped (SIGSTOP, a frozen machine). Launchers let stopped processes continue when
//! they end a job. Such a process finds connections closed, because the others have given it up, and must accuse none of them.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The shortest gap that is a stop. Several threads look at the clock every [`SLICE`](crate::patience::SLICE).
const SHORTEST: Duration = Duration::from_secs(2);

/// How long after a stop what this process finds may be a consequence of it: processes that end have said so by then.
const AFTERMATH: Duration = Duration::from_secs(2);

/// A clock that the threads of the connections look at all the time. A long gap between two looks is a stop of the process.
pub(super) struct StopClock(Mutex<Looks>);

struct Looks {
    last: Instant,
    /// The end of the last stop, and how long it was.
    stop: Option<(Instant, Duration)>,
}

impl StopClock {
    pub fn new() -> Self {
        StopClock(Mutex::new(Looks { last: Instant::now(), stop: None }))
    }

    /// Looks at the clock. Returns how long the process was stopped until now or until a moment ago; zero if it was not. Whichever
    /// thread looks first after a stop finds it.
    pub fn look(&self) -> Duration {
        self.look_at(Instant::now())
    }

    fn look_at(&self, now: Instant) -> Duration {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let gap = now.saturating_duration_since(looks.last);
        if gap >= SHORTEST {
            looks.stop = Some((now, gap));
        }
        looks.last = looks.last.max(now);
        let recent = looks.stop.filter(|(end, _)| now.saturating_duration_since(*end) <= AFTERMATH);
        recent.map_or(Duration::ZERO, |(_, stopped)| stopped)
    }

    /// As if the process had not run since `stopped` ago.
    #[cfg(test)]
    pub fn stop(&self, stopped: Duration) {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        looks.stop = Some((Instant::now(), stopped));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_between_two_looks_is_a_stop_and_is_forgotten_soon() {
        let clock = StopClock::new();
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        assert_eq!([0, 1, 2].map(|at| clock.look_at(begun + at * second)), [Duration::ZERO; 3]);
        // Between 2 s and 9 s nobody looks.
        let found = [9, 10, 11, 12].map(|at| clock.look_at(begun + at * second));
        assert_eq!(found, [7, 7, 7, 0].map(|seconds| seconds * second));
    }
}

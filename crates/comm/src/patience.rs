//! How long a rank waits for another: when it says whom it waits for, and when it gives up.

use std::time::Duration;

/// The longest time that counts between two looks at a clock. It passes more slowly only if the whole process was stopped, as by
/// SIGSTOP, and that time does not count.
pub(crate) const SLICE: Duration = Duration::from_millis(200);

/// When a rank that waits outside of a step says for whom.
pub(crate) const NOTICE: Duration = Duration::from_secs(5);

/// When a rank that waits inside of a step says for whom. A long pipeline may make it wait for some seconds in every step.
pub(crate) const STEP_NOTICE: Duration = Duration::from_secs(60);

/// When it says so again.
const NEXT_NOTICE: Duration = Duration::from_secs(60);

/// The patience of one wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    limit: Duration,
    /// Time until the limit.
    left: Duration,
    waited: Duration,
    notice_at: Duration,
    /// Finished pieces of work at the last look: see [`kintsugi_spec::work`].
    pieces: Option<u64>,
}

/// What a rank does after it has waited a little longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Wait,
    /// It says for whom it waits.
    Notify,
    GiveUp,
}

impl Patience {
    /// A wait that ends after `limit` without progress. After `notice` the rank prints whom it waits for.
    pub fn new(limit: Duration, notice: Duration) -> Self {
        Patience { limit, left: limit, waited: Duration::ZERO, notice_at: notice, pieces: None }
    }

    /// Changes the limit. Time that has passed under another one does not count.
    pub fn set_limit(&mut self, limit: Duration) {
        if limit != self.limit {
            (self.limit, self.left) = (limit, limit);
        }
    }

    /// Counts time. If the ranks of the job have finished pieces of work since the last look, the limit begins anew.
    pub fn pass(&mut self, time: Duration, pieces: u64) -> Decision {
        self.waited += time;
        self.left = self.left.saturating_sub(time);
        if self.pieces.replace(pieces).is_some_and(|before| before != pieces) {
            self.left = self.limit;
        }
        if self.left.is_zero() {
            return Decision::GiveUp;
        }
        if self.waited >= self.notice_at {
            self.notice_at = self.waited + NEXT_NOTICE;
            return Decision::Notify;
        }
        Decision::Wait
    }

    /// Time until the limit.
    pub fn left(&self) -> Duration {
        self.left
    }

    /// The time so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_told_and_progress_begins_the_limit_anew() {
        let second = Duration::from_secs(1);
        let mut patience = Patience::new(4 * second, 2 * second);
        let decisions = [0, 0, 0, 7, 7, 7, 7, 7].map(|pieces| patience.pass(second, pieces));
        let mut expected = [Decision::Wait; 8];
        expected[1] = Decision::Notify;
        expected[7] = Decision::GiveUp;
        assert_eq!(decisions, expected);
        assert_eq!((patience.waited(), patience.left()), (8 * second, Duration::ZERO));
    }

    #[test]
    fn a_shorter_limit_counts_from_its_beginning() {
        let second = Duration::from_secs(1);
        let mut patience = Patience::new(600 * second, 60 * second);
        assert_eq!(patience.pass(9 * second, 0), Decision::Wait);
        let decisions = [6, 6, 6].map(|limit| {
            patience.set_limit(limit * second);
            patience.pass(3 * second, 0)
        });
        assert_eq!(decisions, [Decision::Wait, Decision::GiveUp, Decision::GiveUp]);
    }
}

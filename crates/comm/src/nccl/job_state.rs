//! What the groups of a process share: the communicators, the first failure, and the watchdog that ends a job that hangs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::communicator::{Communicator, StartedTransfer};
use super::library::NcclError;
use crate::rendezvous::Rendezvous;
use crate::{Blame, RankFailure, Traffic};

/// How often the watchdog looks.
const POLL: Duration = Duration::from_millis(100);

/// The longest time that counts towards a timeout between two looks: longer if the whole process was stopped.
const SLICE: Duration = Duration::from_millis(400);

/// How long an error of the library waits for its cause.
const CAUSE: Duration = Duration::from_secs(1);

/// What the groups of a process share.
pub(super) struct JobState {
    pub rendezvous: &'static Rendezvous,
    /// How long a rank waits for its device, and so for other ranks.
    pub timeout: Duration,
    pub traffic: crate::traffic::TrafficCounter,
    communicators: Mutex<Vec<Weak<Communicator>>>,
}

impl JobState {
    /// The state of a job, with its watchdog.
    pub fn new(rendezvous: &'static Rendezvous, timeout: Duration) -> Arc<Self> {
        let state = Arc::new(JobState {
            rendezvous,
            timeout,
            traffic: crate::traffic::TrafficCounter::default(),
            communicators: Mutex::default(),
        });
        let watched = Arc::downgrade(&state);
        // Without the thread, a failure of another rank is noticed late, and everything else works.
        thread::Builder::new().name("nccl watchdog".into()).spawn(move || watch(&watched)).ok();
        state
    }

    /// Adds a communicator that a failure aborts.
    pub fn add(&self, communicator: Communicator) -> Arc<Communicator> {
        let communicator = Arc::new(communicator);
        let mut all = self.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&communicator));
        communicator
    }

    /// Whether the job has failed.
    pub fn has_failed(&self) -> bool {
        self.rendezvous.has_failed()
    }

    /// Why the job failed.
    pub fn failure(&self) -> Option<RankFailure> {
        self.rendezvous.failure()
    }

    /// Ends the job. An earlier failure is the cause of this one.
    pub fn fail(&self, failure: RankFailure) {
        self.rendezvous.abort(failure);
        self.abort_communicators();
    }

    /// Ends the kernels that wait for other ranks.
    fn abort_communicators(&self) {
        // An abort may not return. The thread of the heartbeats then ends the process.
        let communicators = self.live();
        thread::spawn(move || communicators.iter().for_each(|communicator| communicator.abort()));
    }

    /// Ends the job because a transfer could not be enqueued, or failed later.
    pub fn fail_in(&self, transfer: Option<StartedTransfer>, reason: String) {
        let failure = self.failure_in(transfer);
        self.fail(RankFailure { reason, ..failure });
    }

    /// Ends the job because the GPU has waited too long for other ranks.
    fn fail_stalled(&self, transfer: Option<StartedTransfer>) {
        let limit = self.timeout.min(self.rendezvous.limit());
        let reason = format!("after {limit:?}, the GPU still waits for other ranks");
        self.fail(RankFailure { stalled: true, reason, ..self.failure_in(transfer) });
    }

    /// A failure in a transfer, without its reason.
    fn failure_in(&self, transfer: Option<StartedTransfer>) -> RankFailure {
        let failure = RankFailure::new(self.rendezvous.rank, "a step", "");
        let failure = match transfer {
            Some(StartedTransfer { activity, peer }) => {
                let transfer = Some(activity.to_string().into());
                RankFailure { op: None, transfer, peer, blame: Blame::Nobody, ..failure }
            }
            None => failure,
        };
        RankFailure { host: Some(self.rendezvous.host.clone()), ..failure }
    }

    /// Bytes that this rank has sent so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic.read()
    }

    fn live(&self) -> Vec<Arc<Communicator>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Communicator>>> {
        self.communicators.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The loop of the watchdog. It ends with the job.
fn watch(state: &Weak<JobState>) {
    let (mut patience, mut last_look) = (HostPatience::default(), Instant::now());
    loop {
        thread::sleep(POLL);
        let Some(state) = state.upgrade() else { return };
        let passed = last_look.elapsed().min(SLICE);
        last_look = Instant::now();
        if state.has_failed() {
            return state.abort_communicators();
        }
        let communicators = state.live();
        let found = communicators.iter().find_map(|found| Some((Arc::clone(found), found.async_error()?)));
        if let Some((communicator, NcclError { call, message })) = found {
            let transfer = communicator.running();
            // A rank that has died is the cause, and is known a little later.
            if wait_for(CAUSE, || state.failure()).is_some() {
                continue;
            }
            state.fail_in(transfer, format!("{call} of group {} failed: {message}", communicator.group));
            continue;
        }
        let host_wait = communicators.iter().find_map(|communicator| communicator.host_wait());
        let timeout = state.timeout.min(state.rendezvous.limit());
        if patience.is_over(host_wait, passed, state.rendezvous.pieces(), timeout) {
            state.fail_stalled(communicators.iter().find_map(|communicator| communicator.running()));
        }
    }
}

/// Waits until there is a value, but not longer than `patience`.
fn wait_for<T>(patience: Duration, value: impl Fn() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        let found = value();
        if found.is_some() || begun.elapsed() > patience {
            return found;
        }
        thread::sleep(POLL);
    }
}

/// How long the host has been in one wait for its device.
#[derive(Default)]
struct HostPatience {
    wait: Option<u64>,
    pieces: u64,
    lasted: Duration,
}

impl HostPatience {
    /// Whether the host has been in the same wait for as long as `timeout`, while no process has finished a piece of work. `passed` is
    /// the time since the last look.
    fn is_over(&mut self, wait: Option<u64>, passed: Duration, pieces: u64, timeout: Duration) -> bool {
        if wait.is_none() || wait != self.wait || pieces != self.pieces {
            *self = HostPatience { wait, pieces, lasted: Duration::ZERO };
            return false;
        }
        self.lasted += passed;
        self.lasted >= timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_long_wait_is_a_timeout() {
        let (mut patience, second) = (HostPatience::default(), Duration::from_secs(1));
        let timeout = 2 * second;
        let looks = [None, Some(1), Some(1), Some(2), Some(2), None, Some(3), Some(3), Some(3)];
        let over = looks.map(|wait| patience.is_over(wait, second, 0, timeout));
        assert_eq!(over, [false, false, false, false, false, false, false, false, true]);
        let over = [1, 1, 2, 2, 2].map(|pieces| patience.is_over(Some(4), second, pieces, timeout));
        assert_eq!(over, [false, false, false, false, true], "another process still writes");
    }
}

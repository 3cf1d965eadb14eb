//! What the groups of a process share: the communicators, the first failure, and the watchdog that ends a job that hangs.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::communicator::{Communicator, StartedTransfer};
use super::library::NcclError;
use crate::exchange::Exchange;
use crate::{RankFailure, Traffic};

/// How often the watchdog looks.
const POLL: Duration = Duration::from_millis(100);

/// The longest time that counts towards a timeout between two looks: longer if the whole process was stopped.
const SLICE: Duration = Duration::from_millis(400);

/// How long an error of the library waits for its cause.
const CAUSE: Duration = Duration::from_secs(1);

/// How long a rank may take to notice a failure after its communicators were aborted.
const GRACE: Duration = Duration::from_secs(5);

/// What the groups of a process share.
pub(super) struct JobState {
    pub exchange: Exchange,
    /// How long a rank waits for its device, and so for other ranks.
    pub timeout: Duration,
    pub traffic: crate::traffic::TrafficCounter,
    failure: OnceLock<RankFailure>,
    /// Whether the rank's own thread knows of the failure.
    noticed: AtomicBool,
    communicators: Mutex<Vec<Weak<Communicator>>>,
}

impl JobState {
    /// The state of a job, with its watchdog.
    pub fn new(exchange: Exchange, timeout: Duration) -> Arc<Self> {
        let state = Arc::new(JobState {
            exchange,
            timeout,
            traffic: crate::traffic::TrafficCounter::default(),
            failure: OnceLock::new(),
            noticed: AtomicBool::new(false),
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
        self.failure.get().is_some()
    }

    /// Why the job failed, for the rank's own thread.
    pub fn failure(&self) -> Option<RankFailure> {
        let failure = self.failure.get().or_else(|| {
            let elsewhere = self.exchange.failure()?;
            self.fail(elsewhere);
            self.failure.get()
        })?;
        self.noticed.store(true, Ordering::Relaxed);
        Some(failure.clone())
    }

    /// Ends the job. An earlier failure is the cause of this one.
    pub fn fail(&self, failure: RankFailure) {
        if self.failure.set(failure.clone()).is_ok() {
            self.exchange.abort(failure);
        }
        // An abort may not return. The watchdog then ends the process.
        let communicators = self.live();
        thread::spawn(move || communicators.iter().for_each(|communicator| communicator.abort()));
    }

    /// Ends the job because a transfer could not be enqueued, or failed later.
    pub fn fail_in(&self, transfer: Option<StartedTransfer>, reason: String) {
        let rank = self.exchange.rank();
        let failure = match transfer {
            Some(StartedTransfer { activity, peer }) => {
                RankFailure { rank, host: None, op: None, transfer: Some(activity.to_string()), peer, reason }
            }
            None => RankFailure::new(rank, "a step", reason),
        };
        self.fail(RankFailure { host: Some(self.exchange.host()), ..failure });
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
            end_if_stuck(&state);
            return;
        }
        if let Some(failure) = state.exchange.failure() {
            state.fail(failure);
            continue;
        }
        let communicators = state.live();
        let found = communicators.iter().find_map(|found| Some((Arc::clone(found), found.async_error()?)));
        if let Some((communicator, NcclError { call, message })) = found {
            let transfer = communicator.running();
            // A rank that has died is the cause, and is known a little later.
            if let Some(cause) = wait_for(CAUSE, || state.exchange.failure()) {
                state.fail(cause);
                continue;
            }
            state.fail_in(transfer, format!("{call} of group {} failed: {message}", communicator.group));
            continue;
        }
        let host_wait = communicators.iter().find_map(|communicator| communicator.host_wait());
        if patience.is_over(host_wait, passed, state.timeout) {
            let running = communicators.iter().find_map(|communicator| communicator.running());
            let reason = format!("after {:?}, the GPU still waits for other ranks", state.timeout);
            state.fail_in(running, reason);
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
    lasted: Duration,
}

impl HostPatience {
    /// Whether the host has been in the same wait for as long as `timeout`. `passed` is the time since the last look.
    fn is_over(&mut self, wait: Option<u64>, passed: Duration, timeout: Duration) -> bool {
        if wait.is_none() || wait != self.wait {
            (self.wait, self.lasted) = (wait, Duration::ZERO);
            return false;
        }
        self.lasted += passed;
        self.lasted >= timeout
    }
}

unsafe extern "C" {
    /// The C library's.
    fn _exit(status: c_int) -> !;
}

/// Ends the process if the rank's own thread does not notice the failure: it is in a call of the library that does not return.
fn end_if_stuck(state: &JobState) {
    if wait_for(GRACE, || state.noticed.load(Ordering::Relaxed).then_some(())).is_some() {
        return;
    }
    if let Some(failure) = state.failure.get() {
        eprintln!("error: {failure}");
    }
    // SAFETY: `_exit` ends the process at once. Handlers at exit would wait for the call that does not return.
    unsafe { _exit(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_long_wait_is_a_timeout() {
        let (mut patience, second) = (HostPatience::default(), Duration::from_secs(1));
        let timeout = 2 * second;
        let looks = [None, Some(1), Some(1), Some(2), Some(2), None, Some(3), Some(3), Some(3)];
        let over = looks.map(|wait| patience.is_over(wait, second, timeout));
        assert_eq!(over, [false, false, false, false, false, false, false, false, true]);
    }
}

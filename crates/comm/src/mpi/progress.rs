//! Advances the transfers of this process: in the thread that waits for one, or else in a thread of its own.
//!
//! All calls to MPI are made under one lock, by any thread: MPI is asked for `MPI_THREAD_SERIALIZED`. While a rank computes,
//! the progress thread advances its transfers every [`POLL`]. While a rank waits, it advances them itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::library::{Api, MpiError};
use super::transfer::{Staging, Transfer};
use crate::activity::Activity;
use crate::patience::{Decision, Patience, SLICE};
use crate::rendezvous::WaitGuard;

/// How often the progress thread advances transfers.
const POLL: Duration = Duration::from_micros(50);

/// The same if links are emulated. Transfers take long then, and the ranks may have fewer cores than they need.
const EMULATED_POLL: Duration = Duration::from_micros(200);

/// The progress thread sleeps until it is woken if there was no transfer for so long.
const IDLE_BEFORE_SLEEP: Duration = Duration::from_millis(20);

/// How often a rank that waits looks at its limit.
const LOOK: Duration = Duration::from_millis(50);

/// The transfers of this process.
pub(super) struct Progress {
    state: Mutex<ProgressState>,
    /// Wakes the progress thread.
    wake: Condvar,
    /// Threads that wait for a transfer.
    waiting: AtomicUsize,
    /// Whether links are emulated. If they are, threads sleep while they wait, and other ranks use the core.
    emulated: AtomicBool,
}

/// What the lock protects: all of MPI.
pub(super) struct ProgressState {
    pub api: Box<dyn Api>,
    transfers: BTreeMap<u64, ActiveTransfer>,
    /// The first transfer that failed, with the reason.
    failure: Option<(TransferInfo, MpiError)>,
    /// Transfers that failed. MPI may still use their memory, so they are kept.
    abandoned: Vec<Transfer>,
    /// The number of the next transfer.
    next: u64,
    /// Staging that no transfer uses.
    spare: Vec<Staging>,
    /// Whether the progress thread waits to be woken.
    asleep: bool,
    /// Whether a failure has ended all transfers: nobody uses their memory any more.
    stopped: bool,
}

/// What a transfer is, and the rank of the world that this rank waits for in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransferInfo {
    pub activity: Activity,
    pub peer: usize,
}

/// A transfer and what it is.
struct ActiveTransfer {
    info: TransferInfo,
    transfer: Transfer,
}

/// What a wait asks and tells.
pub(super) struct WaitObserver<'a> {
    /// Whether to wait no longer.
    pub cancelled: &'a dyn Fn() -> bool,
    /// Finished pieces of work of all processes.
    pub pieces: &'a dyn Fn() -> u64,
    /// How long to wait while none is finished.
    pub limit: &'a dyn Fn() -> Duration,
    /// Called once if the wait takes a while. What it returns is kept until the wait ends.
    pub begins: &'a dyn Fn(TransferInfo) -> Option<WaitGuard<'static>>,
    /// Tells people for whom the rank waits.
    pub notify: &'a dyn Fn(TransferInfo, Duration),
}

/// How a wait ended.
pub(super) enum WaitOutcome {
    Done,
    /// This transfer or another one of this process failed.
    Failed(TransferInfo, MpiError),
    TimedOut(TransferInfo),
    Cancelled,
}

impl Progress {
    pub fn new(api: Box<dyn Api>) -> Self {
        let state = ProgressState {
            api,
            transfers: BTreeMap::new(),
            failure: None,
            abandoned: Vec::new(),
            next: 0,
            spare: Vec::new(),
            asleep: false,
            stopped: false,
        };
        Progress {
            state: Mutex::new(state),
            wake: Condvar::new(),
            waiting: AtomicUsize::new(0),
            emulated: AtomicBool::new(false),
        }
    }

    /// Locks MPI.
    pub fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all transfers after a failure. Their owners may then free the memory.
    pub fn stop(&self) {
        self.lock().stopped = true;
    }

    /// Says whether links are emulated.
    pub fn set_emulated(&self, emulated: bool) {
        self.emulated.store(emulated, Ordering::Relaxed);
    }

    /// Starts a transfer. Returns its number, by which it is waited for.
    pub fn start(
        &self,
        info: TransferInfo,
        begin: impl FnOnce(&dyn Api) -> Result<Transfer, MpiError>,
    ) -> u64 {
        let state = &mut *self.lock();
        let number = state.next;
        state.next += 1;
        match begin(&*state.api) {
            Ok(transfer) => drop(state.transfers.insert(number, ActiveTransfer { info, transfer })),
            Err(error) => drop(state.failure.get_or_insert((info, error))),
        }
        if state.asleep {
            self.wake.notify_one();
        }
        number
    }

    /// Waits for a transfer, and advances all of them meanwhile. Ends early if the observer says so, or if no transfer of this
    /// process has advanced for as long as the patience lasts.
    pub fn wait(&self, number: u64, patience: Patience, observer: &WaitObserver) -> WaitOutcome {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let outcome = self.wait_actively(number, patience, observer);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    fn wait_actively(&self, number: u64, whole: Patience, observer: &WaitObserver) -> WaitOutcome {
        let emulated = self.emulated.load(Ordering::Relaxed);
        let (mut backoff, mut patience, mut last_look) = (Backoff::default(), whole, None);
        let mut registered = None;
        loop {
            let (due, info) = {
                let mut state = self.lock();
                if state.advance() {
                    (backoff, patience, last_look) = (Backoff::default(), whole, None);
                }
                if let Some((info, error)) = &state.failure {
                    return WaitOutcome::Failed(*info, error.clone());
                }
                match state.transfers.get(&number) {
                    None => return WaitOutcome::Done,
                    Some(active) => (state.next_due(), active.info),
                }
            };
            if (observer.cancelled)() {
                return WaitOutcome::Cancelled;
            }
            if emulated {
                sleep_until(due);
            }
            if !emulated && !backoff.pause() {
                continue;
            }
            let now = Instant::now();
            let passed = now - *last_look.get_or_insert(now);
            if passed < LOOK {
                continue;
            }
            last_look = Some(now);
            registered = registered.or_else(|| (observer.begins)(info));
            patience.set_limit((observer.limit)());
            match patience.pass(passed.min(SLICE), (observer.pieces)()) {
                Decision::Wait => {}
                Decision::Notify => (observer.notify)(info, patience.waited()),
                Decision::GiveUp => return WaitOutcome::TimedOut(info),
            }
        }
    }

    /// The loop of the progress thread.
    pub fn run(&self) {
        let mut idle_since = Instant::now();
        loop {
            let due = {
                let mut state = self.lock();
                let advances = self.waiting.load(Ordering::Relaxed) == 0;
                if !state.transfers.is_empty() {
                    idle_since = Instant::now();
                    if advances {
                        state.advance();
                    }
                } else if idle_since.elapsed() > IDLE_BEFORE_SLEEP {
                    state.asleep = true;
                    while state.transfers.is_empty() {
                        state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                    state.asleep = false;
                    idle_since = Instant::now();
                }
                state.next_due().filter(|_| advances)
            };
            if self.emulated.load(Ordering::Relaxed) { sleep_until(due) } else { thread::sleep(POLL) }
        }
    }
}

impl ProgressState {
    /// Advances all transfers. Returns whether anything happened.
    fn advance(&mut self) -> bool {
        if self.stopped || self.failure.is_some() {
            return false;
        }
        let (mut advanced, mut failed) = (false, None);
        let now = Instant::now();
        let ProgressState { api, transfers, spare, .. } = self;
        transfers.retain(|&number, active| match active.transfer.advance(&**api, spare, now) {
            Ok(moved) => {
                advanced |= moved;
                !active.transfer.is_done()
            }
            Err(error) => {
                failed = Some((number, error));
                true
            }
        });
        if let Some((number, error)) = failed
            && let Some(ActiveTransfer { info, transfer }) = self.transfers.remove(&number)
        {
            self.abandoned.push(transfer);
            self.failure.get_or_insert((info, error));
        }
        advanced
    }

    /// When the first segment on an emulated link arrives.
    fn next_due(&self) -> Option<Instant> {
        self.transfers.values().filter_map(|active| active.transfer.due()).min()
    }
}

/// Sleeps until a time, but not longer than [`EMULATED_POLL`].
fn sleep_until(due: Option<Instant>) {
    let left = due.map_or(EMULATED_POLL, |due| due.saturating_duration_since(Instant::now()));
    thread::sleep(left.min(EMULATED_POLL));
}

/// Waits a little between two looks: at first not at all, then by letting others run, and at last by sleeping.
#[derive(Default)]
struct Backoff {
    looks: u32,
}

impl Backoff {
    /// Returns whether it slept or let others run.
    fn pause(&mut self) -> bool {
        const SPINS: u32 = 32;
        const YIELDS: u32 = 2000;
        self.looks += 1;
        if self.looks < SPINS {
            std::hint::spin_loop();
            return false;
        }
        if self.looks < YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(POLL);
        }
        true
    }
}

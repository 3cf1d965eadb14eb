//! How far the caller of [`train`](crate::train) has followed the run: other threads wait for it.

use std::sync::{Condvar, Mutex, PoisonError};

/// The last step that was reported to the caller, and the checkpoints.
///
/// The writer publishes the checkpoint of a step only after the caller has handled that step's event. So everything that
/// the caller logs about a step is on the disk before a run can resume from it.
pub(crate) struct Reported {
    state: Mutex<ReportedState>,
    changed: Condvar,
}

/// What was reported.
#[derive(Clone, Copy)]
struct ReportedState {
    /// `None` when no more events will be reported.
    step: Option<u64>,
    /// Checkpoints that were written, or could not be.
    saves: u64,
}

impl Reported {
    pub fn new() -> Self {
        Reported { state: Mutex::new(ReportedState { step: Some(0), saves: 0 }), changed: Condvar::new() }
    }

    /// Sets the last step, or that no more events will be reported.
    pub fn set_step(&self, step: Option<u64>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).step = step;
        self.changed.notify_all();
    }

    /// Takes note of a checkpoint that was written, or could not be.
    pub fn add_save(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).saves += 1;
        self.changed.notify_all();
    }

    /// Waits until a step has been reported. Returns `false` if it never will be.
    pub fn wait_for_step(&self, step: u64) -> bool {
        self.wait_until(|state| state.step.is_none_or(|reported| reported >= step))
    }

    /// Waits until a step, and the end of so many saves, have been reported. Returns `false` if they never will be.
    pub fn wait_for_saves(&self, step: u64, saves: u64) -> bool {
        self.wait_until(|state| state.step.is_none_or(|reported| reported >= step && state.saves >= saves))
    }

    /// Waits until the caller knows that the run went back to a step. Returns `false` if it never will.
    pub fn wait_for_rollback(&self, step: u64) -> bool {
        self.wait_until(|state| state.step.is_none_or(|reported| reported <= step))
    }

    /// Waits for a state. Returns whether events are still reported.
    fn wait_until(&self, holds: impl Fn(&ReportedState) -> bool) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state =
            self.changed.wait_while(state, |state| !holds(state)).unwrap_or_else(PoisonError::into_inner);
        state.step.is_some()
    }
}

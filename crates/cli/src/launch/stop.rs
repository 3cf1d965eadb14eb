//! The signals to stop that `launch` has received for its ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::Failure;
use crate::signals::every_signal_to_stop;

/// Signals to stop. None of them ends this process.
pub struct StopRequests {
    asked: Arc<AtomicBool>,
    was_asked: AtomicBool,
}

impl StopRequests {
    /// Handles the signals from now on.
    pub fn new() -> Result<Self, Failure> {
        Ok(StopRequests { asked: every_signal_to_stop()?, was_asked: AtomicBool::new(false) })
    }

    /// Whether a signal came since the last call.
    pub fn take(&self) -> bool {
        let asked = self.asked.swap(false, Ordering::Relaxed);
        self.was_asked.fetch_or(asked, Ordering::Relaxed);
        asked
    }

    /// Whether any signal came. The next call of `take` still returns it.
    pub fn any(&self) -> bool {
        self.asked.load(Ordering::Relaxed) || self.was_asked.load(Ordering::Relaxed)
    }
}

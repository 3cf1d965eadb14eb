//! Moments between what a rank has enqueued, by the clock of its device.

use std::time::{Duration, Instant};

use crate::cuda;

/// The moment when all that was enqueued before it has run.
#[derive(Debug)]
pub struct Mark(Clock);

#[derive(Debug)]
enum Clock {
    Host(Instant),
    Card(cuda::Moment),
}

impl Mark {
    /// Now: for devices whose operations have run when they return.
    pub fn now() -> Self {
        Mark(Clock::Host(Instant::now()))
    }

    pub(crate) fn on_card(moment: cuda::Moment) -> Self {
        Mark(Clock::Card(moment))
    }

    /// How long after an earlier mark of the same device. Waits for both.
    pub fn since(&self, earlier: &Mark) -> Duration {
        match (&self.0, &earlier.0) {
            (Clock::Host(now), Clock::Host(before)) => now.saturating_duration_since(*before),
            (Clock::Card(now), Clock::Card(before)) => {
                now.since(before).unwrap_or_else(|error| panic!("{error}"))
            }
            _ => panic!("marks of two devices"),
        }
    }
}

/// Something that a device ran.
#[derive(Debug)]
pub struct Launch {
    /// A kernel's name, a product's shape, or what kind of copy it is.
    pub name: String,
    /// When it could begin.
    pub begun: Mark,
    /// When it had ended.
    pub ended: Mark,
}

//! Timestamps between the operations that a rank has enqueued, on the clock of its device.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time at which everything enqueued before it has run.
#[derive(Debug)]
pub struct Mark(Clock);

#[derive(Debug)]
enum Clock {
    Host(Instant),
    Device(Box<dyn DeviceTimestamp>),
}

impl Mark {
    /// The current time, for devices whose operations have finished when they return.
    pub fn now() -> Self {
        Mark(Clock::Host(Instant::now()))
    }

    /// A time on the clock of a device.
    pub fn on_device(moment: impl DeviceTimestamp) -> Self {
        Mark(Clock::Device(Box::new(moment)))
    }

    /// The time since an earlier mark of the same device. Waits for both.
    pub fn since(&self, earlier: &Mark) -> Duration {
        match (&self.0, &earlier.0) {
            (Clock::Host(now), Clock::Host(before)) => now.saturating_duration_since(*before),
            (Clock::Device(now), Clock::Device(before)) => now.since(&**before),
            _ => panic!("marks of two devices"),
        }
    }
}

/// A time on the clock of a device.
pub trait DeviceTimestamp: Any + fmt::Debug {
    /// The time since an earlier one of the same device. Waits for both, and panics if the device has failed.
    fn since(&self, earlier: &dyn DeviceTimestamp) -> Duration;
}

/// What a transfer on a side stream is.
#[derive(Clone, Debug)]
pub struct LaunchedTransfer {
    /// The name of the stream.
    pub stream: Arc<str>,
    /// Bytes that the rank sends, or receives in a message.
    pub bytes: u64,
}

/// A kernel, copy or transfer that a device ran.
#[derive(Debug)]
pub struct Launch {
    /// A kernel's name, a product's shape, or what kind of copy it is.
    pub name: String,
    /// The transfer that it is, if it ran on a side stream.
    pub transfer: Option<LaunchedTransfer>,
    /// When the host enqueued it.
    pub enqueued: Instant,
    /// When it could start, because everything before it had finished.
    pub begun: Mark,
    /// When it had finished.
    pub ended: Mark,
}

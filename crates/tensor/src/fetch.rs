//! A small copy from a device to the host that does not block: the host can do other work until it needs the numbers.

use std::fmt;

/// Numbers requested with [`Backend::fetch`](crate::Backend::fetch), with their values at that point of the stream.
pub struct Fetch(Box<dyn FnOnce() -> Vec<f64>>);

impl Fetch {
    /// Numbers that have already arrived.
    pub fn ready(values: Vec<f64>) -> Self {
        Fetch(Box::new(move || values))
    }

    /// Numbers that `wait` returns once they have arrived.
    pub fn pending(wait: impl FnOnce() -> Vec<f64> + 'static) -> Self {
        Fetch(Box::new(wait))
    }

    /// Waits until they have arrived.
    pub fn wait(self) -> Vec<f64> {
        (self.0)()
    }
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Fetch")
    }
}

//! Numbers on their way from a device to the host, so that whoever reads them may do other things meanwhile.

use std::fmt;

/// Numbers that were asked for with [`Backend::fetch`](crate::Backend::fetch), as they are at that place of the stream.
pub struct Fetch(Box<dyn FnOnce() -> Vec<f64>>);

impl Fetch {
    /// Numbers that are here already.
    pub fn here(values: Vec<f64>) -> Self {
        Fetch(Box::new(move || values))
    }

    /// Numbers that `wait` waits for.
    pub fn coming(wait: impl FnOnce() -> Vec<f64> + 'static) -> Self {
        Fetch(Box::new(wait))
    }

    /// Waits until they are here.
    pub fn wait(self) -> Vec<f64> {
        (self.0)()
    }
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Fetch")
    }
}

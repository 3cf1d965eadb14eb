//! Links that take time: the ranks of one machine as if slower links connected them.
//!
//! A rank has one link of each level. A transfer occupies the sender's link for its bytes divided by the bandwidth, after the
//! transfers that the sender began before. It arrives one latency later. No thread spins: a rank that needs the data sleeps until then.
//!
//! A transfer begins when its data is ready and the receiver is, even if no thread has a core to copy it then: a network card
//! needs no core.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kintsugi_spec::{ByLevel, EmulatedLinks, Level};

/// When the emulated links of one rank are free.
#[derive(Debug)]
pub(crate) struct LinkClocks {
    links: EmulatedLinks,
    /// For each level, when the link has sent everything so far.
    free: Mutex<ByLevel<Option<Instant>>>,
}

impl LinkClocks {
    pub(crate) fn new(links: EmulatedLinks) -> Self {
        LinkClocks { links, free: Mutex::default() }
    }

    /// Sends bytes over the link of a level. `ready` is when both ranks could begin. Returns when the bytes arrive, if that takes
    /// time.
    pub(crate) fn send(&self, level: Level, bytes: usize, ready: Instant) -> Option<Instant> {
        let link = self.links[level]?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let free = &mut free[level];
        let occupied = Duration::from_secs_f64(bytes as f64 / link.bandwidth);
        let sent = free.map_or(ready, |free| free.max(ready)) + occupied;
        *free = Some(sent);
        Some(sent + Duration::from_secs_f64(link.latency))
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_spec::EmulatedLink;

    use super::*;

    #[test]
    fn a_link_sends_one_transfer_after_the_other() {
        let link = EmulatedLink { bandwidth: 1e6, latency: 3.0 };
        let clocks = LinkClocks::new(Level::ALL.map(|level| Some(link).filter(|_| level != Level::Package)));
        let ready = Instant::now();
        assert_eq!(clocks.send(Level::Package, 1 << 20, ready), None, "this level is not emulated");
        let first = clocks.send(Level::Node, 2_000_000, ready).unwrap();
        let second = clocks.send(Level::Node, 500_000, ready).unwrap();
        let other = clocks.send(Level::Cluster, 500_000, ready).unwrap();
        assert_eq!(first - ready, Duration::from_secs(5), "two seconds for the bytes and three of latency");
        assert_eq!(second - first, Duration::from_millis(500), "after the bytes before it");
        assert_eq!(other - ready, Duration::from_millis(3500), "another level has a link of its own");
    }
}

//! Links that take time: the ranks of one machine as if slower links connected them.
//!
//! A rank has one link of each level. A transfer occupies the sender's link for its bytes divided by the bandwidth, after the
//! transfers that the sender began before. It arrives one latency later. Nobody spins: whoever needs the data sleeps until then.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kintsugi_spec::{EmulatedLinks, Level};

/// When the emulated links of one rank are free.
#[derive(Debug)]
pub(crate) struct LinkClocks {
    links: EmulatedLinks,
    /// For each level, when the link has sent everything so far.
    free: Mutex<[Option<Instant>; Level::ALL.len()]>,
}

impl LinkClocks {
    pub(crate) fn new(links: EmulatedLinks) -> Self {
        LinkClocks { links, free: Mutex::default() }
    }

    /// Sends bytes over the link of a level from now on. Returns when they arrive, if that takes time.
    pub(crate) fn send(&self, level: Level, bytes: usize) -> Option<Instant> {
        let link = self.links[level as usize]?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let free = &mut free[level as usize];
        let (now, occupied) = (Instant::now(), Duration::from_secs_f64(bytes as f64 / link.bandwidth));
        let sent = free.map_or(now, |free| free.max(now)) + occupied;
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
        let clocks = LinkClocks::new([None, Some(link), Some(link)]);
        assert_eq!(clocks.send(Level::Package, 1 << 20), None, "this level is not emulated");
        let begun = Instant::now();
        let first = clocks.send(Level::Node, 2_000_000).unwrap();
        let second = clocks.send(Level::Node, 500_000).unwrap();
        let other = clocks.send(Level::Cluster, 500_000).unwrap();
        assert!(first >= begun + Duration::from_secs(5));
        assert_eq!(second - first, Duration::from_millis(500), "after the bytes before it");
        assert!(other < first, "another level has a link of its own");
    }
}

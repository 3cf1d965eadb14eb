//! The nodes of an allocation, which trials that run side by side divide among themselves.

use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a trial that waits for nodes looks whether the tuning was asked to stop.
const LOOK: Duration = Duration::from_millis(200);

/// The nodes of an allocation.
#[derive(Debug)]
pub struct NodePool {
    /// Ranks that a node has room for.
    per_node: usize,
    all: usize,
    free: Mutex<Vec<String>>,
    given_back: Condvar,
}

/// Nodes of one trial. They are given back when this is dropped.
#[derive(Debug)]
pub struct NodeLease<'a> {
    pool: &'a NodePool,
    /// The names of the nodes.
    pub names: Vec<String>,
}

impl NodePool {
    /// Nodes with room for `per_node` ranks each.
    pub fn new(names: Vec<String>, per_node: usize) -> Self {
        NodePool { per_node, all: names.len(), free: Mutex::new(names), given_back: Condvar::new() }
    }

    /// How many nodes `ranks` ranks need.
    pub fn nodes_for(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.per_node)
    }

    /// How many trials of `ranks` ranks have nodes at the same time.
    pub fn trials_of(&self, ranks: usize) -> usize {
        self.all / self.nodes_for(ranks)
    }

    /// Waits for the nodes of `ranks` ranks; `None` if the tuning is asked to stop, or if there are too few.
    pub fn take(&self, ranks: usize, is_stopped: impl Fn() -> bool) -> Option<NodeLease<'_>> {
        let wanted = self.nodes_for(ranks);
        let mut free = self.lock();
        while free.len() < wanted {
            if is_stopped() || wanted > self.all {
                return None;
            }
            let waited = self.given_back.wait_timeout(free, LOOK);
            free = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let names = free.drain(..wanted).collect();
        Some(NodeLease { pool: self, names })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for NodeLease<'_> {
    fn drop(&mut self) {
        self.pool.lock().extend(mem::take(&mut self.names));
        self.pool.given_back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread;

    use super::*;

    #[test]
    fn trials_side_by_side_have_disjoint_nodes() {
        let pool = NodePool::new(["a", "b", "c", "d"].map(str::to_owned).to_vec(), 8);
        assert_eq!(
            (pool.nodes_for(8), pool.nodes_for(9), pool.trials_of(16), pool.trials_of(4)),
            (1, 2, 2, 4)
        );
        let (one, two) = (pool.take(16, || false).unwrap(), pool.take(8, || false).unwrap());
        let names: HashSet<&String> = one.names.iter().chain(&two.names).collect();
        assert_eq!(names.len(), 3);
        assert!(pool.take(16, || true).is_none(), "one node is left, and the tuning stops");
        assert!(pool.take(40, || false).is_none(), "there will never be five");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.take(32, || false).map(|lease| lease.names.len()));
            drop((one, two));
            assert_eq!(waiting.join().unwrap(), Some(4));
        });
    }
}

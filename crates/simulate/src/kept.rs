//! Answers that are found once and kept.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, RwLock};

/// What was found once, by all that decides it.
pub(crate) struct Kept<K, V>(RwLock<HashMap<K, Arc<V>>>);

impl<K, V> Default for Kept<K, V> {
    fn default() -> Self {
        Kept(RwLock::default())
    }
}

impl<K: Eq + Hash, V> Kept<K, V> {
    /// The answer for a key. Two threads that ask at once may both find it; they find the same.
    pub(crate) fn get(&self, key: K, find: impl FnOnce() -> V) -> Arc<V> {
        if let Some(found) = self.0.read().expect("no finder panicked").get(&key) {
            return Arc::clone(found);
        }
        let found = Arc::new(find());
        Arc::clone(self.0.write().expect("no finder panicked").entry(key).or_insert(found))
    }
}

//! A cache of results by key.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::RwLock;

/// A cache that threads share.
pub(crate) struct Memo<K, V>(RwLock<HashMap<K, V>>);

impl<K, V> Default for Memo<K, V> {
    fn default() -> Self {
        Memo(RwLock::default())
    }
}

impl<K: Eq + Hash, V: Clone> Memo<K, V> {
    /// The value for a key. If two threads request it at once, both may compute it, with the same result.
    pub(crate) fn get(&self, key: K, compute: impl FnOnce() -> V) -> V {
        if let Some(known) = self.0.read().expect("no thread panicked with the lock").get(&key) {
            return known.clone();
        }
        let value = compute();
        self.0.write().expect("no thread panicked with the lock").entry(key).or_insert(value).clone()
    }
}

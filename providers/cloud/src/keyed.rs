// SPDX-License-Identifier: Apache-2.0
//! Values that one call at a time changes.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

/// A value for each key, each behind its own lock: calls of one key wait for each other, and no others do. For what the provider
/// remembers of an object in the cloud.
#[derive(Debug)]
pub struct Keyed<K, V> {
    entries: Mutex<HashMap<K, Arc<tokio::sync::Mutex<V>>>>,
}

impl<K, V> Default for Keyed<K, V> {
    fn default() -> Self {
        Self { entries: Mutex::default() }
    }
}

impl<K: Clone + Eq + Hash, V> Keyed<K, V> {
    /// Waits until nobody else has the value. The first call of a key makes it.
    pub async fn lock(&self, key: &K, new: impl FnOnce() -> V) -> OwnedMutexGuard<V> {
        let entry = {
            let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || Arc::new(tokio::sync::Mutex::new(new()));
            Arc::clone(entries.entry(key.clone()).or_insert_with(new))
        };
        entry.lock_owned().await
    }

    /// The same; `None` if others have the value for longer than `patience`.
    pub async fn lock_within(
        &self,
        patience: Duration,
        key: &K,
        new: impl FnOnce() -> V,
    ) -> Option<OwnedMutexGuard<V>> {
        tokio::time::timeout(patience, self.lock(key, new)).await.ok()
    }

    /// Forgets the value. A call that waits for it gets it all the same, so only a value that says nothing more may go.
    pub fn remove(&self, key: &K) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn calls_of_one_key_wait_and_others_do_not() {
        let values = Keyed::default();
        let (patience, zero) = (Duration::from_secs(1), || 0);
        let mut a = values.lock(&"a", zero).await;
        *a += 1;
        assert!(values.lock_within(patience, &"a", zero).await.is_none());
        assert_eq!(values.lock_within(patience, &"b", || 7).await.as_deref(), Some(&7));
        drop(a);
        assert_eq!(values.lock_within(Duration::ZERO, &"a", zero).await.as_deref(), Some(&1));
        assert_eq!(values.len(), 2);
        values.remove(&"a");
        assert_eq!(*values.lock(&"a", zero).await, 0);
    }
}

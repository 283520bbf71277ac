// SPDX-License-Identifier: Apache-2.0
//! The last known state of the edge's objects, so that a steady state needs no call.
//!
//! [`follow`] fills it from a watch, and the provider puts in the responses to its own writes, before the watch delivers them. The
//! [`Store`] never replaces a newer version by an older one. It never writes to the API server.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt as _};
use steerage_watch::{Event, Store, is_older};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::entry::{Change, Entry};
use crate::index::{Index, References};

/// All objects of a kind, by name.
#[derive(Debug)]
pub(crate) struct Cache<S: Eq> {
    inner: Mutex<Inner<S>>,
    listed: Notify,
}

#[derive(Debug)]
struct Inner<S: Eq> {
    store: Store<Entry<S>>,
    /// The last known versions of objects that the provider deleted, by name and UID. Until the watch delivers the deletion, its
    /// late events must not bring the objects back.
    forgotten: BTreeMap<(String, String), String>,
    index: Index,
}

impl<S: Eq> Default for Cache<S> {
    fn default() -> Self {
        let inner = Inner { store: Store::default(), forgotten: BTreeMap::new(), index: Index::default() };
        Self { inner: Mutex::new(inner), listed: Notify::new() }
    }
}

impl<S: Clone + References> Cache<S> {
    /// Returns when a first list is complete.
    pub(crate) async fn listed(&self) {
        loop {
            let listed = self.listed.notified();
            if self.lock().store.has_synced() {
                return;
            }
            listed.await;
        }
    }

    /// Whether a first list is complete.
    pub(crate) fn is_listed(&self) -> bool {
        self.lock().store.has_synced()
    }

    /// One object.
    pub(crate) fn get(&self, name: &str) -> Option<Entry<S>> {
        self.lock().store.get(&name.to_owned()).cloned()
    }

    /// Looks at all objects, by name.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&mut dyn Iterator<Item = &Entry<S>>) -> T) -> T {
        look(&mut self.lock().store.iter())
    }

    /// Looks at the objects whose name begins with `prefix`, and at those to which they refer.
    pub(crate) fn read_prefix<T>(
        &self,
        prefix: &str,
        look: impl for<'a> FnOnce(&mut dyn Iterator<Item = &'a Entry<S>>, &'a Store<Entry<S>>) -> T,
    ) -> T {
        let inner = self.lock();
        let entries = inner.store.iter_from(&prefix.to_owned());
        look(&mut entries.take_while(|entry| entry.name.starts_with(prefix)), &inner.store)
    }

    /// Looks at what the objects refer to.
    pub(crate) fn index<T>(&self, look: impl FnOnce(&Index) -> T) -> T {
        look(&self.lock().index)
    }

    /// Applies an event of the watch, or a response to a write of the provider as [`Event::Apply`].
    pub(crate) fn apply(&self, event: Event<Entry<S>>) -> Vec<Change<S>> {
        let mut changes = Vec::new();
        let mut inner = self.lock();
        let Inner { store, forgotten, index } = &mut *inner;
        match &event {
            // Neither the list nor the watch after it contains what was deleted before.
            Event::Init => forgotten.clear(),
            Event::InitApply(entry) | Event::Apply(entry) => {
                if forgotten.contains_key(&(entry.name.clone(), entry.uid.clone())) {
                    return changes;
                }
            }
            Event::Delete { key, version } => {
                // The deletion of an earlier object with this name is older than a later object.
                forgotten.retain(|(name, _), known| name != key || is_older(version, known));
            }
            Event::InitKeep(_) | Event::InitDone => {}
        }
        store.apply(event, |old, new| {
            index.change(old, new);
            changes.push(Change { old: old.cloned(), new: new.cloned() });
        });
        if store.has_synced() {
            self.listed.notify_waiters();
        }
        changes
    }

    /// Removes an object that the provider deleted.
    pub(crate) fn forget(&self, name: &str, uid: &str) {
        let mut inner = self.lock();
        let Inner { store, forgotten, index } = &mut *inner;
        let key = name.to_owned();
        let known = store.get(&key).filter(|entry| entry.uid == uid);
        let Some(version) = known.map(|entry| entry.version.clone()) else { return };
        forgotten.insert((key.clone(), uid.to_owned()), version.clone());
        store.apply(Event::Delete { key, version }, |old, new| index.change(old, new));
    }

    fn lock(&self) -> MutexGuard<'_, Inner<S>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps `cache` current until `stop`, and reports every change that is not the provider's own.
pub(crate) async fn follow<S: Clone + References>(
    mut events: impl Stream<Item = Event<Entry<S>>> + Unpin,
    cache: &Cache<S>,
    stop: CancellationToken,
    mut on_change: impl FnMut(Change<S>),
) {
    while let Some(Some(event)) = stop.run_until_cancelled(events.next()).await {
        cache.apply(event).into_iter().for_each(&mut on_change);
    }
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! The last known state of the edge's objects, so that a steady state needs no call.
//!
//! [`follow`] fills it from a watch, and the provider puts in the responses to its own writes, before the watch delivers them.
//! An older version never replaces a newer one. It never writes to the API server.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use kube::api::{Api, DynamicObject};
use kube_runtime::WatchStreamExt as _;
use kube_runtime::utils::Backoff;
use kube_runtime::watcher::{self, Event};
use serde::de::DeserializeOwned;
use serde_json::Value;
use steerage_provider_api::Owner;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::spec;

/// One object.
#[derive(Clone, Debug)]
pub(crate) struct Entry<S> {
    /// Its UID.
    pub(crate) uid: String,
    /// Its resource version, the precondition of writes.
    pub(crate) version: String,
    /// Its owner; `None` for an object that Steerage does not manage.
    pub(crate) owner: Option<Owner>,
    /// Whether Steerage's label is set, with or without an owner.
    pub(crate) managed: bool,
    /// Whether it is being deleted.
    pub(crate) deleting: bool,
    /// `spec` and `status`, or their JSON where this version cannot read them.
    pub(crate) content: Result<S, Value>,
}

impl<S: DeserializeOwned> Entry<S> {
    /// Reads an object; `S` is read from all of it but `metadata`.
    pub(crate) fn new(object: DynamicObject) -> Self {
        let DynamicObject { metadata, data, .. } = object;
        let labels = metadata.labels.as_ref();
        Self {
            owner: spec::owner(labels),
            managed: labels.and_then(|l| l.get(spec::MANAGED_BY)).is_some_and(|v| v == spec::MANAGER),
            deleting: metadata.deletion_timestamp.is_some(),
            uid: metadata.uid.unwrap_or_default(),
            version: metadata.resource_version.unwrap_or_default(),
            content: serde_json::from_value(data.clone()).map_err(|_| data),
        }
    }
}

/// A change of an object.
#[derive(Clone, Debug)]
pub(crate) struct Change<S> {
    /// The old state; `None` if the object is new.
    pub(crate) old: Option<Entry<S>>,
    /// The new state; `None` if the object was deleted.
    pub(crate) new: Option<Entry<S>>,
}

/// All objects of a kind, by name.
#[derive(Debug)]
pub(crate) struct Table<S> {
    rows: Mutex<BTreeMap<String, (u64, Entry<S>)>>,
    round: watch::Sender<u64>,
    listed: watch::Sender<bool>,
}

impl<S> Default for Table<S> {
    fn default() -> Self {
        Self { rows: Mutex::default(), round: watch::Sender::new(0), listed: watch::Sender::new(false) }
    }
}

impl<S: Clone> Table<S> {
    /// Returns when a first list is complete.
    pub(crate) async fn listed(&self) {
        // The sender is held by `self`, so the wait cannot fail.
        let _ = self.listed.subscribe().wait_for(|listed| *listed).await;
    }

    /// One object.
    pub(crate) fn get(&self, name: &str) -> Option<Entry<S>> {
        self.lock().get(name).map(|(_, entry)| entry.clone())
    }

    /// Looks at all objects, by name.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&mut dyn Iterator<Item = (&str, &Entry<S>)>) -> T) -> T {
        look(&mut self.lock().iter().map(|(name, (_, entry))| (name.as_str(), entry)))
    }

    /// Looks at the objects whose name begins with `prefix`.
    pub(crate) fn read_prefix<T>(
        &self,
        prefix: &str,
        look: impl FnOnce(&mut dyn Iterator<Item = (&str, &Entry<S>)>) -> T,
    ) -> T {
        let rows = self.lock();
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let mut found = rows.range::<str, _>(from).take_while(|(name, _)| name.starts_with(prefix));
        look(&mut found.by_ref().map(|(name, (_, entry))| (name.as_str(), entry)))
    }

    /// Stores an object unless a newer version is known; `None` if nothing changed.
    pub(crate) fn put(&self, name: String, entry: Entry<S>) -> Option<Change<S>> {
        let round = *self.round.borrow();
        let mut rows = self.lock();
        if let Some((seen, old)) = rows.get_mut(&name)
            && !newer(&entry.version, &old.version)
        {
            *seen = round;
            return None;
        }
        let old = rows.insert(name, (round, entry.clone())).map(|(_, old)| old);
        Some(Change { old, new: Some(entry) })
    }

    /// Removes an object that was deleted at `version`, unless a newer one of its name is known.
    pub(crate) fn remove(&self, name: &str, version: &str) -> Option<Change<S>> {
        let mut rows = self.lock();
        if rows.get(name).is_some_and(|(_, entry)| newer(&entry.version, version)) {
            return None;
        }
        let (_, old) = rows.remove(name)?;
        Some(Change { old: Some(old), new: None })
    }

    /// Removes an object that the provider deleted.
    pub(crate) fn forget(&self, name: &str, uid: &str) {
        let mut rows = self.lock();
        if rows.get(name).is_some_and(|(_, entry)| entry.uid == uid) {
            rows.remove(name);
        }
    }

    /// A list starts.
    fn begin(&self) {
        self.round.send_modify(|round| *round += 1);
    }

    /// A list is complete: objects that it does not contain are deleted.
    fn finish(&self) -> Vec<Change<S>> {
        let round = *self.round.borrow();
        let mut gone = Vec::new();
        self.lock().retain(|_, (seen, entry)| {
            let keep = *seen == round;
            if !keep {
                gone.push(Change { old: Some(entry.clone()), new: None });
            }
            keep
        });
        self.listed.send_replace(true);
        gone
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (u64, Entry<S>)>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The delay before a watch is retried: short, because load balancers wait for it.
#[derive(Debug, Default)]
struct Pause {
    failures: u32,
}

impl Iterator for Pause {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.failures = self.failures.saturating_add(1).min(6);
        Some(Duration::from_millis(100) * (1 << self.failures))
    }
}

impl Backoff for Pause {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Whether version `a` is later than `b`. Versions are decimal numbers of rising value (KEP-5504); any other is taken
/// as later.
fn newer(a: &str, b: &str) -> bool {
    match (a.parse::<u128>(), b.parse::<u128>()) {
        (Ok(a), Ok(b)) => a > b,
        _ => true,
    }
}

/// Keeps `table` like the collection behind `api` until `stop`, and reports every change that is not the provider's own.
pub(crate) async fn follow<S>(
    api: Api<DynamicObject>,
    table: &Table<S>,
    stop: CancellationToken,
    mut tell: impl FnMut(Change<S>),
) where
    S: Clone + DeserializeOwned,
{
    let events = watcher::watcher(api, watcher::Config::default()).backoff(Pause::default());
    let mut events = std::pin::pin!(events);
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            None => return,
            Some(Err(error)) => tracing::warn!(%error, "watch of the edge's objects failed; retrying"),
            Some(Ok(Event::Init)) => table.begin(),
            Some(Ok(Event::InitApply(object) | Event::Apply(object))) => {
                if let Some(name) = object.metadata.name.clone() {
                    table.put(name, Entry::new(object)).map(&mut tell);
                }
            }
            Some(Ok(Event::Delete(object))) => {
                let version = object.metadata.resource_version.unwrap_or_default();
                if let Some(name) = &object.metadata.name {
                    table.remove(name, &version).map(&mut tell);
                }
            }
            Some(Ok(Event::InitDone)) => table.finish().into_iter().for_each(&mut tell),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(version: &str) -> Entry<u8> {
        Entry {
            uid: String::new(),
            version: version.to_owned(),
            owner: None,
            managed: true,
            deleting: false,
            content: Ok(0),
        }
    }

    fn names(table: &Table<u8>) -> Vec<String> {
        table.read(|rows| rows.map(|(name, entry)| format!("{name}@{}", entry.version)).collect())
    }

    #[test]
    fn older_versions_never_win() {
        let table = Table::default();
        assert!(table.put("a".to_owned(), entry("10")).is_some());
        assert!(table.put("a".to_owned(), entry("9")).is_none(), "a late event of the watch");
        assert!(table.put("a".to_owned(), entry("10")).is_none(), "the watch's echo of our own write");
        assert!(table.remove("a", "9").is_none(), "the deletion of an earlier object of that name");
        assert_eq!(names(&table), ["a@10"]);
        assert!(table.remove("a", "11").is_some());
        assert!(names(&table).is_empty());
    }

    #[test]
    fn list_deletes_missing_objects() {
        let table = Table::default();
        for name in ["a", "b"] {
            table.put(name.to_owned(), entry("1"));
        }
        table.begin();
        table.put("b".to_owned(), entry("1"));
        table.put("c".to_owned(), entry("5"));
        let gone: Vec<_> =
            table.finish().into_iter().map(|change| change.old.map(|old| old.version)).collect();
        assert_eq!(gone, [Some("1".to_owned())]);
        assert_eq!(names(&table), ["b@1", "c@5"]);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Writes what this host reports: its own `EdgeHost`, and `EdgeTargetHealth` objects of load balancers and of the targets that they
//! share.
//!
//! It writes only what differs: at the start, and every ten minutes, it lists what this host has written, and compares. It writes each
//! object at most once a second, and never more than [`MOST_WRITES_AT_ONCE`] objects in [`COMPARE_INTERVAL`], the most important ones
//! first. It deletes objects of this host that nothing needs. It retries with backoff, and the engine never waits for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use steerage_edge_api::DrainingNode;
use steerage_process::duration;
use steerage_watch::Backoff;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::shards::Shards;

mod listing;
mod objects;
mod sink;
mod statuses;
mod wanted;

use listing::Listing;
use objects::{ObjectKey, StatusObject, WantedObjects};
pub(crate) use sink::StatusSink;
pub(crate) use statuses::Statuses;
use wanted::{ChangedKeys, Wanted};

/// The least time between two writes of one object.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The least time between two comparisons of written objects with wanted ones.
const COMPARE_INTERVAL: Duration = Duration::from_millis(200);
/// Writes and deletions after one comparison: at most 50 a second.
const MOST_WRITES_AT_ONCE: usize = 10;
/// After this time without a write or an attempt an object comes before all others but the `EdgeHost`, whatever they say.
const LONG_WAIT: Duration = Duration::from_secs(30);
/// Even half of its first delay is no less than [`WRITE_INTERVAL`].
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(10));
/// Also of a page of a list: takeovers wait meanwhile.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Written objects are compared with those of the API server after this time, in case another client has changed them.
const RESYNC_PERIOD: Duration = Duration::from_mins(10);
/// Where nothing lists what is written, all objects are looked at after this time: some may be due to be written again.
const LOOK_AT_ALL_PERIOD: Duration = Duration::from_mins(1);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostStatus {
    pub(crate) interface: String,
    /// The host's own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    /// The shards for which this host is active.
    pub(crate) active: Shards,
    /// The nodes that drain.
    pub(crate) draining: Vec<DrainingNode>,
    pub(crate) load_balancers: Statuses,
}

/// The last write of one object.
#[derive(Debug)]
struct WriteRecord {
    /// The object on the API server; `None` if that is not known, or differs.
    written: Option<StatusObject>,
    /// Shared reports to which the object on the API server may refer while `written` is not known.
    other_references: BTreeSet<String>,
    /// Whether the last attempt failed.
    has_failed: bool,
    at: Instant,
    not_before: Instant,
    backoff: Backoff,
}

impl WriteRecord {
    /// Whether the object is on the API server as it was last written.
    fn is_written(&self) -> bool {
        self.written.is_some()
    }

    /// The names of the shared reports to which the object on the API server may refer.
    fn references(&self, host: &str) -> impl Iterator<Item = String> {
        let written = self.written.iter().flat_map(move |object| object.shared_reports(host));
        written.chain(self.other_references.iter().cloned())
    }
}

pub(crate) struct StatusWriter {
    sink: StatusSink,
    /// The host's name.
    host: String,
    metrics: Metrics,
    records: HashMap<ObjectKey, WriteRecord>,
    /// Objects that may differ from what is written, beside those that wait.
    unseen: ChangedKeys,
    /// When all are looked at again, where nothing lists what is written.
    look_at_all: Instant,
    /// Since when objects that differ wait for their turn, or for another attempt.
    waiting: HashMap<ObjectKey, Instant>,
    /// Names of objects that nothing needs, and when they may be deleted.
    stale: BTreeMap<String, Instant>,
    listing: Listing,
    /// After writes that all failed: the API server is away, overloaded, or refuses them all. The `EdgeHost` does not wait for it.
    paused_until: Instant,
    pause: Backoff,
}

/// How one write or deletion ended.
type WriteResult = anyhow::Result<()>;

impl StatusWriter {
    pub(crate) fn new(sink: StatusSink, host: String, metrics: Metrics) -> Self {
        let now = Instant::now();
        Self {
            listing: Listing::new(sink.has_list(), now),
            sink,
            host,
            metrics,
            records: HashMap::new(),
            unseen: ChangedKeys::All,
            look_at_all: now,
            waiting: HashMap::new(),
            stale: BTreeMap::new(),
            paused_until: now,
            pause: BACKOFF,
        }
    }

    /// Runs until the engine is gone, then writes the last changes, the most important ones alone if they are many.
    pub(crate) async fn run(mut self, mut status: watch::Receiver<HostStatus>) -> anyhow::Result<()> {
        let mut wanted = Wanted::new(now(&mut status));
        loop {
            let next = self.step(&wanted.objects).await;
            tokio::time::sleep(COMPARE_INTERVAL).await;
            tokio::select! {
                biased;
                changed = status.changed() => {
                    self.note(wanted.update(now(&mut status)));
                    if changed.is_err() {
                        let last = self.write(&wanted.objects, true);
                        let _ = tokio::time::timeout(WRITE_INTERVAL, last).await;
                        return Ok(());
                    }
                },
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// These objects may have changed.
    fn note(&mut self, changed: ChangedKeys) {
        self.unseen.add(changed);
    }

    /// Lists a page if that is due, and writes what is due. Returns when the next step is due.
    async fn step(&mut self, wanted: &WantedObjects) -> Instant {
        let now = Instant::now();
        if wanted.is_empty() {
            // The engine has not planned yet.
            return now + RESYNC_PERIOD;
        }
        let next_list = self.list(wanted).await;
        let next_write = self.write(wanted, false).await;
        next_list.min(next_write)
    }

    /// Writes and deletes some of what is due. Returns when the next one is due.
    async fn write(&mut self, wanted: &WantedObjects, is_last: bool) -> Instant {
        let now = Instant::now();
        if !self.sink.has_list() && now >= self.look_at_all {
            self.unseen = ChangedKeys::All;
            self.look_at_all = now + LOOK_AT_ALL_PERIOD;
        }
        let unseen = std::mem::take(&mut self.unseen);
        self.forget_unwanted(wanted, &unseen, now);
        let keys = self.to_look_at(wanted, unseen);
        let is_paused = now < self.paused_until && !is_last;
        let (mut due, mut next) = self.due(keys, now, is_last);
        let has_rest = due.len() > MOST_WRITES_AT_ONCE;
        due.truncate(MOST_WRITES_AT_ONCE);
        let (sink, host) = (&self.sink, &self.host);
        let writes = due.into_iter().map(|(key, object)| async move {
            (key, object, within(WRITE_TIMEOUT, sink.put(host, key, object)).await)
        });
        let written = futures::future::join_all(writes).await;
        self.pause_if_all_failed(&written);
        let room = MOST_WRITES_AT_ONCE - written.len();
        for (key, object, result) in written {
            next = next.min(self.record(key, object, result));
        }
        self.metrics.count_status_objects_waiting(self.waiting.len());
        if has_rest {
            return now;
        }
        if is_paused {
            return next.min(self.paused_until);
        }
        next.min(self.delete_stale(now, room).await)
    }

    /// All that may differ from what is written: a change of one object must not cost as much as there are objects.
    fn to_look_at<'a>(
        &self,
        wanted: &'a WantedObjects,
        unseen: ChangedKeys,
    ) -> Vec<(&'a ObjectKey, &'a StatusObject)> {
        match unseen {
            ChangedKeys::All => wanted.iter().collect(),
            ChangedKeys::These(mut keys) => {
                keys.insert(ObjectKey::Host);
                keys.extend(self.waiting.keys().cloned());
                keys.iter().filter_map(|key| wanted.get_key_value(key)).collect()
            }
        }
    }

    /// Which of these are due, the most important first, and when others are.
    fn due<'a>(
        &mut self,
        objects: Vec<(&'a ObjectKey, &'a StatusObject)>,
        now: Instant,
        is_last: bool,
    ) -> (Vec<(&'a ObjectKey, &'a StatusObject)>, Instant) {
        let mut next = now + RESYNC_PERIOD;
        let mut due = Vec::new();
        for (key, object) in objects {
            let record = self.records.get(key);
            if record.is_none() && *key != ObjectKey::Host && !self.listing.has_listed() {
                continue;
            }
            // Nothing lists these.
            let is_unlisted = *key == ObjectKey::Host || !self.sink.has_list();
            let is_old = is_unlisted && record.is_some_and(|record| now >= record.at + RESYNC_PERIOD);
            if !is_old && record.is_some_and(|record| record.written.as_ref() == Some(object)) {
                self.waiting.remove(key);
                continue;
            }
            let since = *self.waiting.entry(key.clone()).or_insert(now);
            if *key != ObjectKey::Host && now < self.paused_until && !is_last {
                next = next.min(self.paused_until);
                continue;
            }
            match record.map(|record| record.not_before) {
                Some(then) if then > now && !is_last => next = next.min(then),
                _ => {
                    let rank =
                        object.rank(now >= since + LONG_WAIT, record.is_some_and(WriteRecord::is_written));
                    due.push((rank, since, key, object));
                }
            }
        }
        due.sort_unstable_by_key(|(rank, since, key, _)| (*rank, *since, *key));
        (due.into_iter().map(|(_, _, key, object)| (key, object)).collect(), next)
    }

    /// Reports of shared targets must be deleted; those of a load balancer are deleted with it.
    fn forget_unwanted(&mut self, wanted: &WantedObjects, unseen: &ChangedKeys, now: Instant) {
        let is_gone = |key: &&ObjectKey| !wanted.contains_key(*key);
        let gone: Vec<_> = match unseen {
            ChangedKeys::All => {
                self.waiting.retain(|key, _| wanted.contains_key(key));
                self.records.keys().filter(is_gone).cloned().collect()
            }
            ChangedKeys::These(keys) => keys.iter().filter(is_gone).cloned().collect(),
        };
        for key in gone {
            self.waiting.remove(&key);
            let was_known = self.records.remove(&key).is_some();
            if was_known && matches!(key, ObjectKey::Shared(_)) {
                self.stale.entry(key.object_name(&self.host)).or_insert(now);
            }
        }
        if self.stale.is_empty() {
            return;
        }
        let are_wanted: &mut dyn Iterator<Item = &ObjectKey> = match unseen {
            ChangedKeys::All => &mut wanted.keys(),
            ChangedKeys::These(keys) => &mut keys.iter().filter(|key| wanted.contains_key(*key)),
        };
        for key in are_wanted {
            self.stale.remove(&key.object_name(&self.host));
        }
    }

    /// Deletes what no written report refers to any more. Returns when the next deletion is due.
    async fn delete_stale(&mut self, now: Instant, most: usize) -> Instant {
        let next = now + RESYNC_PERIOD;
        // Reports on pages to come may refer to what earlier ones have shown.
        if self.stale.is_empty() || !self.listing.is_complete() {
            return next;
        }
        let referred: BTreeSet<String> =
            self.records.values().flat_map(|record| record.references(&self.host)).collect();
        let is_due = |(name, then): &(&String, &Instant)| **then <= now && !referred.contains(*name);
        let names: Vec<_> =
            self.stale.iter().filter(is_due).map(|(name, _)| name.clone()).take(most).collect();
        let sink = &self.sink;
        let deletions = names.into_iter().map(|name| async move {
            let result = within(WRITE_TIMEOUT, sink.delete(&name)).await;
            (name, result)
        });
        for (name, result) in futures::future::join_all(deletions).await {
            match result {
                Ok(()) => {
                    self.metrics.status_writes.inc();
                    self.stale.remove(&name);
                }
                Err(error) => {
                    self.metrics.status_write_failures.inc();
                    let retry_in =
                        if sink::is_forbidden(&error) { RESYNC_PERIOD } else { BACKOFF.delay(1, 1.0) };
                    tracing::warn!(
                        object = format!("EdgeTargetHealth/{name}"),
                        error = steerage_model::chain(error.as_ref()),
                        retry_in = %duration::rounded(retry_in),
                        "stale status not deleted; retrying"
                    );
                    self.stale.insert(name, now + retry_in);
                }
            }
        }
        self.stale.values().min().map_or(next, |first| next.min((*first).max(now + WRITE_INTERVAL)))
    }

    /// Each object has a backoff, but thousands of them would still be tried one after the other. One alone that fails again and again
    /// delays no other.
    fn pause_if_all_failed(&mut self, written: &[(&ObjectKey, &StatusObject, WriteResult)]) {
        let has_failed_before =
            |key: &ObjectKey| self.records.get(key).is_some_and(|record| record.has_failed);
        match written {
            [] => {}
            [(key, _, Err(_))] if has_failed_before(key) => {}
            _ if written.iter().all(|(_, _, result)| result.is_err()) => {
                self.paused_until = Instant::now() + self.pause.next_delay();
            }
            _ => self.pause.reset(),
        }
    }

    /// Returns when the object is to be written again.
    fn record(&mut self, key: &ObjectKey, object: &StatusObject, result: WriteResult) -> Instant {
        let now = Instant::now();
        let before = self.records.get(key);
        let mut backoff = before.map_or(BACKOFF, |record| record.backoff);
        let (record, again) = match result {
            Ok(()) => {
                self.metrics.status_writes.inc();
                self.waiting.remove(key);
                let record = WriteRecord {
                    written: Some(object.clone()),
                    other_references: BTreeSet::new(),
                    has_failed: false,
                    at: now,
                    not_before: now + WRITE_INTERVAL,
                    backoff: BACKOFF,
                };
                (record, now + RESYNC_PERIOD)
            }
            Err(error) => {
                self.metrics.status_write_failures.inc();
                let retry_in = backoff.next_delay();
                let not_before = now + retry_in;
                tracing::warn!(
                    object = format!("{}/{}", key.kind(), key.object_name(&self.host)),
                    error = steerage_model::chain(error.as_ref()),
                    retry_in = %duration::rounded(retry_in),
                    "status not written; retrying"
                );
                // The attempt may have had an effect or not.
                let references = before.into_iter().flat_map(|record| record.references(&self.host));
                let other_references = references.chain(object.shared_reports(&self.host)).collect();
                self.waiting.insert(key.clone(), now);
                let record = WriteRecord {
                    written: None,
                    other_references,
                    has_failed: true,
                    at: now,
                    not_before,
                    backoff,
                };
                (record, not_before)
            }
        };
        self.records.insert(key.clone(), record);
        again
    }
}

fn now(status: &mut watch::Receiver<HostStatus>) -> HostStatus {
    status.borrow_and_update().clone()
}

async fn within<T>(limit: Duration, call: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(anyhow::anyhow!("timed out")))
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! Compares what the API server has of this host with what is wanted, page by page: at the start, and from time to time after that.

use std::collections::{BTreeSet, HashSet};

use steerage_process::duration;
use steerage_watch::Backoff;
use tokio::time::Instant;

use super::objects::{ObjectKey, WantedObjects};
use super::sink::{self, ListedObject, Page};
use super::wanted::ChangedKeys;
use super::{BACKOFF, RESYNC_PERIOD, StatusWriter, WRITE_TIMEOUT, WriteRecord, within};

/// How far a list has come.
#[derive(Debug)]
pub(super) struct Listing {
    /// Whether a list is complete, or lists are unavailable: from then on objects are written that no list has shown.
    has_listed: bool,
    /// When the next page is asked for; `None` without lists.
    due: Option<Instant>,
    /// Of the list whose pages are being read.
    current: Option<CurrentList>,
    backoff: Backoff,
}

#[derive(Debug)]
struct CurrentList {
    began: Instant,
    /// The token with which to ask for the next page.
    token: String,
    /// The objects of earlier pages.
    seen: HashSet<ObjectKey>,
}

impl Listing {
    pub(super) fn new(has_list: bool, now: Instant) -> Self {
        Self { has_listed: !has_list, due: has_list.then_some(now), current: None, backoff: BACKOFF }
    }

    pub(super) fn has_listed(&self) -> bool {
        self.has_listed
    }

    /// Whether a list is complete or lists are unavailable, and no other list has begun.
    pub(super) fn is_complete(&self) -> bool {
        self.has_listed && self.current.is_none()
    }
}

impl StatusWriter {
    /// Reads a page if one is due. Returns when the next one is.
    pub(super) async fn list(&mut self, wanted: &WantedObjects) -> Instant {
        let now = Instant::now();
        let Some(due) = self.listing.due else { return now + RESYNC_PERIOD };
        if now < due {
            return due;
        }
        let current = self.listing.current.take();
        let token = current.as_ref().map(|current| current.token.as_str());
        let page = within(WRITE_TIMEOUT, self.sink.list(&self.host, token)).await;
        // Records are others now, and objects that no list has shown may be written from now on.
        self.unseen = ChangedKeys::All;
        let next = match page {
            Ok(page) => self.take_page(wanted, &page, current, now),
            Err(error) => self.record_list_failure(&error),
        };
        self.listing.due = Some(next);
        next
    }

    /// Returns when to ask for the next page.
    fn take_page(
        &mut self,
        wanted: &WantedObjects,
        page: &Page,
        current: Option<CurrentList>,
        now: Instant,
    ) -> Instant {
        self.listing.backoff.reset();
        let (began, mut seen) =
            current.map_or_else(|| (now, HashSet::new()), |current| (current.began, current.seen));
        for object in &page.items {
            match self.wanted_key(wanted, object.name()) {
                Some(key) => {
                    self.compare(wanted, &key, object, began);
                    seen.insert(key);
                }
                None => {
                    self.stale.entry(object.name().to_owned()).or_insert(now);
                }
            }
        }
        if let Some(token) = page.next() {
            self.listing.current = Some(CurrentList { began, token, seen });
            return now;
        }
        for (key, record) in &mut self.records {
            // Another client has deleted it.
            if *key != ObjectKey::Host && !seen.contains(key) && record.at < began {
                (record.written, record.other_references) = (None, BTreeSet::new());
            }
        }
        self.listing.has_listed = true;
        began + RESYNC_PERIOD
    }

    /// The wanted object of this name.
    fn wanted_key(&self, wanted: &WantedObjects, name: &str) -> Option<ObjectKey> {
        let name = name.strip_suffix(&self.host)?.strip_suffix('.')?;
        let keys = [ObjectKey::LoadBalancer(name.to_owned()), ObjectKey::Shared(name.to_owned())];
        keys.into_iter().find(|key| wanted.contains_key(key))
    }

    /// Pages show objects as they were when the list began.
    fn compare(&mut self, wanted: &WantedObjects, key: &ObjectKey, listed: &ListedObject, began: Instant) {
        let record = self.records.get(key);
        let Some(object) = wanted.get(key).filter(|_| record.is_none_or(|record| record.at < began)) else {
            return;
        };
        // What is written differs from what is wanted for as long as that waits for its turn.
        let known = record.and_then(|record| record.written.as_ref()).unwrap_or(object);
        let is_there = known.target_health(&self.host).is_some_and(|known| listed.matches(&known));
        let written = is_there.then(|| known.clone());
        let other_references = if is_there { BTreeSet::new() } else { listed.shared_reports().collect() };
        let new = WriteRecord {
            written: None,
            other_references: BTreeSet::new(),
            has_failed: false,
            at: began,
            not_before: began,
            backoff: BACKOFF,
        };
        let record = self.records.entry(key.clone()).or_insert(new);
        (record.written, record.other_references) = (written, other_references);
    }

    /// Returns when to begin anew.
    fn record_list_failure(&mut self, error: &anyhow::Error) -> Instant {
        self.metrics.status_write_failures.inc();
        // Without the permission nothing is known, and everything is written.
        let is_forbidden = sink::is_forbidden(error);
        self.listing.has_listed |= is_forbidden;
        let (retry_in, message) = if is_forbidden {
            (RESYNC_PERIOD, "no permission to list EdgeTargetHealth objects; writing all and deleting none")
        } else {
            (self.listing.backoff.next_delay(), "EdgeTargetHealth objects not listed; retrying")
        };
        tracing::warn!(
            error = steerage_model::chain(error.as_ref()),
            retry_in = %duration::rounded(retry_in),
            "{message}"
        );
        Instant::now() + retry_in
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Lists followed by watches, as streams of [`Event`]s.
//!
//! The streams never end and never fail: errors are logged, counted and retried. Every event and every bookmark is recorded in
//! [`Staleness`], so that a dead watch differs from a quiet one.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use futures::Stream;
use kube::Client;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use serde_json::value::RawValue;
use steerage_model::{EndpointSlice, Key, Node, Service};

use crate::metrics::Metrics;
use crate::{Backoff, EndpointSlices, Event, Kind, Nodes, Object, Services, Staleness};

mod calls;
mod line;
mod machine;

use calls::{Lines, Read};
use line::{Head, Line};
use machine::{Call, Failure, Machine};

/// Timeouts and delays of watches.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// A request fails after this long without data.
    pub call: Duration,
    /// A watch is reopened after this long without data. Longer than the interval of bookmarks, a minute.
    pub idle: Duration,
    /// The `timeoutSeconds` of a watch.
    pub watch: Duration,
    /// Delay after the first failure.
    pub min_backoff: Duration,
    /// Longest delay after a failure.
    pub max_backoff: Duration,
    /// Delay before an optional resource that the API server does not serve is requested again.
    pub missing: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(30),
            idle: Duration::from_secs(130),
            watch: Duration::from_secs(290),
            min_backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(10),
            missing: Duration::from_mins(10),
        }
    }
}

/// Opens watches that share a client, metrics and a [`Staleness`], as do clones.
#[derive(Clone)]
pub struct Watches {
    client: Client,
    timing: Timing,
    metrics: Metrics,
    staleness: Staleness,
}

impl Watches {
    /// Watches through `client`; metrics are registered in `registry`.
    pub fn new(client: Client, registry: &mut Registry) -> Self {
        Self::with_timing(client, registry, Timing::default())
    }

    /// Like [`Watches::new`], with other timeouts and delays.
    pub fn with_timing(client: Client, registry: &mut Registry, timing: Timing) -> Self {
        Self { client, timing, metrics: Metrics::new(registry), staleness: Staleness::default() }
    }

    /// The same watches with a [`Staleness`] of their own: for resources that the program can run without.
    #[must_use]
    pub fn dispensable(&self) -> Self {
        Self { staleness: Staleness::default(), ..self.clone() }
    }

    /// The time since each watch last brought data.
    pub fn staleness(&self) -> &Staleness {
        &self.staleness
    }

    /// All Services.
    pub fn services(&self) -> impl Stream<Item = Event<Service>> + Send + Unpin + use<> {
        self.watch(Services)
    }

    /// All `EndpointSlice`s of Services.
    pub fn slices(&self) -> impl Stream<Item = Event<EndpointSlice>> + Send + Unpin + use<> {
        self.watch(EndpointSlices)
    }

    /// All nodes.
    pub fn nodes(&self) -> impl Stream<Item = Event<Node>> + Send + Unpin + use<> {
        self.watch(Nodes::all())
    }

    /// One node, by name.
    pub fn node(&self, name: &str) -> impl Stream<Item = Event<Node>> + Send + Unpin + use<> {
        self.watch(Nodes::one(name))
    }

    /// All objects of a kind. At most one watch per kind: [`Staleness`] distinguishes them by [`Kind::name`].
    pub fn watch<K: Kind>(&self, kind: K) -> impl Stream<Item = Event<K::Object>> + Send + Unpin + use<K> {
        self.staleness.record(kind.name());
        let Timing { min_backoff, max_backoff, .. } = self.timing;
        let watcher = Watcher {
            watches: self.clone(),
            backoff: Backoff::new(min_backoff, max_backoff),
            machine: Machine::new(kind.consistent()),
            kind,
            has_list_started: false,
            open: None,
            page: None,
            events: VecDeque::new(),
            is_failing: false,
        };
        Box::pin(futures::stream::unfold(watcher, |mut watcher| async {
            let event = watcher.next().await;
            Some((event, watcher))
        }))
    }
}

/// One watch.
struct Watcher<K: Kind> {
    watches: Watches,
    kind: K,
    machine: Machine,
    backoff: Backoff,
    /// Whether `Init` was delivered for a list of which no page has arrived yet.
    has_list_started: bool,
    open: Option<Open>,
    /// The rest of a page; read when `events` is empty.
    page: Option<Unread>,
    events: VecDeque<Event<K::Object>>,
    /// Whether the last log line was a failure.
    is_failing: bool,
}

/// An open watch.
struct Open {
    lines: Lines,
    /// Whether it brought an event or a bookmark.
    has_data: bool,
}

/// The items of a page as text, projected one by one on demand: the consumer works on the first ones before the last are
/// read.
struct Unread {
    text: String,
    items: std::vec::IntoIter<Range<usize>>,
    /// Whether it is the last page of the list.
    last: bool,
}

impl Unread {
    fn next(&mut self) -> Option<&str> {
        self.items.next().and_then(|range| self.text.get(range))
    }
}

/// A page of a list.
#[derive(Deserialize)]
struct Page<'a> {
    metadata: PageMeta,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMeta {
    resource_version: String,
    #[serde(rename = "continue", default)]
    token: String,
}

impl<K: Kind> Watcher<K> {
    async fn next(&mut self) -> Event<K::Object> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            if let Some(mut page) = self.page.take() {
                if let Some(json) = page.next() {
                    let head = Head::read(json).unwrap_or_default();
                    if let Projected::Object(object) = self.project(&head.key(), json) {
                        self.events.push_back(Event::InitApply(object));
                    }
                    self.page = Some(page);
                } else if page.last {
                    return Event::InitDone;
                }
                continue;
            }
            let result = match &mut self.open {
                Some(open) => match open.lines.next(self.watches.timing.idle).await {
                    Read::Line(line) => self.on_line(&line),
                    Read::End if open.has_data => Err((Failure::Ended, "the watch ended".to_owned())),
                    Read::End => Err((Failure::Empty, "the watch ended before it brought data".to_owned())),
                    Read::Silence => Err((Failure::Idle, "no event and no bookmark in time".to_owned())),
                    Read::Cut(error) => Err((Failure::Cut, error)),
                },
                None => match self.machine.call() {
                    // Before the request: what the consumer stores afterwards may be missing in the list.
                    Call::List { token: None, .. }
                        if !std::mem::replace(&mut self.has_list_started, true) =>
                    {
                        return Event::Init;
                    }
                    Call::List { newest, token } => self.list(newest, token.as_deref()).await,
                    Call::Watch { version } => self.start(&version).await,
                },
            };
            if let Err((failure, error)) = result {
                self.on_failure(failure, &error).await;
            }
        }
    }

    async fn list(&mut self, newest: bool, token: Option<&str>) -> Result<(), (Failure, String)> {
        let (client, timing) = (&self.watches.client, &self.watches.timing);
        let text = calls::list(client, &self.kind, newest, token, timing.call).await?;
        let page: Page<'_> =
            serde_json::from_str(&text).map_err(|error| (Failure::Malformed, error.to_string()))?;
        self.record_data();
        let next = Some(page.metadata.token).filter(|token| !token.is_empty());
        let position = self.machine.page(page.metadata.resource_version, next);
        if position.first {
            self.watches.metrics.list(self.kind.name());
            self.has_list_started = false;
        }
        let items: Vec<_> =
            page.items.unwrap_or_default().into_iter().map(|item| range_in(item.get(), &text)).collect();
        self.page = Some(Unread { text, items: items.into_iter(), last: position.last });
        Ok(())
    }

    async fn start(&mut self, version: &str) -> Result<(), (Failure, String)> {
        let Timing { call, watch, .. } = self.watches.timing;
        let lines = calls::watch(&self.watches.client, &self.kind, version, watch, call).await?;
        self.open = Some(Open { lines, has_data: false });
        // The response alone says that no event before `version` is outstanding.
        self.record_data();
        Ok(())
    }

    fn on_line(&mut self, line: &[u8]) -> Result<(), (Failure, String)> {
        let malformed = |error: &dyn std::fmt::Display| (Failure::Malformed, error.to_string());
        let (head, object, applied) = match Line::read(line).map_err(|error| malformed(&error))? {
            Line::Applied(object) => (Head::read(object), object, true),
            Line::Deleted(object) => (Head::read(object), object, false),
            Line::Bookmark(object) => {
                let head = Head::read(object).map_err(|error| malformed(&error))?;
                self.on_version(&head)?;
                return Ok(());
            }
            Line::Error { code: 410, message } => return Err((Failure::Expired, message)),
            Line::Error { message, .. } => return Err((Failure::Refused, message)),
        };
        let head = head.map_err(|error| malformed(&error))?;
        self.on_version(&head)?;
        self.watches.metrics.event(self.kind.name());
        let gone = || Event::Delete { key: self.kind.key(head.key()), version: head.version().to_owned() };
        match if applied { self.project(&head.key(), object) } else { Projected::Nothing } {
            Projected::Object(object) => self.events.push_back(Event::Apply(object)),
            Projected::Nothing => self.events.push_back(gone()),
            // The last readable form stays in the store.
            Projected::Unreadable => {}
        }
        Ok(())
    }

    /// Records that the watch has reached the version of `head`.
    fn on_version(&mut self, head: &Head) -> Result<(), (Failure, String)> {
        let version = head.version();
        if version.is_empty() {
            return Err((Failure::Malformed, "an event without a resource version".to_owned()));
        }
        self.machine.reached(version.to_owned());
        if let Some(open) = &mut self.open {
            open.has_data = true;
        }
        self.record_data();
        Ok(())
    }

    fn record_data(&mut self) {
        self.watches.staleness.record(self.kind.name());
        if std::mem::take(&mut self.is_failing) {
            tracing::info!(kind = self.kind.name(), "watch recovered");
        }
    }

    fn project(&self, key: &Key, json: &str) -> Projected<K::Object> {
        let mut notes = Vec::new();
        let kind = self.kind.name();
        let projected = self.kind.project(json, &mut notes);
        for note in notes {
            tracing::warn!(kind, object = %key, note, "object has an invalid field; continuing without that field");
        }
        match projected {
            Ok(Some(object)) => Projected::Object(object),
            Ok(None) => Projected::Nothing,
            Err(error) => {
                self.watches.metrics.malformed(kind);
                tracing::warn!(kind, object = %key, %error, "object is unreadable; keeping its last readable form");
                Projected::Unreadable
            }
        }
    }

    async fn on_failure(&mut self, failure: Failure, error: &str) {
        let kind = self.kind.name();
        self.open = None;
        self.watches.metrics.failure(kind, failure.reason());
        let failures = self.machine.failed(failure);
        if failures == 0 {
            tracing::debug!(kind, error, "watch ended; reopening it");
            return;
        }
        if failure == Failure::Missing && self.kind.may_be_missing() {
            tracing::info!(kind, "resource not served by this API server; continuing without it");
            // Spread: nodes that started together must not ask together.
            let retry_in = self.watches.timing.missing.mul_f64(0.75 + fastrand::f64() / 2.0);
            return tokio::time::sleep(retry_in).await;
        }
        if failures == 1 {
            self.backoff.reset();
        }
        let retry_in = self.backoff.next_delay();
        self.is_failing = true;
        tracing::warn!(kind, reason = failure.reason(), error, ?retry_in, "watch failed; retrying");
        tokio::time::sleep(retry_in).await;
    }
}

/// The byte range of `part` in `text`.
fn range_in(part: &str, text: &str) -> Range<usize> {
    let start = part.as_ptr().addr().saturating_sub(text.as_ptr().addr());
    start..start + part.len()
}

/// An object's JSON after projection.
enum Projected<T: Object> {
    Object(T),
    Nothing,
    Unreadable,
}

#[cfg(test)]
mod tests;

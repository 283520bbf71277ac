// SPDX-License-Identifier: Apache-2.0
//! Watches: lists followed by watches, for ever, as a stream of the model's events.
//!
//! The streams never end and never fail: what goes wrong is logged, counted and tried again. Every event and every bookmark is
//! noted in [`Staleness`], so that silence can be told from quiet.

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
use crate::{EndpointSlices, Event, Kind, Nodes, Object, Services, Staleness, backoff};

mod calls;
mod line;
mod machine;

use calls::{Lines, Read};
use line::{Head, Line};
use machine::{Call, Failure, Machine};

/// The times that watches keep.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Silence after which an answer is no longer waited for.
    pub call: Duration,
    /// Silence after which a watch is opened anew; longer than bookmarks are apart (a minute).
    pub idle: Duration,
    /// How long the API server is asked to keep a watch open.
    pub watch: Duration,
    /// Wait after the first failure.
    pub least_backoff: Duration,
    /// Longest wait after a failure.
    pub most_backoff: Duration,
    /// Wait before a kind that the API server does not have, and need not have, is asked for again.
    pub missing: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(30),
            idle: Duration::from_secs(130),
            watch: Duration::from_secs(290),
            least_backoff: Duration::from_millis(200),
            most_backoff: Duration::from_secs(10),
            missing: Duration::from_mins(10),
        }
    }
}

/// Opens watches that share a client, counters and a [`Staleness`]. Clones are the same.
#[derive(Clone)]
pub struct Watches {
    client: Client,
    timing: Timing,
    metrics: Metrics,
    staleness: Staleness,
}

impl Watches {
    /// Watches through `client`; counters go to `registry`.
    pub fn new(client: Client, registry: &mut Registry) -> Self {
        Self::with_timing(client, registry, Timing::default())
    }

    /// The same, with times of one's own.
    pub fn with_timing(client: Client, registry: &mut Registry, timing: Timing) -> Self {
        Self { client, timing, metrics: Metrics::new(registry), staleness: Staleness::default() }
    }

    /// The same, but their silence does not count: for what its user can do without.
    #[must_use]
    pub fn dispensable(&self) -> Self {
        Self { staleness: Staleness::default(), ..self.clone() }
    }

    /// How long each watch has been silent.
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

    /// All objects of any kind. One watch a kind: [`Staleness`] keeps them apart by [`Kind::name`].
    pub fn watch<K: Kind>(&self, kind: K) -> impl Stream<Item = Event<K::Object>> + Send + Unpin + use<K> {
        self.staleness.heard(kind.name());
        let watcher = Watcher {
            watches: self.clone(),
            kind,
            machine: Machine::new(),
            open: None,
            page: None,
            events: VecDeque::new(),
            troubled: false,
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
    open: Option<Open>,
    /// What is left of a page, after the events.
    page: Option<Unread>,
    events: VecDeque<Event<K::Object>>,
    /// Whether the last thing logged was a failure.
    troubled: bool,
}

/// A watch that the API server holds open.
struct Open {
    lines: Lines,
    fruitful: bool,
}

/// The items of a page that are still text. They are projected one by one, as they are asked for: who takes the events works on
/// the first ones while the last ones wait.
struct Unread {
    text: String,
    items: std::vec::IntoIter<Range<usize>>,
    /// It is the list's last page.
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
                    Read::End if open.fruitful => Err((Failure::Ended, "the watch ended".to_owned())),
                    Read::End => Err((Failure::Fruitless, "the watch ended before it began".to_owned())),
                    Read::Silence => Err((Failure::Idle, "neither event nor bookmark".to_owned())),
                    Read::Cut(error) => Err((Failure::Cut, error)),
                },
                None => match self.machine.call() {
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
            serde_json::from_str(&text).map_err(|error| (Failure::Garbled, error.to_string()))?;
        self.heard();
        let next = Some(page.metadata.token).filter(|token| !token.is_empty());
        let is = self.machine.page(page.metadata.resource_version, next);
        if is.first {
            self.watches.metrics.list(self.kind.name());
            self.events.push_back(Event::Init);
        }
        let items: Vec<_> =
            page.items.unwrap_or_default().into_iter().map(|item| place(item.get(), &text)).collect();
        self.page = Some(Unread { text, items: items.into_iter(), last: is.last });
        Ok(())
    }

    async fn start(&mut self, version: &str) -> Result<(), (Failure, String)> {
        let Timing { call, watch, .. } = self.watches.timing;
        let lines = calls::watch(&self.watches.client, &self.kind, version, watch, call).await?;
        self.open = Some(Open { lines, fruitful: false });
        // The answer alone says that the API server holds nothing back from before `version`.
        self.heard();
        Ok(())
    }

    fn on_line(&mut self, line: &[u8]) -> Result<(), (Failure, String)> {
        let garbled = |error: &dyn std::fmt::Display| (Failure::Garbled, error.to_string());
        let (head, object, applied) = match Line::read(line).map_err(|error| garbled(&error))? {
            Line::Applied(object) => (Head::read(object), object, true),
            Line::Deleted(object) => (Head::read(object), object, false),
            Line::Bookmark(object) => {
                let head = Head::read(object).map_err(|error| garbled(&error))?;
                self.on_version(&head)?;
                return Ok(());
            }
            Line::Error { code: 410, message } => return Err((Failure::Expired, message)),
            Line::Error { message, .. } => return Err((Failure::Refused, message)),
        };
        let head = head.map_err(|error| garbled(&error))?;
        self.on_version(&head)?;
        self.watches.metrics.event(self.kind.name());
        let gone = Event::Delete(self.kind.key(head.key()));
        match if applied { self.project(&head.key(), object) } else { Projected::Nothing } {
            Projected::Object(object) => self.events.push_back(Event::Apply(object)),
            Projected::Nothing => self.events.push_back(gone),
            // What was known of it stands: it is the best that there is.
            Projected::Unreadable => {}
        }
        Ok(())
    }

    /// Notes that the watch has come up to the version of `head`.
    fn on_version(&mut self, head: &Head) -> Result<(), (Failure, String)> {
        let version = head.version();
        if version.is_empty() {
            return Err((Failure::Garbled, "an event without a resource version".to_owned()));
        }
        self.machine.heard(version.to_owned());
        if let Some(open) = &mut self.open {
            open.fruitful = true;
        }
        self.heard();
        Ok(())
    }

    fn heard(&mut self) {
        self.watches.staleness.heard(self.kind.name());
        if std::mem::take(&mut self.troubled) {
            tracing::info!(kind = self.kind.name(), "watch goes on");
        }
    }

    fn project(&self, key: &Key, json: &str) -> Projected<K::Object> {
        let mut notes = Vec::new();
        let kind = self.kind.name();
        let projected = self.kind.project(json, &mut notes);
        for note in notes {
            tracing::warn!(kind, object = %key, note, "object is used in part");
        }
        match projected {
            Ok(Some(object)) => Projected::Object(object),
            Ok(None) => Projected::Nothing,
            Err(error) => {
                self.watches.metrics.malformed(kind);
                tracing::warn!(kind, object = %key, %error, "object is skipped: it cannot be read");
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
            tracing::debug!(kind, error, "watch is opened again");
            return;
        }
        let Timing { least_backoff, most_backoff, missing, .. } = self.watches.timing;
        if failure == Failure::Missing && self.kind.may_be_missing() {
            tracing::info!(kind, "the API server does not have this kind: it is done without");
            // Nodes that started together shall not ask together.
            return tokio::time::sleep(missing.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
        }
        let wait = backoff::wait(failures, least_backoff, most_backoff, fastrand::f64());
        self.troubled = true;
        tracing::warn!(
            kind,
            reason = failure.reason(),
            error,
            wait_seconds = wait.as_secs_f64(),
            "watch is tried again"
        );
        tokio::time::sleep(wait).await;
    }
}

/// Where a part of a text stands in it.
fn place(part: &str, text: &str) -> Range<usize> {
    let start = part.as_ptr().addr().saturating_sub(text.as_ptr().addr());
    start..start + part.len()
}

/// What became of an object's JSON.
enum Projected<T: Object> {
    Object(T),
    Nothing,
    Unreadable,
}

#[cfg(test)]
mod tests;

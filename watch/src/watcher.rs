// SPDX-License-Identifier: Apache-2.0
//! Lists followed by watches, as streams of [`Event`]s, by `kube_runtime::watcher` over projected objects.
//!
//! The streams never end and never fail: errors are logged, counted and retried. `item` projects an object while its JSON is
//! parsed. `transport` gives the library what it lacks: deadlines, [`Staleness`] by bookmarks, and delays between failures.

use std::time::Duration;

use futures::{Stream, StreamExt, stream::BoxStream};
use kube::Client;
use kube::api::Api;
use kube_runtime::watcher::{self, Config, Error, InitialListStrategy, ListSemantic};
use prometheus_client::registry::Registry;
use steerage_model::{EndpointSlice, Key, Node, Pod, Service, chain};

use crate::metrics::Metrics;
use crate::relist::Relist;
use crate::{EndpointSlices, Event, Kind, Nodes, Pods, Services, Staleness};

mod arriving;
mod connection;
mod failure;
mod item;
mod transport;

use connection::ConnectionState;
use failure::Failure;
use item::{Collection, Item};

/// Timeouts and delays of watches.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// A list, or the start of a watch, fails after this long without data.
    pub call: Duration,
    /// A watch is reopened after this long without data, and up to a sixteenth more at random. Longer than the interval of
    /// bookmarks, a minute.
    pub idle: Duration,
    /// The longest `timeoutSeconds` of a watch.
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
    relist: Relist,
}

impl Watches {
    /// Watches through `client`; metrics are registered in `registry`.
    pub fn new(client: Client, registry: &mut Registry) -> Self {
        Self::with_timing(client, registry, Timing::default())
    }

    /// Like [`Watches::new`], with other timeouts and delays.
    pub fn with_timing(client: Client, registry: &mut Registry, timing: Timing) -> Self {
        let (staleness, relist) = <(Staleness, Relist)>::default();
        registry.register_collector(Box::new(staleness.clone()));
        Self { client, timing, metrics: Metrics::new(registry), staleness, relist }
    }

    /// The same watches with a [`Staleness`] of their own, and without [`Watches::relist`]: for resources that the program can run
    /// without.
    #[must_use]
    pub fn dispensable(&self) -> Self {
        let (staleness, relist) = Default::default();
        Self { staleness, relist, ..self.clone() }
    }

    /// Lists everything again, with all writes that succeeded before. Returns when all users have taken the lists from their streams.
    ///
    /// Watches alone never go back, but another process may have seen more: a list may come from an old cache, and a watch may lag.
    pub async fn relist(&self) {
        let mut running = std::pin::pin!(self.relist.run());
        while tokio::time::timeout(RELIST_LOG, &mut running).await.is_err() {
            tracing::warn!(missing = ?self.relist.missing(), "some kinds are not listed yet; waiting");
        }
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

    /// The pods that are labelled for Steerage's readiness gate.
    pub fn pods(&self) -> impl Stream<Item = Event<Pod>> + Send + Unpin + use<> {
        self.watch(Pods)
    }

    /// One node, by name.
    pub fn node(&self, name: &str) -> impl Stream<Item = Event<Node>> + Send + Unpin + use<> {
        self.watch(Nodes::one(name))
    }

    /// All objects of a kind. At most one watch per kind: [`Staleness`] distinguishes them by [`Kind::name`].
    pub fn watch<K: Kind>(&self, kind: K) -> impl Stream<Item = Event<K::Object>> + Send + Unpin + use<K> {
        self.staleness.record(kind.name());
        if !kind.may_be_missing() {
            self.relist.add(kind.name());
        }
        let timing =
            Timing { idle: self.timing.idle.mul_f64(1.0 + fastrand::f64() * SILENCE_SPREAD), ..self.timing };
        let connection = ConnectionState::new(kind.name(), timing, self.staleness.clone());
        let watcher = Watcher {
            api: Api::all_with(transport::wrap(&self.client, &connection), &Collection(kind.path())),
            events: None,
            connection,
            timing: self.timing,
            metrics: self.metrics.clone(),
            relist: self.relist.clone(),
            served: 0,
            taken: None,
            listing: if kind.consistent() { Listing::Newest } else { Listing::Streamed },
            has_synced: false,
            refused: 0,
            unfinished: 0,
            kind,
        };
        Box::pin(futures::stream::unfold(watcher, |mut watcher| async {
            let event = watcher.next().await;
            Some((event, watcher))
        }))
    }
}

/// Interval of the log line while a requested list is not complete.
const RELIST_LOG: Duration = Duration::from_secs(30);

/// After this many streamed lists in a row that were not completed, the list is requested in one response.
const UNFINISHED: u32 = 3;

/// After this many refused watches in a row the objects are listed again.
const MAX_REFUSED: u32 = 5;

/// After silence of this many times the limit of one watch the objects are listed again. After a restore of etcd, the API server
/// accepts a watch from a version that it has not reached yet, and sends nothing until it has.
const MAX_SILENT: u32 = 2;

/// Each watch draws its own limit, up to this part longer: all nodes may notice together that an API server is silent, and must
/// not list together. The list begins after less than five minutes, the least limit on staleness.
const SILENCE_SPREAD: f64 = 1.0 / 16.0;

type Events<K> = BoxStream<'static, Result<watcher::Event<Item<K>>, Error>>;

/// How the next list is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listing {
    /// From the API server's cache, as the first events of the watch: the cheapest for both sides (KEP-3157).
    Streamed,
    /// From the API server's cache, in one response: API servers of 1.33 and before 1.32 do not stream by default.
    Cached,
    /// Consistent with etcd, in pages: a relist from a cache may go back in time.
    Newest,
}

/// One watch.
struct Watcher<K: Kind> {
    kind: K,
    api: Api<Item<K>>,
    connection: ConnectionState,
    timing: Timing,
    metrics: Metrics,
    relist: Relist,
    /// The requests of new lists that the library's stream serves.
    served: u64,
    /// The same when the last event completed a list.
    taken: Option<u64>,
    /// The library's stream. `None`: list, with a new one.
    events: Option<Events<K>>,
    listing: Listing,
    /// Whether a list has been completed.
    has_synced: bool,
    /// Watches that the API server refused since the last event or bookmark.
    refused: u32,
    /// Streamed lists that ended before they were complete.
    unfinished: u32,
}

impl<K: Kind> Watcher<K> {
    async fn next(&mut self) -> Event<K::Object> {
        if let Some(request) = self.taken.take() {
            self.relist.complete(self.kind.name(), request);
        }
        loop {
            let relist = self.relist.changed();
            let requested = self.relist.requested();
            if requested > self.served {
                (self.events, self.listing) = (None, Listing::Newest);
            }
            if self.events.is_none() {
                self.served = if self.listing == Listing::Newest { requested } else { 0 };
                self.events = Some(watcher::watcher(self.api.clone(), self.config()).boxed());
            }
            let Some(events) = &mut self.events else { continue };
            let event = tokio::select! {
                biased;
                event = events.next() => event,
                () = relist => continue,
            };
            match event {
                Some(Ok(event)) => {
                    if let Some(event) = self.convert(event) {
                        return event;
                    }
                }
                Some(Err(error)) => {
                    self.on_failure(&error);
                    // Delays are the transport's. Where a request fails before it, as when the runtime ends and the client's own task is
                    // gone, this would never return to the runtime, which waits for it.
                    tokio::task::yield_now().await;
                }
                None => self.events = None,
            }
        }
    }

    fn config(&self) -> Config {
        let selectors = self.kind.selectors();
        // Spread: watches that started together, after a restart of the API server, must not all end together.
        let seconds = self.timing.watch.mul_f64(0.8 + fastrand::f64() * 0.2).as_secs().max(1);
        let config = Config {
            label_selector: selectors.labels,
            field_selector: selectors.fields,
            timeout: u32::try_from(seconds).ok(),
            ..Config::default()
        };
        match self.listing {
            Listing::Streamed => {
                Config { initial_list_strategy: InitialListStrategy::StreamingList, ..config }
            }
            // The library leaves out the version of a list in pages.
            Listing::Cached => Config { list_semantic: ListSemantic::Any, page_size: None, ..config },
            Listing::Newest => config,
        }
    }

    /// `None`: nothing that a store could learn.
    fn convert(&mut self, event: watcher::Event<Item<K>>) -> Option<Event<K::Object>> {
        let name = self.kind.name();
        match event {
            watcher::Event::Init => Some(Event::Init),
            watcher::Event::InitApply(item) => {
                let key = item.key();
                match self.projected(&key, item) {
                    Projected::Object(object) => Some(Event::InitApply(object)),
                    Projected::Nothing => None,
                    Projected::Unreadable => Some(Event::InitKeep(self.kind.key(key))),
                }
            }
            watcher::Event::InitDone => {
                self.metrics.list(name);
                self.connection.end_list();
                (self.listing, self.has_synced) = (Listing::Newest, true);
                self.taken = Some(self.served);
                Some(Event::InitDone)
            }
            watcher::Event::Apply(item) => {
                self.metrics.event(name);
                let (key, version) = (item.key(), item.version());
                match self.projected(&key, item) {
                    Projected::Object(object) => Some(Event::Apply(object)),
                    Projected::Nothing => Some(Event::Delete { key: self.kind.key(key), version }),
                    Projected::Unreadable => None,
                }
            }
            watcher::Event::Delete(item) => {
                self.metrics.event(name);
                Some(Event::Delete { key: self.kind.key(item.key()), version: item.version() })
            }
        }
    }

    fn projected(&self, key: &Key, item: Item<K>) -> Projected<K::Object> {
        let kind = self.kind.name();
        for note in item.notes {
            tracing::warn!(kind, object = %key, note, "object has an invalid field; continuing without that field");
        }
        match item.projected {
            Ok(Some(object)) => Projected::Object(object),
            Ok(None) => Projected::Nothing,
            Err(error) => {
                self.metrics.malformed(kind);
                tracing::warn!(kind, object = %key, error, "object is unreadable; keeping its last readable form");
                Projected::Unreadable
            }
        }
    }

    fn on_failure(&mut self, error: &Error) {
        let (kind, failure) = (self.kind.name(), Failure::of(error));
        let is_start = matches!(error, Error::WatchStartFailed(_));
        if is_start && failure == Failure::Invalid && self.listing == Listing::Streamed {
            tracing::debug!(kind, error = chain(error), "the API server does not stream lists; listing");
            (self.events, self.listing) = (None, Listing::Cached);
            return;
        }
        self.metrics.failure(kind, failure.reason());
        if self.connection.take_progress() {
            self.refused = 0;
        }
        if failure == Failure::Missing && self.kind.may_be_missing() {
            // Spread: nodes that started together must not ask together.
            self.connection.pause(self.timing.missing.mul_f64(0.75 + fastrand::f64() / 2.0));
            tracing::info!(kind, "resource not served by this API server; continuing without it");
            return;
        }
        // Before the silence is judged: the delay is part of it.
        let retry_in =
            if failure == Failure::Expired { self.connection.expire() } else { self.connection.fail() };
        let is_watch = is_start || matches!(error, Error::WatchError(_));
        self.refused += u32::from(self.has_synced && is_watch && failure.may_last());
        let is_unfinished = self.listing == Listing::Streamed && !is_start && failure.is_end();
        self.unfinished += u32::from(is_unfinished);
        let is_silent = self.has_synced && self.connection.take_silence();
        if failure.needs_list() || self.refused >= MAX_REFUSED {
            (self.events, self.listing, self.refused) = (None, Listing::Newest, 0);
        } else if is_silent {
            // From the cache: all nodes must not read etcd when an API server is silent.
            self.listing = if self.kind.consistent() { Listing::Newest } else { Listing::Cached };
            (self.events, self.refused) = (None, 0);
        } else if self.listing == Listing::Streamed && self.unfinished >= UNFINISHED {
            (self.events, self.listing) = (None, Listing::Cached);
        }
        tracing::warn!(
            kind,
            reason = failure.reason(),
            error = chain(error),
            retry_in = %format_args!("{}ms", retry_in.as_millis()),
            "watch failed; retrying"
        );
    }
}

/// An object after its projection.
enum Projected<T> {
    Object(T),
    /// Steerage does not use it.
    Nothing,
    Unreadable,
}

#[cfg(test)]
mod tests;

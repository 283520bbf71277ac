// SPDX-License-Identifier: Apache-2.0
//! The client of one watch: every wait has a deadline, everything that arrives counts for [`Staleness`], and failures are
//! followed by delays.
//!
//! `kube_runtime::watcher` sees no bookmark pass, has no deadline for lists, and reopens a watch that ended at once, also one
//! that never brought data. [`Arriving`] is the response's body.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use tokio::time::{Instant, sleep_until, timeout};

use super::arriving::{Answer, Arriving};
use crate::{Backoff, Staleness, Timing};

/// Why a response failed, beside the client's own errors.
#[derive(Debug, thiserror::Error)]
pub(super) enum TransportError {
    #[error("no response within {0:?}")]
    NoResponse(Duration),
    #[error("no data within {0:?}")]
    Silence(Duration),
    #[error("the watch ended before any data, or before the initial list was complete")]
    Empty,
    /// Only the text: the library takes some causes for the normal end of a watch, and reopens it without a delay.
    #[error("the connection broke: {0}")]
    Broken(String),
    #[error(transparent)]
    Client(#[from] kube::Error),
}

/// The state of one watch's connection. Clones share it.
#[derive(Clone)]
pub(super) struct Transport {
    kind: &'static str,
    timing: Timing,
    staleness: Staleness,
    pace: Arc<Mutex<Pace>>,
}

struct Pace {
    backoff: Backoff,
    /// When the last failure happened.
    failed_at: Option<Instant>,
    /// Wait until then before the next request.
    not_before: Option<Instant>,
    /// Whether the last log line was a failure.
    is_failing: bool,
    /// Whether a streamed list is not complete yet.
    is_listing: bool,
    /// Whether a watch brought an event or a bookmark since the last failure.
    has_progress: bool,
    /// How long watches were open since the last data.
    silence: Duration,
}

impl Transport {
    pub(super) fn new(kind: &'static str, timing: Timing, staleness: Staleness) -> Self {
        let backoff = Backoff::new(timing.min_backoff, timing.max_backoff);
        let pace = Pace {
            backoff,
            failed_at: None,
            not_before: None,
            is_failing: false,
            is_listing: false,
            has_progress: false,
            silence: Duration::ZERO,
        };
        Self { kind, timing, staleness, pace: Arc::new(Mutex::new(pace)) }
    }

    /// A client whose requests are those of this watch.
    pub(super) fn wrap(&self, client: &Client) -> Client {
        let (transport, client) = (self.clone(), client.clone());
        let service = tower::service_fn(move |request| transport.clone().send(client.clone(), request));
        Client::new(service, "default")
    }

    /// Counts a failure. Returns the delay before the next request.
    pub(super) fn fail(&self) -> Duration {
        let now = Instant::now();
        let mut pace = self.pace();
        let forgotten = 2 * self.timing.max_backoff;
        if pace.failed_at.is_none_or(|last| now.duration_since(last) > forgotten) {
            pace.backoff.reset();
        }
        let delay = pace.backoff.next_delay();
        (pace.failed_at, pace.not_before, pace.is_failing) = (Some(now), Some(now + delay), true);
        delay
    }

    /// Whether a watch brought an event or a bookmark since the last call.
    pub(super) fn take_progress(&self) -> bool {
        std::mem::take(&mut self.pace().has_progress)
    }

    /// The list is complete.
    pub(super) fn end_list(&self) {
        self.pace().is_listing = false;
    }

    /// Makes the next request wait, without a failure.
    pub(super) fn pause(&self, delay: Duration) {
        self.pace().not_before = Some(Instant::now() + delay);
    }

    async fn send(
        self,
        client: Client,
        request: Request<Body>,
    ) -> Result<Response<Arriving>, TransportError> {
        let query = request.uri().query().unwrap_or_default();
        let is_watch = query.split('&').any(|part| part == "watch=true");
        let is_listing = query.split('&').any(|part| part == "sendInitialEvents=true");
        let not_before = {
            let mut pace = self.pace();
            pace.is_listing = is_listing;
            pace.not_before.take()
        };
        if let Some(at) = not_before {
            sleep_until(at).await;
        }
        let limit = self.timing.call;
        let response =
            timeout(limit, client.send(request)).await.map_err(|_| TransportError::NoResponse(limit))??;
        let answer = match (response.status().is_success(), is_watch) {
            (false, _) => Answer::Error,
            (true, false) => Answer::List,
            (true, true) => Answer::Watch,
        };
        // After an outage the response is the first sign of the API server; the next bookmark may be a minute away. But an
        // API server or a proxy that accepts watches and never sends anything must not look current.
        if answer == Answer::Watch && self.pace().silence.is_zero() {
            self.staleness.record(self.kind);
        }
        Ok(response.map(|body| Arriving::new(body, self, answer)))
    }

    /// Data of a list, or an event or bookmark of a watch, arrived.
    pub(super) fn record_data(&self) {
        self.staleness.record(self.kind);
        let mut pace = self.pace();
        (pace.has_progress, pace.silence) = (true, Duration::ZERO);
        if std::mem::take(&mut pace.is_failing) {
            tracing::info!(kind = self.kind, "watch recovered");
        }
    }

    /// A watch was open for this long without data.
    pub(super) fn on_silence(&self, duration: Duration) {
        self.pace().silence += duration;
    }

    /// Whether watches were open for `limit` in all without data; asked again, the time begins anew.
    pub(super) fn take_silence(&self, limit: Duration) -> bool {
        let mut pace = self.pace();
        let is_over = pace.silence >= limit;
        if is_over {
            // Not zero: the next response is no sign of life either.
            pace.silence = Duration::from_nanos(1);
        }
        is_over
    }

    pub(super) fn is_listing(&self) -> bool {
        self.pace().is_listing
    }

    pub(super) fn timing(&self) -> Timing {
        self.timing
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The client of one watch: every wait has a deadline, everything that arrives counts for [`Staleness`], and failures are
//! followed by delays.
//!
//! `kube_runtime::watcher` sees no bookmark pass, has no deadline for lists, and reopens a watch that ended at once, also one
//! that never brought data.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use kube::Client;
use kube::client::Body;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::{Backoff, Staleness, Timing};

/// Why a response failed, beside the client's own errors.
#[derive(Debug, thiserror::Error)]
pub(super) enum TransportError {
    #[error("no response within {0:?}")]
    NoResponse(Duration),
    #[error("no event and no bookmark within {0:?}")]
    Silence(Duration),
    #[error("the watch ended before it brought data")]
    Empty,
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
}

impl Transport {
    pub(super) fn new(kind: &'static str, timing: Timing, staleness: Staleness) -> Self {
        let backoff = Backoff::new(timing.min_backoff, timing.max_backoff);
        let pace = Pace { backoff, failed_at: None, not_before: None, is_failing: false };
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

    /// Makes the next request wait, without a failure.
    pub(super) fn pause(&self, delay: Duration) {
        self.pace().not_before = Some(Instant::now() + delay);
    }

    async fn send(
        self,
        client: Client,
        request: Request<Body>,
    ) -> Result<Response<Arriving>, TransportError> {
        let is_watch =
            request.uri().query().is_some_and(|query| query.split('&').any(|part| part == "watch=true"));
        let not_before = self.pace().not_before.take();
        if let Some(at) = not_before {
            tokio::time::sleep_until(at).await;
        }
        let limit = self.timing.call;
        let response =
            timeout(limit, client.send(request)).await.map_err(|_| TransportError::NoResponse(limit))??;
        if response.status().is_success() {
            // Of a watch, the response alone says that no event before its version is outstanding.
            self.record_data();
        }
        Ok(response.map(|body| Arriving::new(body, self, is_watch)))
    }

    fn record_data(&self) {
        self.staleness.record(self.kind);
        if std::mem::take(&mut self.pace().is_failing) {
            tracing::info!(kind = self.kind, "watch recovered");
        }
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A response's body that fails when nothing arrives for too long.
pub(super) struct Arriving {
    body: Body,
    transport: Transport,
    is_watch: bool,
    has_data: bool,
    limit: Duration,
    silence: Pin<Box<Sleep>>,
}

impl Arriving {
    fn new(body: Body, transport: Transport, is_watch: bool) -> Self {
        let limit = if is_watch { transport.timing.idle } else { transport.timing.call };
        Self { body, transport, is_watch, has_data: false, limit, silence: Box::pin(sleep(limit)) }
    }
}

impl http_body::Body for Arriving {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                this.has_data = true;
                this.transport.record_data();
                this.silence.as_mut().reset(Instant::now() + this.limit);
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(None) if this.is_watch && !std::mem::replace(&mut this.has_data, true) => {
                Poll::Ready(Some(Err(TransportError::Empty)))
            }
            Poll::Ready(end) => Poll::Ready(end.map(|result| result.map_err(TransportError::Client))),
            Poll::Pending => {
                ready!(this.silence.as_mut().poll(context));
                Poll::Ready(Some(Err(TransportError::Silence(this.limit))))
            }
        }
    }
}

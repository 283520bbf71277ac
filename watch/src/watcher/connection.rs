// SPDX-License-Identifier: Apache-2.0
//! What is known of one watch's connection: delays after failures, what arrived, and how long nothing did.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::MAX_SILENT;
use crate::{Backoff, Staleness, Timing};

/// The longest delay of a list after the API server answered that a version is too old. All nodes may get this answer at once, and
/// must not list together.
const EXPIRED_SPREAD: Duration = Duration::from_secs(1);

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
pub(super) struct ConnectionState {
    kind: &'static str,
    timing: Timing,
    staleness: Staleness,
    pace: Arc<Mutex<Pace>>,
}

struct Pace {
    backoff: Backoff,
    /// When the last failure happened.
    failed_at: Option<Instant>,
    /// When the API server last answered that a version is too old.
    expired_at: Option<Instant>,
    /// Wait until then before the next request.
    not_before: Option<Instant>,
    /// Whether the last log line was a failure.
    is_failing: bool,
    /// Whether a streamed list is not complete yet.
    is_listing: bool,
    /// Whether a watch brought an event or a bookmark since the last failure.
    has_progress: bool,
    /// How long watches were open since the last data, with the delays between them.
    silence: Duration,
    /// Whether the last request opened a watch that stayed silent.
    was_silent: bool,
}

impl Pace {
    /// Makes the next request wait after a failure.
    fn wait(&mut self, now: Instant, delay: Duration) -> Duration {
        // Staleness grows during the delay too. It does not count as silence while the API server cannot be reached: the watch then
        // continues where it was.
        if std::mem::take(&mut self.was_silent) {
            self.silence += delay;
        }
        (self.failed_at, self.not_before, self.is_failing) = (Some(now), Some(now + delay), true);
        delay
    }
}

impl ConnectionState {
    pub(super) fn new(kind: &'static str, timing: Timing, staleness: Staleness) -> Self {
        let backoff = Backoff::new(timing.min_backoff, timing.max_backoff);
        let pace = Pace {
            backoff,
            failed_at: None,
            expired_at: None,
            not_before: None,
            is_failing: false,
            is_listing: false,
            has_progress: false,
            silence: Duration::ZERO,
            was_silent: false,
        };
        Self { kind, timing, staleness, pace: Arc::new(Mutex::new(pace)) }
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
        pace.wait(now, delay)
    }

    /// Counts the answer that a version is too old. The API server is there, so the delays before it do not count: the list begins
    /// after a short delay, unless there was such an answer shortly before.
    pub(super) fn expire(&self) -> Duration {
        let now = Instant::now();
        let mut pace = self.pace();
        let again = 2 * self.timing.max_backoff;
        if pace.expired_at.replace(now).is_some_and(|last| now.duration_since(last) <= again) {
            drop(pace);
            return self.fail();
        }
        pace.backoff.reset();
        pace.wait(now, EXPIRED_SPREAD.mul_f64(fastrand::f64()))
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
        let mut pace = self.pace();
        pace.silence += duration;
        pace.was_silent = !pace.silence.is_zero();
    }

    /// How long a watch may stay silent: it also ends when all silent watches together have reached their limit.
    pub(super) fn silence_limit(&self) -> Duration {
        let rest = self.max_silence().saturating_sub(self.pace().silence);
        if rest.is_zero() { self.timing.idle } else { rest.min(self.timing.idle) }
    }

    fn max_silence(&self) -> Duration {
        MAX_SILENT * self.timing.idle
    }

    /// Whether watches were silent for too long in all; asked again, the time begins anew.
    pub(super) fn take_silence(&self) -> bool {
        let mut pace = self.pace();
        let is_over = pace.silence >= self.max_silence();
        if is_over {
            // Not zero: the next response is no sign of life either.
            pace.silence = Duration::from_nanos(1);
        }
        is_over
    }

    pub(super) fn is_listing(&self) -> bool {
        self.pace().is_listing
    }

    /// Begins a request, perhaps of a streamed list. Returns when it may be sent, unless at once.
    pub(super) fn on_request(&self, is_listing: bool) -> Option<Instant> {
        let mut pace = self.pace();
        pace.is_listing = is_listing;
        pace.not_before.take()
    }

    /// A watch was accepted. After an outage this is the first sign of the API server; the next bookmark may be a minute away. But
    /// an API server or a proxy that accepts watches and never sends anything must not look current.
    pub(super) fn on_watch(&self) {
        if self.pace().silence.is_zero() {
            self.staleness.record(self.kind);
        }
    }

    pub(super) fn timing(&self) -> Timing {
        self.timing
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SPDX-License-Identifier: Apache-2.0
//! When a failed write is tried again, and how loud the log says so. Called by the loop.

use std::fmt::Display;
use std::time::Duration;

use steerage_process::duration;
use steerage_watch::Backoff;

/// Limits of the delay after failed writes.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Tries that fail one after the other until somebody has to act. A single one may fail because another program has just changed the
/// tables, and the next one compares everything.
const LASTING: u32 = 3;

/// The failed writes since the last one that worked.
#[derive(Debug)]
pub(super) struct WriteRetry {
    backoff: Backoff,
    failed: u32,
}

impl Default for WriteRetry {
    fn default() -> Self {
        Self { backoff: Backoff::new(RETRY_DELAYS.0, RETRY_DELAYS.1), failed: 0 }
    }
}

impl WriteRetry {
    /// Notes that a write worked.
    pub(super) fn succeeded(&mut self) {
        self.backoff.reset();
        self.failed = 0;
    }

    /// Notes and logs that a write failed. Returns the time until the next one.
    pub(super) fn failed(&mut self, error: &impl Display) -> Duration {
        self.failed = self.failed.saturating_add(1);
        let (delay, tries) = (self.backoff.next_delay(), self.failed);
        let retry_in = duration::rounded(delay);
        if tries < LASTING {
            tracing::warn!(%error, tries, %retry_in, "rules not written; retrying");
        } else {
            tracing::error!(%error, tries, %retry_in, "rules not written; retrying");
        }
        delay
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use super::*;

    /// The levels of all lines.
    #[derive(Clone, Default)]
    struct Levels(Arc<Mutex<Vec<Level>>>);

    impl Subscriber for Levels {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            self.0.lock().expect("a lock").push(*event.metadata().level());
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn only_a_failure_that_lasts_is_an_error() {
        let levels = Levels::default();
        let mut retry = WriteRetry::default();
        let delays = tracing::subscriber::with_default(levels.clone(), || {
            let delays = [(); 4].map(|()| retry.failed(&"refused"));
            retry.succeeded();
            retry.failed(&"refused");
            delays
        });
        let expected = [Level::WARN, Level::WARN, Level::ERROR, Level::ERROR, Level::WARN];
        assert_eq!(*levels.0.lock().expect("a lock"), expected);
        assert!(delays[0] <= RETRY_DELAYS.0 && delays[3] > RETRY_DELAYS.0, "{delays:?}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! When a write to a Service is tried again that the API server rejected or did not answer: ever more rarely, and whatever else happens
//! meanwhile. Kept in the applied state of a load balancer.

use tokio::time::{Duration, Instant};

/// The wait after the first failure; the next ones double it.
const FIRST: Duration = Duration::from_secs(1);
/// And no longer than this: a Service says nothing new meanwhile.
const LONGEST: Duration = Duration::from_mins(2);

/// The next try, and the wait before it; `None` while the last try succeeded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteRetry(Option<(Instant, Duration)>);

impl WriteRetry {
    /// Whether the last try failed, and the next one is not due.
    pub(crate) fn is_waiting(&self) -> bool {
        self.0.is_some_and(|(at, _)| at > Instant::now())
    }

    /// When the next try is due.
    pub(crate) fn due_at(&self) -> Option<Instant> {
        self.0.map(|(at, _)| at)
    }

    /// Notes a failure. Returns the wait before the next try.
    pub(crate) fn failed(&mut self) -> Duration {
        let wait = self.0.map_or(FIRST, |(_, wait)| (wait * 2).min(LONGEST));
        self.0 = Some((Instant::now() + wait, wait));
        wait
    }

    /// Nothing is left to write.
    pub(crate) fn succeeded(&mut self) {
        self.0 = None;
    }
}

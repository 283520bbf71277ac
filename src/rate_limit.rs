// SPDX-License-Identifier: Apache-2.0
//! The rate limit of all calls to the provider.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A token bucket: a number of calls per second, and a burst after a quiet time.
#[derive(Debug)]
pub(crate) struct RateLimiter {
    interval: Duration,
    burst: u32,
    /// When the next call would be due without the burst.
    next: Mutex<Option<Instant>>,
}

impl RateLimiter {
    /// The limit by `--provider-qps`: so many calls per second, and bursts of twice as many.
    pub(crate) fn of_qps(qps: u32) -> Self {
        Self::new(f64::from(qps), qps.saturating_mul(2))
    }

    pub(crate) fn new(per_second: f64, burst: u32) -> Self {
        Self {
            interval: Duration::from_secs_f64(1.0 / per_second),
            burst: burst.max(1),
            next: Mutex::default(),
        }
    }

    /// Waits until one call may be made.
    pub(crate) async fn acquire(&self) {
        let now = Instant::now();
        let at = self.reserve(now);
        // A sleep until now ends at the timer's next tick, milliseconds later while the runtime is busy.
        if at > now {
            tokio::time::sleep_until(at).await;
        }
    }

    /// When the next call may be made. The call counts as made.
    fn reserve(&self, now: Instant) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let burst = self.interval * (self.burst - 1);
        let due = next.map_or(now, |next| next.max(now.checked_sub(burst).unwrap_or(next)));
        let due = if next.is_none() { now.checked_sub(burst).unwrap_or(now) } else { due };
        *next = Some(due + self.interval);
        due.max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_later_calls_are_spaced() {
        let limiter = RateLimiter::new(10.0, 3);
        let now = Instant::now() + Duration::from_hours(1);
        let waits = |at: Instant, calls: usize| -> Vec<u128> {
            (0..calls).map(|_| (limiter.reserve(at) - at).as_millis()).collect()
        };
        assert_eq!(waits(now, 5), [0, 0, 0, 100, 200]);
        let later = now + Duration::from_mins(1);
        assert_eq!(waits(later, 4), [0, 0, 0, 100], "a longer quiet time saves no more than the burst");
    }

    #[tokio::test]
    async fn call_within_the_burst_does_not_wait_for_the_timer() {
        let limiter = RateLimiter::new(10.0, 2);
        let mut calls = [0; 3].map(|_| Box::pin(limiter.acquire()));
        let are_ready = calls.each_mut().map(|call| futures::FutureExt::now_or_never(call).is_some());
        assert_eq!(are_ready, [true, true, false]);
    }
}

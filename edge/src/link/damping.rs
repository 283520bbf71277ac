// SPDX-License-Identifier: Apache-2.0
//! How long a host waits before it yields to one whose targets are healthier, and before it offers shards to one that has failed.
//! Pure; `election` asks.
//!
//! Where health checks fail now on one host and then on the other, or a host ends again and again, the VIPs would move each time. So
//! each failure doubles the wait.

use std::time::{Duration, Instant};

/// The first wait. Hosts probe at different times.
const FIRST: Duration = Duration::from_secs(10);
/// The longest wait.
const LONGEST: Duration = Duration::from_mins(10);
/// Failures are forgotten this long after the last one. Longer than the longest waits of two hosts that yield to each other.
const FORGOTTEN_AFTER: Duration = Duration::from_mins(30);

#[derive(Debug)]
pub(crate) struct Damping {
    wait: Duration,
    last: Option<Instant>,
}

impl Default for Damping {
    fn default() -> Self {
        Self { wait: FIRST, last: None }
    }
}

impl Damping {
    pub(crate) fn wait(&self, now: Instant) -> Duration {
        let is_recent = |last| now.duration_since(last) < FORGOTTEN_AFTER;
        if self.last.is_some_and(is_recent) { self.wait } else { FIRST }
    }

    /// The host has failed, or yields because its targets do.
    pub(crate) fn on_failure(&mut self, now: Instant) {
        self.wait = self.wait(now).saturating_mul(2).min(LONGEST);
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_doubles_the_wait_until_it_is_forgotten() {
        let (mut damping, mut now) = (Damping::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..8 {
            waits.push(damping.wait(now).as_secs());
            // Two hosts that yield to each other.
            now += damping.wait(now) * 2;
            damping.on_failure(now);
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 600, 600]);
        assert_eq!(damping.wait(now + FORGOTTEN_AFTER), FIRST);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! How long the agent waits with the repair of its tables, where a program changes them again and again. Pure.

use std::time::{Duration, Instant};

use steerage_watch::Backoff;

/// Limits of the wait.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// A change that comes later than this after the last repair is repaired at once.
const QUIET: Duration = Duration::from_secs(1);

/// The pause before the next repair.
#[derive(Debug)]
pub(super) struct RepairPause {
    last: Option<Instant>,
    backoff: Backoff,
}

impl Default for RepairPause {
    fn default() -> Self {
        Self { last: None, backoff: Backoff::new(PAUSES.0, PAUSES.1) }
    }
}

impl RepairPause {
    /// Notes that a repair has ended just now, and returns how long no other one may begin.
    pub(super) fn next(&mut self, now: Instant) -> Duration {
        let last = self.last.replace(now);
        if last.is_none_or(|last| now.saturating_duration_since(last) >= QUIET) {
            self.backoff.reset();
            return Duration::ZERO;
        }
        self.backoff.next_delay()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_repeated_changes_wait() {
        let mut pause = RepairPause::default();
        let start = Instant::now();
        assert_eq!(pause.next(start), Duration::ZERO);
        let mut now = start + QUIET;
        assert_eq!(pause.next(now), Duration::ZERO);
        let mut waited = Duration::ZERO;
        for _ in 0..20 {
            now += Duration::from_millis(50);
            let delay = pause.next(now);
            assert!(delay > Duration::ZERO && delay <= PAUSES.1, "{delay:?}");
            waited += delay;
        }
        assert!(waited >= PAUSES.1 * 5, "{waited:?}");
        assert_eq!(pause.next(now + QUIET), Duration::ZERO);
    }
}

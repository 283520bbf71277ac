// SPDX-License-Identifier: Apache-2.0
//! Limits events of one kind. All nodes see the same, and what causes it may repeat: it must not fill the API server. The log has all.

use std::time::Duration;

use tokio::time::Instant;

/// Events that may be published at once, and the time in which one more may be.
const BURST: u32 = 10;
const REFILL: Duration = Duration::from_mins(1);

/// How many may be published.
#[derive(Debug)]
pub(super) struct EventLimiter {
    left: u32,
    /// When the last one was added.
    filled: Instant,
}

impl Default for EventLimiter {
    fn default() -> Self {
        Self { left: BURST, filled: Instant::now() }
    }
}

impl EventLimiter {
    /// Whether one may be published now.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        while self.left < BURST && now.duration_since(self.filled) >= REFILL {
            self.left += 1;
            self.filled += REFILL;
        }
        if self.left == BURST {
            self.filled = now;
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_limited() {
        let mut limiter = EventLimiter::default();
        let start = Instant::now() + REFILL;
        let mut published = |now| (0..100).filter(|_| limiter.take(now)).count();
        assert_eq!(published(start), 10);
        assert_eq!(published(start + REFILL / 2), 0);
        assert_eq!(published(start + REFILL), 1);
        assert_eq!(published(start + 100 * REFILL), 10);
        assert_eq!(published(start + 100 * REFILL), 0);
    }
}

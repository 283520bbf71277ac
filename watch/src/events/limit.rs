// SPDX-License-Identifier: Apache-2.0
//! How many events may be published: a token bucket. Pure. Used for the events of each object, and by programs whose events of one kind
//! repeat on every node.

use std::time::Duration;

use tokio::time::Instant;

/// Some at once, and one more after each interval.
#[derive(Debug)]
pub struct EventLimit {
    burst: u32,
    refill: Duration,
    left: u32,
    /// When the last one was added.
    filled: Instant,
}

/// For events of one kind that all nodes publish: what causes them may repeat, and must not fill the API server. The log has all.
impl Default for EventLimit {
    fn default() -> Self {
        Self::new(10, Duration::from_mins(1), Instant::now())
    }
}

impl EventLimit {
    /// `burst` events at once, and one more after each `refill`.
    pub fn new(burst: u32, refill: Duration, now: Instant) -> Self {
        Self { burst, refill, left: burst, filled: now }
    }

    /// Takes one; false if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        while self.left < self.burst && now.duration_since(self.filled) >= self.refill {
            self.left += 1;
            self.filled += self.refill;
        }
        if self.left == self.burst {
            self.filled = now;
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }

    /// When one was last added, or all were there.
    pub(super) fn filled(&self) -> Instant {
        self.filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_limited() {
        const REFILL: Duration = Duration::from_mins(1);
        let start = Instant::now();
        let mut limit = EventLimit::default();
        let mut published = |now| (0..100).filter(|_| limit.take(now)).count();
        assert_eq!(published(start), 10);
        assert_eq!(published(start + REFILL / 2), 0);
        assert_eq!(published(start + REFILL), 1);
        assert_eq!(published(start + 100 * REFILL), 10);
        assert_eq!(published(start + 100 * REFILL), 0);
    }
}

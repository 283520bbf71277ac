// SPDX-License-Identifier: Apache-2.0
//! When the routes of the main table are read: there may be a million. Pure; `kernel` asks.

use std::time::{Duration, Instant};

/// The longest time between two reads, in case the kernel has said nothing.
const SLOW_INTERVAL: Duration = Duration::from_secs(10);
/// What is said to come with a change may happen only after the change itself was said: so many reads follow it.
const READS: u32 = 2;
/// Reads take one part in so many of the time of one CPU at most.
const PARTS: u32 = 20;

#[derive(Debug, Default)]
pub(super) struct RouteReads {
    /// The end of the last one, and how long it took.
    last: Option<(Instant, Duration)>,
    /// How many are to follow.
    wanted: u32,
}

impl RouteReads {
    /// Something has changed.
    pub(super) fn on_change(&mut self) {
        self.wanted = READS;
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        let Some((ended, took)) = self.last else { return true };
        let interval = if self.wanted > 0 { Duration::ZERO } else { SLOW_INTERVAL };
        now.saturating_duration_since(ended) >= interval.max(took.saturating_mul(PARTS))
    }

    pub(super) fn on_read(&mut self, began: Instant, ended: Instant) {
        self.last = Some((ended, ended.saturating_duration_since(began)));
        self.wanted = self.wanted.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds at which the routes are read, each for so long, if they change in these.
    fn reads(changes: impl Fn(u64) -> bool, milliseconds: u64, until: u64) -> Vec<u64> {
        let (mut reads, begun, mut read) = (RouteReads::default(), Instant::now(), Vec::new());
        for second in 0..until {
            let now = begun + Duration::from_secs(second);
            if changes(second) {
                reads.on_change();
            }
            if reads.is_due(now) {
                reads.on_read(now, now + Duration::from_millis(milliseconds));
                read.push(second);
            }
        }
        read
    }

    #[test]
    fn routes_are_read_after_changes_and_from_time_to_time() {
        assert_eq!(reads(|_| false, 0, 35), [0, 10, 20, 30]);
        assert_eq!(reads(|second| second == 3, 0, 16), [0, 3, 4, 14]);
        assert_eq!(reads(|_| true, 0, 4), [0, 1, 2, 3]);
    }

    #[test]
    fn long_reads_are_rare() {
        assert_eq!(reads(|_| true, 200, 16), [0, 5, 10, 15]);
        assert_eq!(reads(|second| second == 1, 200, 30), [0, 5, 10, 21]);
    }
}

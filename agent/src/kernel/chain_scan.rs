// SPDX-License-Identifier: Apache-2.0
//! When the chains of other programs are listed. Pure: the caller passes the time.

use std::time::{Duration, Instant};

/// Wait after a change: a program that changes tables often needs several transactions.
const SETTLE: Duration = Duration::from_millis(100);
/// Least time between two listings.
const INTERVAL: Duration = Duration::from_secs(1);
/// Least time between two listings, in durations of the last one: programs that change many chains all the time cost this part of a
/// processor at most.
const SPACING: u32 = 50;

/// When the next listing is due.
#[derive(Debug)]
pub(super) struct ChainScan {
    due: Option<Instant>,
    not_before: Instant,
}

impl ChainScan {
    /// Due at once.
    pub(super) fn new(now: Instant) -> Self {
        Self { due: Some(now), not_before: now }
    }

    /// Notes that chains may have changed.
    pub(super) fn request(&mut self, now: Instant) {
        self.due.get_or_insert((now + SETTLE).max(self.not_before));
    }

    /// The time until the next listing; `None` if none is due.
    pub(super) fn due_in(&self, now: Instant) -> Option<Duration> {
        self.due.map(|due| due.saturating_duration_since(now))
    }

    /// Notes a listing.
    pub(super) fn scanned(&mut self, begun: Instant, now: Instant) {
        self.due = None;
        self.not_before = now + (now.saturating_duration_since(begun) * SPACING).max(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn chains_are_listed_at_first_and_after_changes_with_pauses() {
        let start = Instant::now();
        let mut scan = ChainScan::new(start);
        assert_eq!(scan.due_in(start), Some(Duration::ZERO));
        scan.scanned(start, start + MS);
        assert_eq!(scan.due_in(start + MS), None);
        let later = start + 5000 * MS;
        for at in 0..1000 {
            scan.request(later + at * MS);
        }
        assert_eq!(scan.due_in(later), Some(SETTLE), "endless changes do not delay it endlessly");
        scan.scanned(later + SETTLE, later + SETTLE + 100 * MS);
        scan.request(later + SETTLE + 100 * MS);
        assert_eq!(scan.due_in(later + SETTLE + 100 * MS), Some(100 * MS * SPACING));
    }
}

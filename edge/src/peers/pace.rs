// SPDX-License-Identifier: Apache-2.0
//! When all flows are scanned. Pure, owned by `exchange`.

use std::time::{Duration, Instant};

/// The shortest time between two scans.
const SHORTEST: Duration = Duration::from_millis(100);
/// Scans may take one part in so many of the time of one CPU.
const PARTS: u32 = 10;
/// CPU time that scans may use in a row, after a rest. Until a change is scanned, the death of this host breaks connections.
const MAX_DEBT: Duration = Duration::from_secs(5);
/// A flow of which one packet was seen before a change keeps its target for a minute, and becomes established with its next packet.
/// So long after a change scans follow, each after twice the time.
const FOLLOW_UP: Duration = Duration::from_secs(70);
const FIRST_FOLLOW_UP: Duration = Duration::from_secs(1);
/// Later ones only delete flows that have ended, so that the scan after the next change has few to look at.
const SWEEP: Duration = Duration::from_mins(1);

#[derive(Debug, Default)]
pub(crate) struct ScanPace {
    due: Option<Instant>,
    changed: Option<Instant>,
    /// The end of the last scan, and how long it took.
    last: Option<(Instant, Duration)>,
    /// What scans have taken in advance.
    debt: Duration,
}

/// Work that took so long is repeated after this time at the earliest.
pub(crate) fn rest(took: Duration, shortest: Duration) -> Duration {
    took.saturating_mul(PARTS).max(shortest)
}

impl ScanPace {
    /// A flow may have become an exception, or ceased to be one.
    pub(crate) fn on_change(&mut self, now: Instant) {
        self.changed = Some(now);
        let earliest = self.earliest(now);
        self.due = Some(self.due.map_or(earliest, |due| due.min(earliest)));
    }

    /// When the next scan may begin.
    fn earliest(&self, now: Instant) -> Instant {
        let Some((end, took)) = self.last else { return now };
        // One scan is always paid for, however long it takes.
        let until_paid = self.debt.saturating_sub(MAX_DEBT.max(took * 2)).saturating_mul(PARTS);
        now.max(end + until_paid.max(took).max(SHORTEST))
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(crate) fn on_scan(&mut self, began: Instant, ended: Instant) {
        let took = ended.duration_since(began);
        let before = self.last.map_or(Duration::ZERO, |(end, _)| ended.saturating_duration_since(end));
        self.debt = self.debt.saturating_sub(before / PARTS) + took;
        self.last = Some((ended, took));
        let since_change = self.changed.map(|changed| ended.duration_since(changed));
        let next =
            since_change.filter(|since| *since < FOLLOW_UP).map_or(SWEEP, |since| since.max(FIRST_FOLLOW_UP));
        self.due = Some((ended + next.max(rest(took, SHORTEST))).max(self.earliest(ended)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// Times of scans that take so long, of changes that come so often, until a time.
    fn scans(took: Duration, changes: Duration, until: Duration) -> Vec<Duration> {
        let begin = Instant::now();
        let (mut pace, mut now, mut change) = (ScanPace::default(), begin, begin);
        let mut scans = Vec::new();
        while now < begin + until {
            if now >= change {
                pace.on_change(now);
                change += changes;
            }
            if pace.due().is_some_and(|due| due <= now) {
                scans.push(now - begin);
                pace.on_scan(now, now + took);
                now += took;
            }
            now += milliseconds(1);
        }
        scans
    }

    #[test]
    fn change_is_scanned_at_once_and_followed_up_for_a_minute() {
        let day = Duration::from_hours(24);
        let times = scans(milliseconds(10), day, milliseconds(300_000));
        let seconds: Vec<_> = times.iter().map(Duration::as_secs).collect();
        // The last ones delete what has ended.
        assert_eq!(seconds, [0, 1, 2, 4, 8, 16, 32, 65, 131, 191, 251]);
        assert_eq!(times[0], Duration::ZERO);
    }

    #[test]
    fn scans_take_a_tenth_of_a_cpu_at_most() {
        for took in [1, 10, 200, 1000] {
            let until = milliseconds(60_000);
            let count = scans(milliseconds(took), milliseconds(5), until).len();
            let time = milliseconds(took).as_secs_f64() * f64::from(u32::try_from(count).expect("count"));
            let most = until.as_secs_f64() / 10.0 + MAX_DEBT.as_secs_f64();
            assert!(time <= most * 1.1 + milliseconds(took).as_secs_f64(), "{took}: {count}");
            assert!(count > 5, "{took}: {count}");
        }
        // However long the last one took, the next change is scanned at once.
        let times = scans(milliseconds(500), milliseconds(2000), milliseconds(9000));
        assert_eq!(times, [0, 2000, 4000, 6000, 8000].map(milliseconds));
        // However short they are.
        let count = scans(Duration::ZERO, milliseconds(1), milliseconds(1000)).len();
        assert!((8..=10).contains(&count), "{count}");
    }
}

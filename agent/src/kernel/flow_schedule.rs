// SPDX-License-Identifier: Apache-2.0
//! When conntrack is searched for stale flows, and for which. Pure: the caller passes the time.
//!
//! The kernel hashes flows by their sources: to find those of a frontend it walks the whole table, which keeps a processor busy (11 ms
//! with 262,144 buckets, however few flows). So the first change is cleaned up at once, changes that follow soon are cleaned up
//! together, and after each walk there is a pause in proportion to it.

use std::time::{Duration, Instant};

use steerage_watch::Backoff;

use crate::rules::StaleFlows;

/// Changes within this time after a walk are collected until none came for [`QUIET`], and for no longer than this.
pub(super) const COLLECT: Duration = Duration::from_secs(1);
/// See [`COLLECT`].
pub(super) const QUIET: Duration = Duration::from_millis(50);
/// The same frontends are searched again after this time: a packet that had chosen its endpoint before the change may have become an
/// entry after the first walk.
const AGAIN: Duration = Duration::from_secs(1);
/// The pause after a walk, in its durations: walks take a fifth of one processor at most, also while a flood fills the table.
const PAUSE: u32 = 4;
/// Limits of the delay after an error.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// What is to be searched for, and when.
#[derive(Debug)]
pub(super) struct FlowSchedule {
    /// For the first time, with the times of the first and of the last change.
    first: Option<(StaleFlows, Instant, Instant)>,
    /// Once more, and when.
    again: Option<(StaleFlows, Instant)>,
    /// The end of the last walk.
    last: Option<Instant>,
    /// No walk before.
    not_before: Option<Instant>,
    retry: Backoff,
}

impl Default for FlowSchedule {
    fn default() -> Self {
        let retry = Backoff::new(RETRY_DELAYS.0, RETRY_DELAYS.1);
        Self { first: None, again: None, last: None, not_before: None, retry }
    }
}

impl FlowSchedule {
    /// Adds flows to search for.
    pub(super) fn add(&mut self, stale: StaleFlows, now: Instant) {
        // The newest of a frontend is right.
        if let Some((again, _)) = &mut self.again {
            again.replace(&stale);
        }
        match &mut self.first {
            Some((first, _, last)) => {
                first.extend(stale);
                *last = now;
            }
            None => self.first = Some((stale, now, now)),
        }
    }

    /// When the next walk is due.
    pub(super) fn due(&self) -> Option<Instant> {
        let first = self.first.as_ref().map(|(_, first, last)| {
            let at_once = self.last.is_none_or(|walk| first.saturating_duration_since(walk) >= COLLECT);
            if at_once { *first } else { (*last + QUIET).min(*first + COLLECT) }
        });
        let again = self.again.as_ref().map(|(_, at)| *at);
        let due = first.into_iter().chain(again).min()?;
        Some(self.not_before.map_or(due, |not_before| due.max(not_before)))
    }

    /// What to search for now: all there is, in one walk.
    pub(super) fn take(&mut self) -> StaleFlows {
        let again = self.again.as_ref().map(|(again, _)| again.clone()).unwrap_or_default();
        let mut all = again;
        all.extend(self.first.as_ref().map(|(first, ..)| first.clone()).unwrap_or_default());
        all
    }

    /// Notes a walk for what [`FlowSchedule::take`] returned. After a failure everything is searched for again later.
    pub(super) fn walked(&mut self, begun: Instant, now: Instant, worked: bool) -> Option<Duration> {
        self.last = Some(now);
        if let Some((first, ..)) = &mut self.first {
            first.sources.clear();
        }
        let pause = now.saturating_duration_since(begun) * PAUSE;
        if worked {
            self.retry.reset();
            self.again = self.first.take().map(|(first, ..)| (first, now + AGAIN));
            self.not_before = Some(now + pause);
            return None;
        }
        let delay = self.retry.next_delay().max(pause);
        self.not_before = Some(now + delay);
        Some(delay)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::plan::Frontend;
    use steerage_model::Protocol;

    const MS: Duration = Duration::from_millis(1);

    fn stale(port: u16) -> StaleFlows {
        let frontend = Frontend { addr: [192, 0, 2, 1].into(), protocol: Protocol::Udp, port };
        StaleFlows { udp: [(frontend, Arc::from([]))].into(), ..StaleFlows::default() }
    }

    #[test]
    fn first_change_is_searched_at_once_and_later_ones_together() {
        let start = Instant::now();
        let mut schedule = FlowSchedule::default();
        assert_eq!(schedule.due(), None);
        schedule.add(stale(1), start);
        assert_eq!(schedule.due(), Some(start));
        assert_eq!(schedule.take().udp.len(), 1);
        assert_eq!(schedule.walked(start, start + MS, true), None);
        for port in 2..20 {
            schedule.add(stale(port), start + u32::from(port) * 10 * MS);
        }
        assert_eq!(schedule.due(), Some(start + 190 * MS + QUIET), "none for a while");
        for port in 20..200 {
            schedule.add(stale(port), start + u32::from(port) * 10 * MS);
        }
        assert!(
            schedule.due() <= Some(start + 20 * MS + COLLECT),
            "endless changes do not delay it endlessly"
        );
        assert_eq!(schedule.take().udp.len(), 199);
    }

    #[test]
    fn frontends_are_searched_twice() {
        let start = Instant::now();
        let mut schedule = FlowSchedule::default();
        schedule.add(stale(1), start);
        schedule.walked(start, start + MS, true);
        assert_eq!(schedule.due(), Some(start + MS + AGAIN));
        assert_eq!(schedule.take(), stale(1));
        schedule.walked(start + AGAIN, start + AGAIN + MS, true);
        assert_eq!(schedule.due(), None);
    }

    #[test]
    fn source_ranges_are_searched_for_once() {
        let start = Instant::now();
        for worked in [true, false] {
            let mut schedule = FlowSchedule::default();
            let frontend = Frontend { addr: [192, 0, 2, 1].into(), protocol: Protocol::Tcp, port: 1 };
            schedule.add(StaleFlows { sources: [(frontend, Arc::from([]))].into(), ..stale(1) }, start);
            assert_eq!(schedule.take().sources.len(), 1);
            schedule.walked(start, start + MS, worked);
            assert_eq!((schedule.take().udp.len(), schedule.take().sources.len()), (1, 0));
        }
    }

    #[test]
    fn walks_take_a_small_part_of_a_processor() {
        let mut now = Instant::now();
        let (start, mut walking) = (now, Duration::ZERO);
        let mut schedule = FlowSchedule::default();
        while now - start < 60 * 1000 * MS {
            schedule.add(stale(1), now);
            now = now.max(schedule.due().expect("work"));
            schedule.walked(now, now + 200 * MS, true);
            walking += 200 * MS;
            now += 201 * MS;
        }
        assert!(walking * (PAUSE + 1) <= 62 * 1000 * MS, "{walking:?}");
    }

    #[test]
    fn failed_walk_is_repeated_with_everything() {
        let start = Instant::now();
        let mut schedule = FlowSchedule::default();
        schedule.add(stale(1), start);
        let delay = schedule.walked(start, start + MS, false).expect("a delay");
        schedule.add(stale(2), start + 2 * MS);
        let due = schedule.due().expect("work");
        assert!(due >= start + MS + delay.min(RETRY_DELAYS.0 / 2));
        assert_eq!(schedule.take().udp.len(), 2);
        schedule.walked(due, due + MS, true);
        assert_eq!(schedule.take().udp.len(), 2, "the second search");
    }
}

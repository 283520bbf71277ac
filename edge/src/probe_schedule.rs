// SPDX-License-Identifier: Apache-2.0
//! When a target is probed next. Pure, called by `prober`, which waits.
//!
//! A decided target is probed once in each interval. While its group has no healthy target, packets go to all nodes, also to
//! those without an endpoint. Then a target that answers is probed more often: after a second at first, and more and more
//! rarely, up to the interval. So a Service that has no endpoint for long costs no more than any other.
//!
//! A target that is expected to pass, because its node has just got an endpoint by `EndpointSlices`, is probed at once and again until it
//! passes: its service proxy follows within seconds.

use std::mem::{Discriminant, discriminant};
use std::time::{Duration, Instant};

use crate::health::ProbeResult;

/// The shortest delay while no target of the group is healthy.
const URGENT_DELAY: Duration = Duration::from_secs(1);
/// The delay is at least the time since the last change, divided by this: 11 probes more, with an interval of 30 s.
const URGENT_BACKOFF: u32 = 2;
/// The delay after the first probe of a target that is expected to pass. The next ones double, up to the interval.
const EXPECTED_DELAY: Duration = Duration::from_millis(100);
/// How long a target is expected to pass.
pub(crate) const EXPECTED_FOR: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct ProbeSchedule {
    interval: Duration,
    /// When the probe that begins the first interval is due. Spread: targets are added together.
    first: Instant,
    /// The end of the last probe.
    last: Instant,
    kind: Option<Discriminant<ProbeResult>>,
    has_answered: bool,
    /// Whether no target of the group is healthy.
    is_urgent: bool,
    /// When the target changed the kind of its result, or its group lost the last healthy target.
    changed: Instant,
    /// No urgent probe before. Spread: all targets of a group become urgent together.
    not_before: Instant,
    spread: f64,
    /// When the last probe began.
    begun: Instant,
    /// What [`expect`](Self::expect) was told last.
    expected_since: Option<Instant>,
    /// The probes since then, while none has passed.
    expected_probes: Option<u32>,
}

impl ProbeSchedule {
    /// `spread` from 0 to 1 is the target's position in the interval.
    pub(crate) fn new(interval: Duration, spread: f64, now: Instant) -> Self {
        Self {
            interval,
            first: now + interval.mul_f64(spread),
            last: now,
            kind: None,
            has_answered: false,
            is_urgent: false,
            changed: now,
            not_before: now,
            spread,
            begun: now,
            expected_since: None,
            expected_probes: None,
        }
    }

    /// Since this time the target is expected to pass; `None`: it is not. Returns whether that is news.
    pub(crate) fn expect(&mut self, since: Option<Instant>) -> bool {
        let is_new = self.expected_since != since;
        if is_new {
            (self.expected_since, self.expected_probes) = (since, since.map(|_| 0));
        }
        is_new
    }

    /// A probe begins.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.begun = now;
    }

    /// A probe ended with this result.
    pub(crate) fn record(&mut self, result: &ProbeResult, now: Instant) {
        let kind = Some(discriminant(result));
        if self.kind != kind {
            (self.kind, self.changed) = (kind, now);
        }
        self.has_answered = !matches!(result, ProbeResult::Unanswered(_));
        let has_passed = matches!(result, ProbeResult::Passed(_));
        self.expected_probes =
            self.expected_probes.filter(|_| !has_passed).map(|probes| probes.saturating_add(1));
        self.last = now;
    }

    pub(crate) fn set_urgent(&mut self, is_urgent: bool, now: Instant) {
        if is_urgent && !self.is_urgent {
            (self.changed, self.not_before) = (now, now + URGENT_DELAY.mul_f64(self.spread));
        }
        self.is_urgent = is_urgent;
    }

    /// When the next probe is due, after a delay if the first answer is still missing.
    pub(crate) fn due(&self, initial_delay: Option<Duration>) -> Instant {
        let due = self.due_unexpected(initial_delay);
        self.next_expected().map_or(due, |expected| expected.min(due))
    }

    /// When the next probe is due because the target is expected to pass.
    fn next_expected(&self) -> Option<Instant> {
        let (since, probes) = self.expected_since.zip(self.expected_probes)?;
        let Some(before) = probes.checked_sub(1) else { return Some(since) };
        let delay = EXPECTED_DELAY.saturating_mul(1 << before.min(10)).min(self.interval);
        // A probe without an answer holds one of few permits until its timeout.
        let due = self.last + delay.max(self.last.saturating_duration_since(self.begun));
        (due < since + EXPECTED_FOR).then_some(due)
    }

    fn due_unexpected(&self, initial_delay: Option<Duration>) -> Instant {
        let regular = self.next_regular();
        match initial_delay {
            Some(delay) => self.last + delay,
            // A probe without an answer holds one of few permits until its timeout.
            None if self.is_urgent && self.has_answered => {
                let delay =
                    (self.last.saturating_duration_since(self.changed) / URGENT_BACKOFF).max(URGENT_DELAY);
                (self.last + delay).max(self.not_before).min(regular)
            }
            None => regular,
        }
    }

    /// The beginning of the next interval.
    fn next_regular(&self) -> Instant {
        let Some(elapsed) = self.last.checked_duration_since(self.first) else { return self.first };
        let begun = elapsed.as_nanos() / self.interval.as_nanos().max(1);
        self.first + self.interval.saturating_mul(u32::try_from(begun + 1).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);

    fn failed() -> ProbeResult {
        ProbeResult::Failed("status 503".to_owned())
    }

    /// The seconds at which a target is probed that always gives this result, at once.
    fn probed(schedule: &mut ProbeSchedule, start: Instant, count: usize, result: &ProbeResult) -> Vec<u64> {
        let mut now = start;
        let mut probe = || {
            schedule.record(result, now);
            now = schedule.due(None);
            now.duration_since(start).as_millis().try_into().expect("milliseconds")
        };
        (0..count).map(|_| probe()).collect()
    }

    #[test]
    fn decided_target_is_probed_at_its_position_in_each_interval() {
        let now = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.25, now);
        assert_eq!(probed(&mut schedule, now, 3, &ProbeResult::Passed(None)), [7_500, 37_500, 67_500]);
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.0, now);
        assert_eq!(probed(&mut schedule, now, 2, &failed()), [30_000, 60_000]);
        schedule.record(&failed(), now + Duration::from_secs(100));
        assert_eq!(schedule.due(None), now + Duration::from_mins(2), "no burst after a slow probe");
    }

    #[test]
    fn target_without_a_healthy_one_beside_it_is_probed_soon_and_then_more_rarely() {
        let now = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.0, now);
        schedule.set_urgent(true, now);
        let times = probed(&mut schedule, now, 12, &failed());
        assert_eq!(times[..5], [1_000, 2_000, 3_000, 4_500, 6_750]);
        let ready = 8_000;
        assert!(times.iter().any(|time| (ready..ready + 3_000).contains(time)), "{times:?}");
        // At most one probe more in each interval once the time since the change is two intervals.
        let later = probed(&mut schedule, now + Duration::from_mins(10), 20, &failed());
        let begun: Vec<_> = later.iter().map(|time| time / 30_000).collect();
        assert!(begun.windows(2).all(|pair| pair[1] == pair[0] + 1), "{later:?}");
    }

    #[test]
    fn another_kind_of_result_begins_again() {
        let start = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.0, start);
        schedule.set_urgent(true, start);
        schedule.record(&failed(), start);
        let now = start + Duration::from_mins(10) + INTERVAL / 2;
        schedule.record(&ProbeResult::Failed("status 500".to_owned()), now);
        assert_eq!(schedule.due(None), now + INTERVAL / 2, "the same kind");
        schedule.record(&ProbeResult::Passed(None), now);
        assert_eq!(schedule.due(None), now + URGENT_DELAY);
    }

    #[test]
    fn loss_of_the_last_healthy_target_brings_the_next_probes_forward() {
        let start = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.5, start);
        let last = start + Duration::from_secs(20);
        schedule.record(&failed(), last);
        let now = last + Duration::from_secs(5);
        schedule.set_urgent(true, now);
        assert_eq!(schedule.due(None), now + URGENT_DELAY / 2, "spread over a second");
        schedule.set_urgent(false, now);
        assert_eq!(schedule.due(None), start + Duration::from_secs(45));
    }

    #[test]
    fn target_that_does_not_answer_is_never_urgent() {
        let now = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.0, now);
        schedule.set_urgent(true, now);
        let silent = ProbeResult::Unanswered("no response within 5s".to_owned());
        assert_eq!(probed(&mut schedule, now, 2, &silent), [30_000, 60_000]);
        assert_eq!(schedule.due(Some(Duration::from_secs(2))), schedule.last + Duration::from_secs(2));
    }

    /// The milliseconds after `start` at which an expected target is probed that gives this result, each after this time.
    fn expected(
        schedule: &mut ProbeSchedule,
        start: Instant,
        result: &ProbeResult,
        takes: Duration,
    ) -> Vec<u128> {
        let (mut begun, mut times) = (schedule.due(None), Vec::new());
        while begun < start + Duration::from_secs(40) {
            let begins = begun.max(start);
            times.push(begins.duration_since(start).as_millis());
            schedule.begin(begins);
            schedule.record(result, begins + takes);
            begun = schedule.due(None);
        }
        times
    }

    #[test]
    fn expected_target_is_probed_at_once_and_again_until_its_time_is_over() {
        let start = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.5, start);
        schedule.record(&failed(), start);
        let now = start + Duration::from_secs(1);
        assert!(schedule.expect(Some(now)) && !schedule.expect(Some(now)));
        let times = expected(&mut schedule, now, &failed(), Duration::ZERO);
        // The last one is the interval's.
        assert_eq!(times, [0, 100, 300, 700, 1500, 3100, 6300, 12_700, 14_000]);
        assert!(schedule.expect(None) && !schedule.expect(None));
        let short = Duration::from_millis(250);
        let mut schedule = ProbeSchedule::new(short, 0.0, start);
        schedule.expect(Some(start));
        let times = expected(&mut schedule, start, &failed(), Duration::ZERO);
        assert_eq!(
            times[..5],
            [0, 100, 250, 500, 750],
            "no more often than the interval, but for the first ones"
        );
    }

    #[test]
    fn expectation_ends_with_the_first_pass_and_begins_again_with_the_next() {
        let start = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.5, start);
        schedule.expect(Some(start));
        assert_eq!(schedule.due(None), start);
        schedule.record(&ProbeResult::Passed(None), start);
        assert_eq!(schedule.due(None), start + INTERVAL / 2);
        schedule.record(&failed(), start);
        assert_eq!(schedule.due(None), start + INTERVAL / 2, "it has passed");
        let now = start + Duration::from_secs(5);
        schedule.expect(Some(now));
        assert_eq!(schedule.due(None), now);
        schedule.expect(None);
        assert_eq!(schedule.due(None), start + INTERVAL / 2, "it has left");
    }

    #[test]
    fn expected_target_without_an_answer_is_probed_half_of_the_time_at_most() {
        let start = Instant::now();
        let mut schedule = ProbeSchedule::new(INTERVAL, 0.99, start);
        schedule.expect(Some(start));
        let silent = ProbeResult::Unanswered("no response within 2s".to_owned());
        let times = expected(&mut schedule, start, &silent, Duration::from_secs(2));
        assert_eq!(times[..4], [0, 4000, 8000, 12_000]);
    }
}

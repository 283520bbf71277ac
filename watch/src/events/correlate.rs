// SPDX-License-Identifier: Apache-2.0
//! Decides which events are written, counted in a series, or over the rate limit. Pure.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::{EventLimit, Notice, Subject};

/// A series ends after this long without a repetition: the next occurrence is a new event.
const SERIES: Duration = Duration::from_mins(6);
/// Minimum time between two writes of a series.
const BETWEEN: Duration = Duration::from_secs(30);
/// Events of one object: how many at once, and after which time one more.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(30);
/// Maximum number of series and of objects, to bound memory.
const REMEMBERED: usize = 4096;

/// The result for a notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Create an event.
    Create,
    /// Update the series of this event.
    Count {
        /// The event's name.
        name: String,
        /// The number of occurrences.
        count: i32,
    },
    /// Counted; a later update writes it.
    Wait,
    /// The object is over its rate limit.
    TooMany,
}

#[derive(Debug)]
struct Series {
    name: String,
    count: i32,
    last: Instant,
    written: Instant,
}

/// The recent series, and the rate limits.
#[derive(Debug, Default)]
pub(super) struct Correlator {
    series: HashMap<Notice, Series>,
    limits: HashMap<Subject, EventLimit>,
}

impl Correlator {
    pub(super) fn step(&mut self, notice: &Notice, now: Instant) -> Step {
        self.series.retain(|_, series| now.duration_since(series.last) < SERIES);
        if let Some(series) = self.series.get_mut(notice) {
            series.count = series.count.saturating_add(1);
            series.last = now;
            if now.duration_since(series.written) < BETWEEN {
                return Step::Wait;
            }
            series.written = now;
            return Step::Count { name: series.name.clone(), count: series.count };
        }
        if self.take(&notice.subject, now) { Step::Create } else { Step::TooMany }
    }

    /// Records the name of the event that [`Step::Create`] requested.
    pub(super) fn created(&mut self, notice: Notice, name: String, now: Instant) {
        if self.series.len() >= REMEMBERED {
            forget_older_half(&mut self.series, |series| series.last);
        }
        self.series.insert(notice, Series { name, count: 1, last: now, written: now });
    }

    fn take(&mut self, subject: &Subject, now: Instant) -> bool {
        if self.limits.len() >= REMEMBERED {
            forget_older_half(&mut self.limits, EventLimit::filled);
        }
        self.limits.entry(subject.clone()).or_insert_with(|| EventLimit::new(BURST, REFILL, now)).take(now)
    }
}

pub(super) fn forget_older_half<K: std::hash::Hash + Eq, V>(
    map: &mut HashMap<K, V>,
    age: impl Fn(&V) -> Instant,
) {
    let mut ages: BTreeMap<Instant, usize> = BTreeMap::new();
    for value in map.values() {
        *ages.entry(age(value)).or_default() += 1;
    }
    let mut left = map.len() / 2;
    let limit = ages.into_iter().find(|(_, count)| {
        left = left.saturating_sub(*count);
        left == 0
    });
    if let Some((limit, _)) = limit {
        map.retain(|_, value| age(value) > limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Severity;

    fn notice(name: &str, note: &str) -> Notice {
        let subject = Subject {
            api_version: "v1".into(),
            kind: "Service".into(),
            namespace: "a".into(),
            name: name.into(),
            uid: "u".into(),
        };
        Notice {
            subject,
            severity: Severity::Warning,
            reason: "NoAddress",
            action: "Allocate",
            note: note.into(),
        }
    }

    fn create(correlator: &mut Correlator, notice: &Notice, now: Instant) {
        assert_eq!(correlator.step(notice, now), Step::Create);
        correlator.created(notice.clone(), format!("event-{}", notice.note), now);
    }

    #[test]
    fn equal_event_is_counted_and_another_note_is_a_new_event() {
        let mut correlator = Correlator::default();
        let start = Instant::now();
        create(&mut correlator, &notice("web", "one"), start);
        assert_eq!(correlator.step(&notice("web", "one"), start), Step::Wait);
        create(&mut correlator, &notice("web", "two"), start);
        let later = start + BETWEEN;
        let name = "event-one".to_owned();
        assert_eq!(correlator.step(&notice("web", "one"), later), Step::Count { name, count: 3 });
        assert_eq!(correlator.step(&notice("web", "one"), later), Step::Wait);
        assert_eq!(
            correlator.step(&notice("web", "one"), later + SERIES),
            Step::Create,
            "the series has ended"
        );
    }

    #[test]
    fn unwritten_event_is_created_again() {
        let mut correlator = Correlator::default();
        let now = Instant::now();
        assert_eq!(correlator.step(&notice("web", "one"), now), Step::Create);
        assert_eq!(correlator.step(&notice("web", "one"), now), Step::Create);
    }

    #[test]
    fn rate_limits_are_per_object() {
        let mut correlator = Correlator::default();
        let start = Instant::now();
        for number in 0..BURST {
            create(&mut correlator, &notice("web", &number.to_string()), start);
        }
        assert_eq!(correlator.step(&notice("web", "more"), start), Step::TooMany);
        assert_eq!(correlator.step(&notice("other", "more"), start), Step::Create);
        assert_eq!(correlator.step(&notice("web", "more"), start + REFILL), Step::Create);
        assert_eq!(correlator.step(&notice("web", "again"), start + REFILL), Step::TooMany);
    }

    #[test]
    fn memory_is_bounded() {
        let mut correlator = Correlator::default();
        let start = Instant::now();
        for number in 0..3 * u64::try_from(REMEMBERED).expect("small") {
            let now = start + Duration::from_millis(number);
            create(&mut correlator, &notice(&format!("web-{number}"), "one"), now);
            assert!(correlator.series.len() <= REMEMBERED && correlator.limits.len() <= REMEMBERED);
        }
    }
}

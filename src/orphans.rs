// SPDX-License-Identifier: Apache-2.0
//! Load balancers that only the provider's list names: their Service is gone, and this process never knew it. Pure: the caller passes
//! the time.
//!
//! A wrong list, a wrong flag or a cluster that is being restored looks the same as a real orphan. So an orphan is reported first, and
//! deleted only if a later comparison finds it again. The workers own the tracker; a new lease holder starts with an empty one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_process::duration;
use steerage_provider_api::Owner;
use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct OrphanTracker {
    grace_period: Duration,
    /// When a comparison first found each, without a gap since.
    found: BTreeMap<Owner, Instant>,
}

impl OrphanTracker {
    pub(crate) fn new(grace_period: Duration) -> Self {
        Self { grace_period, found: BTreeMap::new() }
    }

    /// Records a comparison that found these orphans. Returns those that were found at least the grace period ago too.
    pub(crate) fn compare(&mut self, orphans: BTreeSet<Owner>, now: Instant) -> Vec<Owner> {
        self.found.retain(|owner, _| orphans.contains(owner));
        for owner in orphans {
            self.found.entry(owner).or_insert_with_key(|owner| {
                tracing::warn!(
                    service = %owner.service, uid = owner.uid, delete_in = %duration::display(self.grace_period),
                    "load balancer has no Service; deleting it after the grace period if a list still has it"
                );
                now
            });
        }
        let is_due = |since: &Instant| now >= *since + self.grace_period;
        self.found.iter().filter(|(_, since)| is_due(since)).map(|(owner, _)| owner.clone()).collect()
    }

    /// When the next orphan can be deleted, if a comparison finds it then.
    pub(crate) fn next_due(&self, now: Instant) -> Option<Instant> {
        self.found.values().map(|since| *since + self.grace_period).filter(|due| *due > now).min()
    }

    /// The number of orphans that the last comparison found.
    pub(crate) fn len(&self) -> usize {
        self.found.len()
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;

    const GRACE: Duration = Duration::from_mins(10);

    fn owner(uid: &str) -> Owner {
        Owner { service: Key::new("default", "web"), uid: uid.to_owned() }
    }

    fn orphans(uids: &[&str]) -> BTreeSet<Owner> {
        uids.iter().map(|uid| owner(uid)).collect()
    }

    #[test]
    fn orphan_is_due_when_it_is_found_again_after_the_grace_period() {
        let (mut tracker, start) = (OrphanTracker::new(GRACE), Instant::now());
        assert_eq!(tracker.compare(orphans(&["a"]), start), []);
        assert_eq!((tracker.len(), tracker.next_due(start)), (1, Some(start + GRACE)));
        let early = start + GRACE - Duration::from_secs(1);
        assert_eq!(tracker.compare(orphans(&["a", "b"]), early), []);
        let due = start + GRACE;
        assert_eq!(tracker.compare(orphans(&["a", "b"]), due), [owner("a")]);
        assert_eq!(tracker.next_due(due), Some(early + GRACE), "the next one's");
        assert_eq!(
            tracker.compare(orphans(&["a", "b"]), early + GRACE),
            [owner("a"), owner("b")],
            "until gone"
        );
        assert_eq!(tracker.next_due(early + GRACE), None);
    }

    #[test]
    fn orphan_that_was_not_one_in_between_starts_again() {
        let (mut tracker, start) = (OrphanTracker::new(GRACE), Instant::now());
        tracker.compare(orphans(&["a"]), start);
        tracker.compare(orphans(&[]), start + GRACE / 2);
        assert_eq!((tracker.len(), tracker.next_due(start)), (0, None));
        assert_eq!(tracker.compare(orphans(&["a"]), start + GRACE), []);
        assert_eq!(tracker.compare(orphans(&["a"]), start + GRACE * 2), [owner("a")]);
    }

    #[test]
    fn without_a_grace_period_one_comparison_is_enough() {
        let mut tracker = OrphanTracker::new(Duration::ZERO);
        assert_eq!(tracker.compare(orphans(&["a"]), Instant::now()), [owner("a")]);
    }
}

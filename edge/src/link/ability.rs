// SPDX-License-Identifier: Apache-2.0
//! How well a host can serve the VIPs. Each host states it in its heartbeats, so that one that cannot leaves them to another. Pure.

use std::time::{Duration, Instant};

/// The engine reports at least once a second. One that is silent for so long is stuck, or writes more than a host should take over.
const REPORT_LIMIT: Duration = Duration::from_secs(10);

/// A share is a number of millionths.
pub(crate) const ALL: u32 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ability {
    /// Whether the host knows what to serve, its kernel has the rules for that, and its engine runs.
    pub(crate) can_serve: bool,
    /// The share of VIPs with a healthy target, in millionths.
    pub(crate) healthy_share: u32,
}

impl Ability {
    /// Of a host that has just started.
    pub(crate) const NONE: Self = Self { can_serve: false, healthy_share: 0 };
    /// Hosts of earlier versions do not state theirs, and are believed to be able.
    pub(crate) const UNSTATED: Self = Self { can_serve: true, healthy_share: ALL };

    /// Whether this host is so much better than another that its VIPs should move here. Hosts probe at different times, and a
    /// takeover is not free, so a small difference does not count.
    pub(crate) fn is_much_better_than(self, other: Self) -> bool {
        let share = |of: Self| u64::from(of.healthy_share);
        match (self.can_serve, other.can_serve) {
            (true, true) => share(other) * 4 < share(self) * 3,
            (can_serve, _) => can_serve && !other.can_serve,
        }
    }
}

/// The share of `healthy` in `all`, in millionths.
pub(crate) fn share(healthy: usize, all: usize) -> u32 {
    if all == 0 {
        return ALL;
    }
    let (healthy, all) = (u64::try_from(healthy).unwrap_or(0), u64::try_from(all).unwrap_or(u64::MAX));
    u32::try_from(healthy.saturating_mul(ALL.into()) / all).unwrap_or(ALL).min(ALL)
}

/// What the engine reports of itself, again and again while it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AbilityReport {
    pub(crate) at: Instant,
    /// Whether the API has been listed.
    pub(crate) has_synced: bool,
    /// Whether the kernel has the rules of the last plan.
    pub(crate) is_programmed: bool,
    /// The share of VIPs with a healthy target, in millionths.
    pub(crate) healthy_share: u32,
}

impl AbilityReport {
    /// Before the first plan.
    pub(crate) fn new(now: Instant) -> Self {
        Self { at: now, has_synced: false, is_programmed: false, healthy_share: 0 }
    }

    /// Why the host cannot serve.
    pub(crate) fn problem(&self, now: Instant) -> Option<&'static str> {
        if now.saturating_duration_since(self.at) >= REPORT_LIMIT {
            Some("the main loop does not respond")
        } else if !self.has_synced {
            Some("the edge's objects are not listed")
        } else if !self.is_programmed {
            Some("the ruleset is not written")
        } else {
            None
        }
    }

    pub(crate) fn ability(&self, now: Instant) -> Ability {
        Ability { can_serve: self.problem(now).is_none(), healthy_share: self.healthy_share }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_can_serve_once_it_has_listed_and_written_and_while_its_engine_runs() {
        let now = Instant::now();
        let able = AbilityReport { has_synced: true, is_programmed: true, ..AbilityReport::new(now) };
        assert!(able.ability(now).can_serve);
        assert!(able.ability(now + REPORT_LIMIT / 2).can_serve);
        assert!(!able.ability(now + REPORT_LIMIT).can_serve, "a stuck engine");
        assert!(!AbilityReport { has_synced: false, ..able }.ability(now).can_serve);
        assert!(!AbilityReport { is_programmed: false, ..able }.ability(now).can_serve);
        assert!(!AbilityReport::new(now).ability(now).can_serve);
    }

    #[test]
    fn only_a_large_difference_counts() {
        let able = |healthy_share| Ability { can_serve: true, healthy_share };
        assert!(able(0).is_much_better_than(Ability::NONE));
        assert!(!Ability::NONE.is_much_better_than(able(0)));
        assert!(!Ability::NONE.is_much_better_than(Ability::NONE));
        assert!(able(ALL).is_much_better_than(able(ALL / 2)));
        assert!(able(1).is_much_better_than(able(0)));
        assert!(!able(ALL).is_much_better_than(able(ALL / 10 * 9)));
        assert!(!able(0).is_much_better_than(able(0)));
        let unable = Ability { can_serve: false, healthy_share: ALL };
        assert!(!unable.is_much_better_than(able(0)));
    }

    #[test]
    fn share_is_of_all_and_whole_without_any() {
        assert_eq!([share(0, 0), share(0, 3), share(1, 2), share(3, 3)], [ALL, 0, ALL / 2, ALL]);
    }
}

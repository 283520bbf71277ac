// SPDX-License-Identifier: Apache-2.0
//! How well a host can serve the VIPs. Each host states it in its heartbeats, so that one that cannot leaves them to another. Pure.

use std::time::{Duration, Instant};

/// The engine reports at least once a second. One that is silent for so long is stuck, or writes more than a host should take over.
const REPORT_LIMIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ability {
    /// Whether the host knows what to serve, its kernel's maps hold that, and its engine runs.
    pub(crate) can_serve: bool,
    /// The number of VIPs with a healthy target. No share: a host whose own list is empty or old would have all of it.
    pub(crate) healthy_vips: u32,
}

impl Ability {
    /// Of a host that has just started.
    pub(crate) const NONE: Self = Self { can_serve: false, healthy_vips: 0 };
    /// Hosts of earlier versions do not state theirs, and are believed to be able. No other host yields to them for their targets.
    pub(crate) const UNSTATED: Self = Self { can_serve: true, healthy_vips: 0 };

    /// Of a host that the API server does not answer: what it knows of its VIPs may be old, so that a host with healthy targets for more
    /// than a third as many VIPs is much healthier. If the API server answers none, none is.
    pub(crate) const fn without_news(self) -> Self {
        Self { healthy_vips: self.healthy_vips / 4, ..self }
    }

    /// Whether this host is so much better than another that its VIPs should move here. Hosts probe at different times, and a
    /// takeover is not free, so a small difference does not count.
    pub(crate) fn is_much_better_than(self, other: Self) -> bool {
        match (self.can_serve, other.can_serve) {
            (true, true) => self.is_much_healthier_than(other),
            (can_serve, _) => can_serve && !other.can_serve,
        }
    }

    /// Whether this host can serve, and has a healthy target for a third more VIPs than another.
    pub(crate) fn is_much_healthier_than(self, other: Self) -> bool {
        let healthy = |of: Self| u64::from(of.healthy_vips);
        self.can_serve && healthy(other) * 4 < healthy(self) * 3
    }
}

/// What the engine reports of itself, again and again while it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AbilityReport {
    pub(crate) at: Instant,
    /// Whether the API has been listed.
    pub(crate) has_synced: bool,
    /// Whether the kernel's maps hold the last plan.
    pub(crate) is_programmed: bool,
    /// The number of VIPs with a healthy target.
    pub(crate) healthy_vips: u32,
}

impl AbilityReport {
    /// Before the first plan.
    pub(crate) fn new(now: Instant) -> Self {
        Self { at: now, has_synced: false, is_programmed: false, healthy_vips: 0 }
    }

    /// Why the host cannot serve.
    pub(crate) fn problem(&self, now: Instant) -> Option<&'static str> {
        if now.saturating_duration_since(self.at) >= REPORT_LIMIT {
            Some("the main loop does not respond")
        } else if !self.has_synced {
            Some("the edge's objects are not listed")
        } else if !self.is_programmed {
            Some("the kernel's maps are not written")
        } else {
            None
        }
    }

    pub(crate) fn ability(&self, now: Instant) -> Ability {
        Ability { can_serve: self.problem(now).is_none(), healthy_vips: self.healthy_vips }
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
        let able = |healthy_vips| Ability { can_serve: true, healthy_vips };
        assert!(able(0).is_much_better_than(Ability::NONE));
        assert!(!Ability::NONE.is_much_better_than(able(0)));
        assert!(!Ability::NONE.is_much_better_than(Ability::NONE));
        assert!(able(100).is_much_better_than(able(74)));
        assert!(able(1).is_much_better_than(able(0)));
        assert!(!able(100).is_much_better_than(able(75)));
        assert!(!able(0).is_much_better_than(able(0)));
        let unable = Ability { can_serve: false, healthy_vips: 100 };
        assert!(!unable.is_much_better_than(able(0)));
    }
}

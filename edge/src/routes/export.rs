// SPDX-License-Identifier: Apache-2.0
//! Which VIPs have a route, and until when the routes stay without this process. Pure; `routes` asks.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::host::PeerLiveness;
use crate::link::mac::Mac;
use crate::link::membership::Membership;
use crate::vips::AFTER_STANDBY;

/// What this host does with its routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExportRole {
    /// The other hosts are not known yet: add none, and keep those of an earlier process.
    Undecided,
    /// Export all VIPs.
    Serving,
    /// This host cannot serve, and another one can: add none, and let the others expire.
    Yielding,
    /// The process ends, and another host can serve: remove all.
    Withdrawing,
    /// The process ends, and no other host can serve: the kernel forwards without it.
    Remaining,
}

impl ExportRole {
    pub(super) fn new(membership: &Membership, can_serve: bool, is_leaving: bool) -> Self {
        let Membership { settled, has_standby, .. } = *membership;
        match (is_leaving, settled, has_standby) {
            (true, true, true) => Self::Withdrawing,
            (true, true, false) => Self::Remaining,
            (_, false, _) => Self::Undecided,
            (false, true, true) if !can_serve => Self::Yielding,
            (false, true, _) => Self::Serving,
        }
    }

    /// The end of the routes' lifetime, as time since the kernel's start; `Duration::MAX` is none. `lifetime`: what it is while another
    /// host can serve; `since_standby`: the time since one could. As for the leases of VIPs.
    pub(super) fn expiry(
        self,
        before: Duration,
        now: Duration,
        lifetime: Duration,
        since_standby: Option<Duration>,
    ) -> Duration {
        match (self, since_standby) {
            (Self::Undecided, _) => before,
            (Self::Yielding, _) => before.min(now + lifetime),
            (Self::Serving, Some(Duration::ZERO)) => now + lifetime,
            (Self::Serving, Some(since)) if since < AFTER_STANDBY => now + lifetime.max(AFTER_STANDBY),
            (Self::Serving | Self::Withdrawing | Self::Remaining, _) => Duration::MAX,
        }
    }

    /// The VIPs that should have a route. `vips`: those that the kernel's maps serve; `is_known`: whether these are of a plan of this
    /// process, and not what an earlier one left; `present`: those that have a route; `lasts`: whether the lifetime has not ended.
    pub(super) fn wanted(
        self,
        lasts: bool,
        is_known: bool,
        vips: &BTreeSet<IpAddr>,
        present: &BTreeSet<IpAddr>,
    ) -> BTreeSet<IpAddr> {
        match self {
            Self::Serving | Self::Remaining if is_known => vips.clone(),
            Self::Serving | Self::Remaining => vips | present,
            Self::Undecided | Self::Yielding if lasts && is_known => vips & present,
            Self::Undecided | Self::Yielding if lasts => present.clone(),
            Self::Undecided | Self::Yielding | Self::Withdrawing => BTreeSet::new(),
        }
    }
}

/// A host that lacks flows of others adds no routes for so long: it asks others for what it lacks every 3 s.
const LEARNING_LIMIT: Duration = Duration::from_secs(10);

/// Whether this host does not have the flow exceptions of all hosts that are alive.
pub(super) fn lacks_flows(membership: &Membership, heard: &BTreeSet<Mac>) -> bool {
    let live = membership.peers.iter().filter(|peer| peer.liveness == PeerLiveness::Live);
    live.into_iter().any(|peer| !heard.contains(&peer.mac))
}

/// The time in which a process that has just started learns the flows that routers may move to it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Learning {
    since: Option<Instant>,
    is_over: bool,
}

impl Learning {
    /// This host could export.
    pub(super) fn update(&mut self, lacks_flows: bool, now: Instant) {
        let since = *self.since.get_or_insert(now);
        self.is_over |= !lacks_flows || now.saturating_duration_since(since) >= LEARNING_LIMIT;
    }

    /// Whether routes are added. `has_standby`: whether another host can serve; otherwise there is none to draw flows from.
    pub(super) fn may_add(self, has_standby: bool) -> bool {
        self.is_over || !has_standby
    }
}

#[cfg(test)]
mod tests {
    use super::ExportRole::{Remaining, Serving, Undecided, Withdrawing, Yielding};
    use super::*;

    #[test]
    fn role_follows_the_ability_of_this_host_and_of_others() {
        for (settled, can_serve, has_standby, is_leaving, role) in [
            (false, false, false, false, Undecided),
            (false, true, true, false, Undecided),
            (true, true, true, false, Serving),
            (true, true, false, false, Serving),
            // Losing sight of the cluster takes no traffic down.
            (true, false, false, false, Serving),
            (true, false, true, false, Yielding),
            (true, true, true, true, Withdrawing),
            (true, false, true, true, Withdrawing),
            (true, true, false, true, Remaining),
            (true, false, false, true, Remaining),
            (false, true, true, true, Undecided),
        ] {
            let membership = Membership { has_standby, settled, ..Membership::default() };
            let found = ExportRole::new(&membership, can_serve, is_leaving);
            assert_eq!(found, role, "{settled}, {can_serve}, {has_standby}, {is_leaving}");
        }
    }

    #[test]
    fn routes_expire_only_while_another_host_can_serve_or_could_lately() {
        const MAX: Duration = Duration::MAX;
        let second = Duration::from_secs;
        let expiry = |role: ExportRole, before, since_standby| {
            role.expiry(before, second(100), second(6), since_standby)
        };
        let (present, lately) = (Some(Duration::ZERO), Some(second(20)));
        for (role, before, since_standby, wanted) in [
            (Undecided, second(103), present, second(103)),
            (Undecided, MAX, None, MAX),
            (Serving, second(103), present, second(106)),
            (Serving, second(103), lately, second(160)),
            (Serving, second(103), Some(AFTER_STANDBY), MAX),
            (Serving, second(103), None, MAX),
            (Yielding, MAX, present, second(106)),
            (Yielding, second(160), present, second(106)),
            (Yielding, second(103), present, second(103)),
            (Withdrawing, second(103), present, MAX),
            (Remaining, second(103), lately, MAX),
        ] {
            assert_eq!(
                expiry(role, before, since_standby),
                wanted,
                "{role:?}, {before:?}, {since_standby:?}"
            );
        }
    }

    #[test]
    fn host_that_starts_learns_the_flows_of_others_first() {
        let second = Duration::from_secs;
        let peer = |number: u8, liveness| crate::host::EdgePeer {
            mac: [number; 6],
            addresses: Vec::new(),
            liveness,
        };
        let peers =
            vec![peer(1, PeerLiveness::Live), peer(2, PeerLiveness::Live), peer(3, PeerLiveness::Dead)];
        let membership = Membership { peers, ..Membership::default() };
        let lacks =
            |heard: &[u8]| lacks_flows(&membership, &heard.iter().map(|number| [*number; 6]).collect());
        assert!(lacks(&[]) && lacks(&[1, 3]) && !lacks(&[1, 2]));
        assert!(!lacks_flows(&Membership::default(), &BTreeSet::new()), "alone");
        let start = Instant::now();
        let ends = |lacks: &[bool]| {
            let mut learning = Learning::default();
            let mut at = start;
            lacks.iter().position(|lacks| {
                learning.update(*lacks, at);
                at += second(1);
                assert!(learning.may_add(false), "no other host can serve");
                learning.may_add(true)
            })
        };
        assert_eq!(ends(&[false]), Some(0));
        assert_eq!(ends(&[true, true, false]), Some(2));
        assert_eq!(ends(&[true; 20]), Some(10));
        let mut learning = Learning::default();
        learning.update(false, start);
        learning.update(true, start);
        assert!(learning.may_add(true), "another host has come");
    }

    #[test]
    fn routes_follow_the_vips_that_are_served() {
        let set = |last: &[u8]| -> BTreeSet<IpAddr> {
            last.iter().map(|last| IpAddr::from([10, 0, 0, *last])).collect()
        };
        // 1 and 2 are served, 2 and 3 have a route.
        for (role, lasts, is_known, wanted) in [
            (Serving, true, true, &[1, 2][..]),
            (Serving, false, true, &[1, 2]),
            // What a new process has not planned may still be served.
            (Serving, true, false, &[1, 2, 3]),
            (Undecided, true, false, &[2, 3]),
            (Undecided, true, true, &[2]),
            (Undecided, false, false, &[]),
            (Yielding, true, false, &[2, 3]),
            (Yielding, true, true, &[2]),
            (Yielding, false, true, &[]),
            (Withdrawing, true, true, &[]),
            (Remaining, true, true, &[1, 2]),
            (Remaining, true, false, &[1, 2, 3]),
        ] {
            let found = role.wanted(lasts, is_known, &set(&[1, 2]), &set(&[2, 3]));
            assert_eq!(found, set(wanted), "{role:?}, {lasts}, {is_known}");
        }
    }
}

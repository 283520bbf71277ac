// SPDX-License-Identifier: Apache-2.0
//! The VIPs for which this host answers ARP and neighbour discovery: its role for each shard of them, and announcements.
//!
//! A VIP is no address of the interface. The kernel's program answers for those that it serves while the lease of their shard lasts,
//! which `lease` alone writes. So a takeover is one write for each shard, however many VIPs there are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use crate::link::mac::{Mac, display_mac};
use crate::link::membership::Membership;
use crate::shards::{Shard, Shards};

mod forwarding;
mod lease;

pub(crate) use lease::{AFTER_STANDBY, LeaseRenewer, VipLeases, lease_time, now as boot_time};

/// The lease of all VIPs in the maps that an earlier version has written, which did not divide them.
pub(crate) const UNDIVIDED: u32 = 0;
/// A lease that never begins: of VIPs that another machine on the link has, or may have.
pub(crate) const WITHHELD: u32 = 1;

/// A VIP that another host on the link announces is announced again after at least this time.
const DEFENCE_INTERVAL: Duration = Duration::from_secs(5);

/// Whether this host should answer for the VIPs of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VipRole {
    /// The other hosts are not known yet: change nothing.
    Undecided,
    /// This host answers.
    Active,
    /// Another host answers.
    Standby,
    /// No host is known to answer: continue if this one does, and do not begin.
    Unanswered,
}

/// The roles for all shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VipRoles {
    is_settled: bool,
    active: Shards,
    others_active: Shards,
    is_leaving: bool,
}

impl VipRoles {
    pub(crate) fn new(membership: &Membership, is_leaving: bool) -> Self {
        let Membership { settled, active, others_active, .. } = *membership;
        Self { is_settled: settled, active, others_active, is_leaving }
    }

    /// A host that is leaving keeps its VIPs for a moment after another one has become active.
    pub(crate) fn of(&self, shard: Shard) -> VipRole {
        match (self.is_settled, self.active.contains(shard), self.others_active.contains(shard)) {
            (false, ..) => VipRole::Undecided,
            (true, true, _) => VipRole::Active,
            (true, false, true) if !self.is_leaving => VipRole::Standby,
            (true, false, _) => VipRole::Unanswered,
        }
    }

    fn is_active(&self, vip: IpAddr) -> bool {
        self.of(Shard::of(vip)) == VipRole::Active
    }
}

/// The VIPs that the kernel's maps serve. Owned by `engine`.
#[derive(Debug)]
pub(crate) struct ServedVips {
    leases: VipLeases,
    held: BTreeSet<IpAddr>,
    /// The same, for other tasks.
    published: watch::Sender<BTreeSet<IpAddr>>,
    announcements: mpsc::UnboundedSender<BTreeSet<IpAddr>>,
    last_defence: Option<Instant>,
    /// When all VIPs are announced.
    announcement_at: Option<Instant>,
    /// The time after which this host has heard an active one that took over while it was disconnected.
    hearing_time: Duration,
}

impl ServedVips {
    pub(crate) fn new(
        leases: VipLeases,
        held: BTreeSet<IpAddr>,
        hearing_time: Duration,
        published: watch::Sender<BTreeSet<IpAddr>>,
        announcements: mpsc::UnboundedSender<BTreeSet<IpAddr>>,
    ) -> Self {
        // At once: a host that becomes active announces those of an earlier process.
        published.send_replace(held.clone());
        Self {
            leases,
            held,
            published,
            announcements,
            last_defence: None,
            announcement_at: None,
            hearing_time,
        }
    }

    /// The VIPs for which this host answers while the leases of their shards last.
    pub(crate) fn held(&self) -> &BTreeSet<IpAddr> {
        &self.held
    }

    /// Whether this host answers for any VIP.
    pub(crate) fn has_any(&self) -> bool {
        let lasting = self.leases.lasting();
        self.held.iter().any(|vip| lasting.contains(Shard::of(*vip)))
    }

    /// Whether other hosts answer for all VIPs.
    pub(crate) fn are_answered_by(&self, others_active: Shards) -> bool {
        self.count_unanswered(others_active) == 0
    }

    /// The number of VIPs that no other host answers for.
    pub(crate) fn count_unanswered(&self, others_active: Shards) -> usize {
        self.held.iter().filter(|vip| !others_active.contains(Shard::of(**vip))).count()
    }

    /// The kernel's maps serve these now. Announces the new ones. `taken`: VIPs that other machines on the link have.
    pub(crate) fn set_held(
        &mut self,
        roles: VipRoles,
        held: &BTreeSet<IpAddr>,
        taken: &BTreeMap<IpAddr, Mac>,
    ) {
        let added = held.difference(&self.held).map(|vip| (*vip, true));
        let removed = self.held.difference(held).map(|vip| (*vip, false));
        let changed = added.chain(removed).collect();
        self.change_held(roles, &changed, taken);
    }

    /// The kernel's maps serve these now, or no longer. The same for them alone.
    pub(crate) fn change_held(
        &mut self,
        roles: VipRoles,
        changed: &BTreeMap<IpAddr, bool>,
        taken: &BTreeMap<IpAddr, Mac>,
    ) {
        let (mut active, mut has_changed) = (BTreeSet::new(), false);
        for (vip, is_held) in changed {
            if *is_held {
                if self.held.insert(*vip) {
                    has_changed = true;
                    tracing::info!(%vip, "VIP written to the kernel's maps; this host answers for it while it is active for it");
                    active.extend(roles.is_active(*vip).then_some(*vip));
                }
            } else if self.held.remove(vip) {
                has_changed = true;
                if let Some(mac) = taken.get(vip) {
                    tracing::warn!(
                        %vip,
                        mac = %display_mac(*mac),
                        "VIP no longer answered for: another machine on the link has it; find that machine by its MAC address"
                    );
                } else {
                    tracing::info!(%vip, "VIP removed from the kernel's maps");
                }
            }
        }
        if has_changed {
            self.published.send_if_modified(|published| change_set(published, changed));
        }
        if !active.is_empty() {
            self.announce(active);
        }
    }

    /// Announces what is due.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.announcement_at.is_some_and(|at| at <= now) {
            self.announce_all();
        }
    }

    /// Announces the held VIPs of these shards, since the link may have learned another host's address for them.
    pub(crate) fn announce_shards(&self, shards: Shards) {
        let of_shards = self.held.iter().filter(|vip| shards.contains(Shard::of(**vip)));
        self.announce(of_shards.copied().collect());
    }

    /// Announces all held VIPs. Those of other hosts are left out when it comes to it.
    pub(crate) fn announce_all(&mut self) {
        self.announcement_at = None;
        self.announce(self.held.clone());
    }

    /// The same after this time, or what [`ServedVips::announce_pending`] ends earlier.
    pub(crate) fn announce_all_in(&mut self, wait: Duration) {
        let at = Instant::now() + wait;
        self.announcement_at = Some(self.announcement_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// The same once this host has heard the others.
    pub(crate) fn announce_all_when_heard(&mut self) {
        self.announce_all_in(self.hearing_time);
    }

    /// What waits for an announcement waits no longer.
    pub(crate) fn announce_pending(&mut self) {
        if self.announcement_at.is_some() {
            self.announce_all();
        }
    }

    /// A host that is no edge peer has claimed a VIP.
    pub(crate) fn defend(&mut self, roles: VipRoles, vip: IpAddr, mac: Mac, now: Instant) {
        let is_due = self.last_defence.is_none_or(|last| now.duration_since(last) >= DEFENCE_INTERVAL);
        if is_due && roles.is_active(vip) && self.held.contains(&vip) {
            self.last_defence = Some(now);
            tracing::warn!(
                %vip,
                mac = %display_mac(mac),
                "another host on the link announces a VIP; announcing it again; find that machine by its MAC address"
            );
            self.announce([vip].into());
        }
    }

    /// The kernel's maps hold the plan: the program forwards, also if its time had ended.
    pub(crate) fn forward(&self, membership: &Membership) {
        self.leases.forward(membership);
    }

    /// The process ends.
    pub(crate) fn leave(&self, membership: &Membership) {
        self.leases.leave(membership);
    }

    fn announce(&self, vips: BTreeSet<IpAddr>) {
        // The receiver is gone only when the process ends.
        let _ = self.announcements.send(vips);
    }
}

/// Adds those that are to be in the set, and removes the others.
pub(crate) fn change_set(set: &mut BTreeSet<IpAddr>, changed: &BTreeMap<IpAddr, bool>) -> bool {
    let mut has_changed = false;
    for (address, is_in) in changed {
        has_changed |= if *is_in { set.insert(*address) } else { set.remove(address) };
    }
    has_changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_follows_the_membership() {
        let shard = Shard::of([10, 0, 0, 1].into());
        let only = |holds| {
            if holds { [shard].into_iter().collect() } else { Shards::ALL - [shard].into_iter().collect() }
        };
        let role = |settled, active, other, is_leaving| {
            let (active, others_active) = (only(active), only(other));
            VipRoles::new(&Membership { active, others_active, settled, ..Membership::default() }, is_leaving)
                .of(shard)
        };
        assert_eq!(role(false, true, false, false), VipRole::Undecided);
        assert_eq!(role(true, true, true, false), VipRole::Active);
        assert_eq!(role(true, false, true, false), VipRole::Standby);
        assert_eq!(role(true, false, false, false), VipRole::Unanswered);
        assert_eq!(role(true, false, true, true), VipRole::Unanswered, "until the overlap is over");
    }
}

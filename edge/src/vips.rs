// SPDX-License-Identifier: Apache-2.0
//! The VIPs for which this host answers ARP and neighbour discovery: its role, and announcements.
//!
//! A VIP is no address of the interface. The kernel's program answers for those that it serves while their lease lasts, which `lease`
//! alone writes. So a takeover is one write, however many VIPs there are.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use crate::channel::send_if_changed;
use crate::link::mac::{Mac, display_mac};
use crate::link::membership::Membership;

mod lease;

pub(crate) use lease::{LeaseKeeper, VipLease};

/// The lease of all VIPs that the active host answers for.
pub(crate) const SERVED: u32 = 0;
/// A lease that never begins: of VIPs that another machine on the link has, or may have.
pub(crate) const WITHHELD: u32 = 1;

/// A VIP that another host on the link announces is announced again after at least this time.
const DEFENCE_INTERVAL: Duration = Duration::from_secs(5);

/// Whether this host should answer for the VIPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VipRole {
    /// The other hosts are not known yet: change nothing.
    Undecided,
    /// This host answers.
    Active,
    /// Another host answers.
    Standby,
    /// No host is known to answer: continue if this one does, and do not begin.
    Keeper,
}

impl VipRole {
    /// A host that is leaving keeps its VIPs for a moment after another one has become active.
    pub(crate) fn new(membership: &Membership, is_leaving: bool) -> Self {
        match (membership.settled, membership.active, membership.other_active) {
            (false, ..) => Self::Undecided,
            (true, true, _) => Self::Active,
            (true, false, true) if !is_leaving => Self::Standby,
            (true, false, _) => Self::Keeper,
        }
    }
}

/// The VIPs that the kernel's maps serve. Owned by `engine`.
#[derive(Debug)]
pub(crate) struct ServedVips {
    lease: VipLease,
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
        lease: VipLease,
        held: BTreeSet<IpAddr>,
        hearing_time: Duration,
        published: watch::Sender<BTreeSet<IpAddr>>,
        announcements: mpsc::UnboundedSender<BTreeSet<IpAddr>>,
    ) -> Self {
        // At once: a host that becomes active announces those of an earlier process.
        published.send_replace(held.clone());
        Self {
            lease,
            held,
            published,
            announcements,
            last_defence: None,
            announcement_at: None,
            hearing_time,
        }
    }

    /// The VIPs for which this host answers while the lease lasts.
    pub(crate) fn held(&self) -> &BTreeSet<IpAddr> {
        &self.held
    }

    /// Whether this host answers for any VIP.
    pub(crate) fn has_any(&self) -> bool {
        !self.held.is_empty() && self.lease.lasts()
    }

    /// The kernel's maps serve these now. Announces the new ones.
    pub(crate) fn set_held(&mut self, role: VipRole, held: BTreeSet<IpAddr>) {
        let before = std::mem::replace(&mut self.held, held);
        for vip in before.difference(&self.held) {
            tracing::info!(%vip, "VIP removed from the kernel's maps, or withheld since another machine may have it");
        }
        let added: BTreeSet<_> = self.held.difference(&before).copied().collect();
        for vip in &added {
            tracing::info!(%vip, "VIP written to the kernel's maps; this host answers for it while it is active");
        }
        send_if_changed(&self.published, self.held.clone());
        if role == VipRole::Active && !added.is_empty() {
            self.announce(added);
        }
    }

    /// Announces what is due.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.announcement_at.is_some_and(|at| at <= now) {
            self.announce_all();
        }
    }

    /// Announces all held VIPs, since the link may have learned another host's address for them.
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
    pub(crate) fn defend(&mut self, role: VipRole, vip: IpAddr, mac: Mac, now: Instant) {
        let is_due = self.last_defence.is_none_or(|last| now.duration_since(last) >= DEFENCE_INTERVAL);
        if is_due && role == VipRole::Active && self.held.contains(&vip) {
            self.last_defence = Some(now);
            tracing::warn!(%vip, mac = %display_mac(mac), "another host on the link announces a VIP; announcing it again");
            self.announce([vip].into());
        }
    }

    /// The process ends.
    pub(crate) fn leave(&self, other_active: bool) {
        self.lease.leave(other_active);
    }

    fn announce(&self, vips: BTreeSet<IpAddr>) {
        // The receiver is gone only when the process ends.
        let _ = self.announcements.send(vips);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership(settled: bool, active: bool, other_active: bool) -> Membership {
        Membership { active, other_active, settled, ..Membership::default() }
    }

    #[test]
    fn role_follows_the_membership() {
        assert_eq!(VipRole::new(&membership(false, true, false), false), VipRole::Undecided);
        assert_eq!(VipRole::new(&membership(true, true, true), false), VipRole::Active);
        assert_eq!(VipRole::new(&membership(true, false, true), false), VipRole::Standby);
        assert_eq!(VipRole::new(&membership(true, false, false), false), VipRole::Keeper);
        assert_eq!(
            VipRole::new(&membership(true, false, true), true),
            VipRole::Keeper,
            "until the overlap is over"
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The VIPs on the interface: decides which of them this host should have, and adds and removes them.
//!
//! Owned by `engine`, and the only writer of addresses but `lifetimes`. It touches only addresses with the mark of `link::route`,
//! and it removes none unless the load balancer is gone or another host has them: losing this process must not take traffic down.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_model::chain;
use steerage_watch::Backoff;
use tokio::sync::{mpsc, watch};

use crate::channel::send_if_changed;
use crate::forward::{Mac, display_mac};
use crate::link::membership::Membership;
use crate::link::route::RouteError;
use crate::metrics::Metrics;

mod lifetimes;

pub(crate) use lifetimes::{LifetimeKeeper, VipAddresses};

/// A VIP that another host on the link announces is announced again after at least this time.
const DEFENCE_INTERVAL: Duration = Duration::from_secs(5);
/// Delays before failed changes are repeated. Short: a missing VIP is missing traffic.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(4));

/// Which VIPs this host should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VipRole {
    /// The other hosts are not known yet: change nothing.
    Undecided,
    /// This host has all VIPs.
    Active,
    /// Another host has them.
    Standby,
    /// No host is known to have them: keep those that are here, and add none.
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

    fn target(self, wanted: &BTreeSet<IpAddr>, held: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        match self {
            Self::Undecided => held.clone(),
            Self::Active => wanted.clone(),
            Self::Standby => BTreeSet::new(),
            Self::Keeper => held.intersection(wanted).copied().collect(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct VipOwner {
    addresses: VipAddresses,
    metrics: Metrics,
    held: BTreeSet<IpAddr>,
    /// The VIPs of this host, for other tasks.
    published: watch::Sender<BTreeSet<IpAddr>>,
    announcements: mpsc::UnboundedSender<BTreeSet<IpAddr>>,
    last_defence: Option<Instant>,
    /// When all VIPs are announced.
    announcement_at: Option<Instant>,
    /// The last error of each VIP whose last change failed.
    failed: BTreeMap<IpAddr, String>,
    backoff: Backoff,
    /// When failed changes are repeated at the latest.
    retry_at: Option<Instant>,
}

impl VipOwner {
    pub(crate) fn new(
        addresses: VipAddresses,
        metrics: Metrics,
        published: watch::Sender<BTreeSet<IpAddr>>,
        announcements: mpsc::UnboundedSender<BTreeSet<IpAddr>>,
    ) -> Self {
        let held = BTreeSet::new();
        Self {
            addresses,
            metrics,
            held,
            published,
            announcements,
            last_defence: None,
            announcement_at: None,
            failed: BTreeMap::new(),
            backoff: RETRY,
            retry_at: None,
        }
    }

    /// The VIPs on the interface.
    pub(crate) fn held(&self) -> &BTreeSet<IpAddr> {
        &self.held
    }

    /// Takes note of the VIPs that were found on the interface; whether [`VipOwner::sync_vips`] must run again.
    pub(crate) fn observe(&mut self, found: BTreeSet<IpAddr>) -> bool {
        self.addresses.set_held(&found);
        let is_due = self.retry_at.is_some_and(|at| at <= Instant::now());
        if self.announcement_at.is_some_and(|at| at <= Instant::now()) {
            self.announce_all();
        }
        let has_changed = std::mem::replace(&mut self.held, found) != self.held;
        // At once: a host that becomes active announces those of an earlier process.
        send_if_changed(&self.published, self.held.clone());
        has_changed || is_due
    }

    /// Removes the VIPs of the interface that the role does not allow, or that are not wanted.
    pub(crate) fn remove_vips(&mut self, role: VipRole, wanted: &BTreeSet<IpAddr>) {
        let target = role.target(wanted, &self.held);
        let remove: Vec<_> = self.held.difference(&target).copied().collect();
        for vip in remove {
            match self.addresses.remove(vip) {
                Ok(()) => {
                    tracing::info!(%vip, "VIP removed from interface");
                    self.held.remove(&vip);
                }
                Err(error) => self.on_error(vip, &error, "VIP not removed; retrying"),
            }
        }
        send_if_changed(&self.published, self.held.clone());
    }

    /// Adds and removes VIPs so that the interface has those of `wanted` that the role allows.
    pub(crate) fn sync_vips(&mut self, role: VipRole, wanted: &BTreeSet<IpAddr>) {
        self.remove_vips(role, wanted);
        let target = role.target(wanted, &self.held);
        let add: Vec<_> = target.difference(&self.held).copied().collect();
        let mut added = BTreeSet::new();
        for vip in add {
            match self.addresses.add(vip) {
                Ok(()) => {
                    tracing::info!(%vip, "VIP added to interface");
                    self.held.insert(vip);
                    added.insert(vip);
                }
                Err(error) => self.on_error(vip, &error, "VIP not added; retrying"),
            }
        }
        let held = &self.held;
        self.failed.retain(|vip, _| held.contains(vip) != target.contains(vip));
        if self.failed.is_empty() {
            (self.backoff, self.retry_at) = (RETRY, None);
        } else if self.retry_at.is_none_or(|at| at <= Instant::now()) {
            self.retry_at = Some(Instant::now() + self.backoff.next_delay());
        }
        send_if_changed(&self.published, self.held.clone());
        if !added.is_empty() {
            self.announce(added);
        }
    }

    /// Gives the held VIPs the lifetime that the membership allows, unless they are very many.
    pub(crate) fn keep(&self, membership: &Membership) {
        self.addresses.keep_if_few(membership);
    }

    /// This process ends, and no other host has the VIPs: the kernel keeps them.
    pub(crate) fn keep_without_process(&self) {
        self.addresses.keep_without_process();
    }

    /// Announces all held VIPs, since the link may have learned another host's address for them.
    pub(crate) fn announce_all(&mut self) {
        self.announcement_at = None;
        self.announce(self.held.clone());
    }

    /// The same after this time, or what [`VipOwner::announce_pending`] ends earlier.
    pub(crate) fn announce_all_in(&mut self, wait: Duration) {
        let at = Instant::now() + wait;
        self.announcement_at = Some(self.announcement_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// What waits for an announcement waits no longer.
    pub(crate) fn announce_pending(&mut self) {
        if self.announcement_at.is_some() {
            self.announce_all();
        }
    }

    /// The time after which this host has heard an active one that took over while it was disconnected.
    pub(crate) fn hearing_time(&self) -> Duration {
        self.addresses.timing().timeout()
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

    fn announce(&self, vips: BTreeSet<IpAddr>) {
        // The receiver is gone only when the process ends.
        let _ = self.announcements.send(vips);
    }

    /// Logs an error when it is new: the change is retried, perhaps for hundreds of VIPs.
    fn on_error(&mut self, vip: IpAddr, error: &RouteError, message: &str) {
        self.metrics.failures.inc();
        let error = chain(error);
        if self.failed.get(&vip) != Some(&error) {
            tracing::error!(%vip, error, "{message}");
        }
        if self.failed.insert(vip, error).is_none() {
            // The delay of those that failed before is not its own.
            (self.backoff, self.retry_at) = (RETRY, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vips(numbers: &[u8]) -> BTreeSet<IpAddr> {
        numbers.iter().map(|number| IpAddr::from([10, 0, 0, *number])).collect()
    }

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

    #[test]
    fn role_decides_which_vips_are_added_and_removed() {
        let (wanted, held) = (vips(&[1, 2]), vips(&[2, 3]));
        assert_eq!(VipRole::Undecided.target(&wanted, &held), held);
        assert_eq!(VipRole::Active.target(&wanted, &held), wanted);
        assert_eq!(VipRole::Standby.target(&wanted, &held), vips(&[]));
        assert_eq!(VipRole::Keeper.target(&wanted, &held), vips(&[2]), "none is added");
    }
}

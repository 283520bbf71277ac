// SPDX-License-Identifier: Apache-2.0
//! Decides whether this host is the active one, which has the VIPs. Pure: `membership` passes heartbeats and the time.
//!
//! There is no vote and no Lease, so that takeover does not depend on the API server. Two active hosts for a moment are
//! harmless, because both forward alike; no active host is an outage. So a host that receives no heartbeat of an active one takes over. Of two
//! active hosts the one that took over last stays active, because the link has seen its announcements last.
//!
//! An active host that cannot serve yields to one that can. Where no host can, the active one stays.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::ability::Ability;
use super::damping::Damping;
use super::heartbeat::Heartbeat;
use crate::cluster::Cluster;
use crate::engine::REFRESH_INTERVAL;
use crate::link::mac::Mac;

/// A host that cannot serve yields after this time at the earliest: the engine repeats a failed write at its next refresh.
const REPAIR_TIME: Duration = REFRESH_INTERVAL.saturating_mul(2);

/// Addresses of this host that are remembered; a bond has few members.
const MAX_FORMER_MACS: usize = 16;

/// Another host, as of its last heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) host: String,
    /// The host's own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    active: bool,
    leaving: bool,
    term: u64,
    cluster: Option<u64>,
    ability: Ability,
    last: Instant,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct HeartbeatTiming {
    pub(crate) interval: Duration,
    /// A host is dead after this many missed heartbeats.
    pub(crate) misses: u32,
}

impl HeartbeatTiming {
    /// The time without heartbeats after which a host is dead.
    pub(crate) fn timeout(self) -> Duration {
        self.interval * self.misses
    }
}

#[derive(Debug)]
pub(crate) struct Election {
    name: String,
    mac: Mac,
    group: u64,
    cluster: Cluster,
    /// Addresses that this host had before.
    former_macs: Vec<Mac>,
    timing: HeartbeatTiming,
    active: bool,
    leaving: bool,
    ability: Ability,
    /// Since when this host is active and cannot serve, beside one that can.
    unable_since: Option<Instant>,
    /// Since when this host is active beside one whose targets are much healthier.
    unhealthy_since: Option<Instant>,
    damping: Damping,
    term: u64,
    /// Of all heartbeats since the start.
    highest_term: u64,
    started: Instant,
    /// Since when no other host is active.
    quiet_since: Instant,
    peers: BTreeMap<Mac, Peer>,
}

impl Election {
    /// A host that has just started listens before it takes over.
    pub(crate) fn new(name: String, mac: Mac, group: u64, timing: HeartbeatTiming, now: Instant) -> Self {
        Self {
            name,
            mac,
            group,
            cluster: Cluster::None,
            former_macs: Vec::new(),
            timing,
            active: false,
            leaving: false,
            ability: Ability::NONE,
            unable_since: None,
            unhealthy_since: None,
            damping: Damping::default(),
            term: 0,
            highest_term: 0,
            started: now,
            quiet_since: now,
            peers: BTreeMap::new(),
        }
    }

    pub(crate) fn mac(&self) -> Mac {
        self.mac
    }

    /// The interface has another address.
    pub(crate) fn set_mac(&mut self, mac: Mac) {
        if self.mac != mac && self.former_macs.len() < MAX_FORMER_MACS {
            self.former_macs.push(self.mac);
        }
        self.mac = mac;
        self.peers.remove(&mac);
    }

    /// What is known of this host's cluster has changed. Hosts of other ones are no peers.
    pub(crate) fn set_cluster(&mut self, cluster: Cluster) {
        self.cluster = cluster;
        if let Some(own) = cluster.hash() {
            self.peers.retain(|_, peer| peer.cluster.is_none_or(|other| other == own));
        }
    }

    /// Whether this host does not know yet if the active hosts are of its cluster: all of them name one. Then it must not end its
    /// lease for them.
    pub(crate) fn is_in_doubt(&self, now: Instant) -> bool {
        let mut others = self.active_peers(now).filter(|(_, peer)| peer.ability.can_serve).peekable();
        self.cluster == Cluster::Unread
            && others.peek().is_some()
            && others.all(|(_, peer)| peer.cluster.is_some())
    }

    /// Whether the sender is a host of this group that does not say to which cluster it belongs, while this one does.
    pub(crate) fn is_without_cluster(&self, beat: &Heartbeat) -> bool {
        let can_serve = beat.ability.unwrap_or(Ability::UNSTATED).can_serve;
        beat.group == self.group && self.cluster.hash().is_some() && beat.cluster.is_none() && can_serve
    }

    /// Whether the sender has this host's group, but belongs to another cluster.
    pub(crate) fn is_of_other_cluster(&self, beat: &Heartbeat) -> bool {
        beat.group == self.group
            && self.cluster.hash().zip(beat.cluster).is_some_and(|(own, other)| own != other)
    }

    pub(crate) fn is_active(&self) -> bool {
        self.active
    }

    /// All hosts since the start: a dead one may still forward packets, and its claims are no conflict.
    pub(crate) fn peers(&self) -> &BTreeMap<Mac, Peer> {
        &self.peers
    }

    /// The number of other hosts that are alive.
    pub(crate) fn live(&self, now: Instant) -> usize {
        self.peers.values().filter(|peer| self.is_alive(peer, now)).count()
    }

    /// Whether another host is active and can serve: then its VIPs are not needed here.
    pub(crate) fn other_is_active(&self, now: Instant) -> bool {
        self.active_peers(now).any(|(_, peer)| peer.ability.can_serve)
    }

    /// Whether another host could take over.
    pub(crate) fn other_can_serve(&self, now: Instant) -> bool {
        self.peers.values().any(|peer| self.is_alive(peer, now) && !peer.leaving && peer.ability.can_serve)
    }

    /// How well this host can serve now.
    pub(crate) fn set_ability(&mut self, ability: Ability) {
        self.ability = ability;
    }

    pub(crate) fn heartbeat(&self, addresses: Vec<IpAddr>) -> Heartbeat {
        Heartbeat {
            group: self.group,
            cluster: self.cluster.hash(),
            host: self.name.clone(),
            active: self.active,
            leaving: self.leaving,
            term: self.term,
            addresses,
            ability: Some(self.ability),
        }
    }

    pub(crate) fn on_heartbeat(&mut self, from: Mac, beat: Heartbeat, now: Instant) {
        // A bond can receive the frames that its members sent before its address changed.
        let is_own = from == self.mac || beat.host == self.name && self.former_macs.contains(&from);
        if beat.group != self.group || is_own {
            return;
        }
        if self.is_of_other_cluster(&beat) {
            // Its first heartbeats may have come before it knew its cluster.
            self.peers.remove(&from);
            return;
        }
        self.highest_term = self.highest_term.max(beat.term);
        let Heartbeat { cluster, host, active, leaving, term, addresses, ability, .. } = beat;
        let ability = ability.unwrap_or(Ability::UNSTATED);
        // The machine has another address now, and somebody else may have the old one.
        let timeout = self.timing.timeout();
        self.peers.retain(|_, peer| peer.host != host || now.duration_since(peer.last) < timeout);
        self.peers.insert(from, Peer { host, addresses, active, leaving, term, cluster, ability, last: now });
    }

    /// This host is about to end: it asks another one to take over, and never takes over again.
    pub(crate) fn leave(&mut self) {
        self.leaving = true;
    }

    /// Evaluates the role again. Returns whether it has changed.
    pub(crate) fn evaluate(&mut self, now: Instant) -> bool {
        let strongest_peer = self
            .active_peers(now)
            .map(|(mac, peer)| (peer.ability.can_serve, peer.term, peer.host.clone(), *mac))
            .max();
        if self.active || strongest_peer.is_some() {
            self.quiet_since = now;
        }
        let yields = self.is_worse_for_long(now);
        let next = match strongest_peer {
            Some(peer) => {
                let own = (self.ability.can_serve, self.term, self.name.clone(), self.mac);
                self.active && !self.leaving && own > peer
            }
            None if self.active => !yields,
            None if self.leaving || self.is_handed_over_by_better(now) => false,
            None => {
                now >= self.quiet_since.max(self.started + self.timing.timeout()) + self.takeover_delay(now)
            }
        };
        if next && !self.active {
            self.term = self.highest_term + 1;
            self.highest_term = self.term;
        }
        let changed = next != self.active;
        self.active = next;
        changed
    }

    /// Whether this host has been active beside a much better one for so long that it should yield.
    fn is_worse_for_long(&mut self, now: Instant) -> bool {
        let others = || self.peers.values().filter(|peer| self.is_alive(peer, now) && !peer.leaving);
        let is_unable = self.active && !self.ability.can_serve && others().any(|peer| peer.ability.can_serve);
        let is_unhealthy =
            self.active && others().any(|peer| peer.ability.is_much_healthier_than(self.ability));
        let is_unhealthy_for_long = elapsed(&mut self.unhealthy_since, is_unhealthy, now)
            .is_some_and(|since| since >= self.damping.wait(now));
        let is_without_other = self.active_peers(now).next().is_none();
        if is_unhealthy_for_long && is_without_other {
            self.damping.on_yield(now);
        }
        let patience = self.timing.timeout().max(REPAIR_TIME);
        elapsed(&mut self.unable_since, is_unable, now).is_some_and(|since| since >= patience)
            || is_unhealthy_for_long
    }

    /// Whether a host that can serve is leaving, and this one cannot: the kernel of the other one serves on without its process, as
    /// long as no host takes its VIPs.
    fn is_handed_over_by_better(&self, now: Instant) -> bool {
        let is_better = |peer: &Peer| peer.active && peer.leaving && peer.ability.can_serve;
        !self.ability.can_serve && self.peers.values().any(|peer| self.is_alive(peer, now) && is_better(peer))
    }

    /// Hosts take over one after the other, by name: the first one's heartbeats stop the others. A host that is much better goes
    /// first, and has time for that.
    fn takeover_delay(&self, now: Instant) -> Duration {
        let others = || self.peers.iter().filter(|(_, peer)| self.is_alive(peer, now) && !peer.leaving);
        let is_before = |(mac, peer): &(&Mac, &Peer)| {
            (&peer.host, *mac) < (&self.name, &self.mac) && !self.ability.is_much_better_than(peer.ability)
        };
        let is_better = |(_, peer): (&Mac, &Peer)| peer.ability.is_much_better_than(self.ability);
        let rank = u32::try_from(others().filter(is_before).count()).unwrap_or(u32::MAX).min(10);
        let for_better = if others().any(is_better) { self.timing.timeout() } else { Duration::ZERO };
        for_better + self.timing.interval * rank
    }

    fn is_alive(&self, peer: &Peer, now: Instant) -> bool {
        now.duration_since(peer.last) < self.timing.timeout()
    }

    /// The other hosts that are active and not leaving.
    fn active_peers(&self, now: Instant) -> impl Iterator<Item = (&Mac, &Peer)> {
        self.peers.iter().filter(move |(_, peer)| peer.active && !peer.leaving && self.is_alive(peer, now))
    }
}

/// For how long a condition has held; `None` if it does not hold.
fn elapsed(since: &mut Option<Instant>, holds: bool, now: Instant) -> Option<Duration> {
    *since = holds.then(|| since.unwrap_or(now));
    since.map(|since| now.duration_since(since))
}

#[cfg(test)]
mod tests;

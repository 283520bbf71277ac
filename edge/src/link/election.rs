// SPDX-License-Identifier: Apache-2.0
//! Decides for which shards of the VIPs this host is the active one. Pure: `membership` passes heartbeats and the time.
//!
//! There is no vote and no Lease, so that takeover does not depend on the API server. Two active hosts for a moment are
//! harmless, because both forward alike; no active host is an outage. So a host that receives no heartbeat of an active one takes over,
//! in the order in which hosts are preferred for the shard. Of two active hosts the one that took something over last stays active,
//! because the link has seen its announcements last.
//!
//! An active host that cannot serve yields to one that can. Where no host can, the active one stays. A shard moves to a host that is
//! preferred for it only by an offer of the active one ([`offers`]).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::ability::Ability;
use super::damping::Damping;
use super::heartbeat::{Heartbeat, HeartbeatShards};
use crate::cluster::Cluster;
use crate::engine::REFRESH_INTERVAL;
use crate::host::EdgePeer;
use crate::link::mac::Mac;
use crate::shards::{Shard, Shards};

mod offers;
mod peer;

use offers::{KnownPeer, Offers};
pub(crate) use peer::Peer;

/// A host that cannot serve yields after this time at the earliest: the engine repeats a failed write at its next refresh.
const REPAIR_TIME: Duration = REFRESH_INTERVAL.saturating_mul(2);

/// A dead host is forgotten this long after its last heartbeat: for so long its kernel keeps idle TCP flows (`TCP_IDLE`).
const FORGOTTEN_AFTER: Duration = Duration::from_hours(1);
/// Other hosts that are known. Any machine on the link can send heartbeats from any address.
const MAX_PEERS: usize = 256;

/// Addresses of this host that are remembered; a bond has few members.
const MAX_FORMER_MACS: usize = 16;

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

/// How a host is worse than another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Worse {
    Unable,
    Unhealthy,
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
    active: Shards,
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
    /// The time of the last evaluation.
    evaluated: Instant,
    /// Since when no host is active for each shard; `None` while one is.
    quiet_since: [Option<Instant>; Shard::COUNT],
    peers: BTreeMap<Mac, Peer>,
    /// The hosts that know this host's flows.
    informed: BTreeSet<Mac>,
    offers: Offers,
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
            active: Shards::NONE,
            leaving: false,
            ability: Ability::NONE,
            unable_since: None,
            unhealthy_since: None,
            damping: Damping::default(),
            term: 0,
            highest_term: 0,
            started: now,
            evaluated: now,
            quiet_since: [Some(now); Shard::COUNT],
            peers: BTreeMap::new(),
            informed: BTreeSet::new(),
            offers: Offers::default(),
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
        let is_active = |peer: &Peer| !peer.kept_shards().is_empty() && peer.ability.can_serve;
        let mut others = self.live_peers(now).filter(|(_, peer)| is_active(peer)).peekable();
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

    /// The shards for which this host is active.
    pub(crate) fn active(&self) -> Shards {
        self.active
    }

    /// These hosts know the flows of this host whose slots have moved, so that they can take shards without loss.
    pub(crate) fn set_informed(&mut self, hosts: BTreeSet<Mac>) {
        self.informed = hosts;
    }

    /// All known hosts: a dead one may still forward packets, and its claims are no conflict.
    pub(crate) fn peers(&self, now: Instant) -> Vec<EdgePeer> {
        let timeout = self.timing.timeout();
        let peer = |(mac, peer): (&Mac, &Peer)| EdgePeer {
            mac: *mac,
            addresses: peer.addresses.clone(),
            liveness: peer.liveness(now, timeout),
        };
        self.peers.iter().map(peer).collect()
    }

    /// The number of other hosts that are alive.
    pub(crate) fn live(&self, now: Instant) -> usize {
        self.live_peers(now).count()
    }

    /// When the next host is found dead, if it stays silent.
    pub(crate) fn next_death(&self, now: Instant) -> Option<Instant> {
        self.live_peers(now).map(|(_, peer)| peer.last + self.timing.timeout()).min()
    }

    /// The shards for which another host is active that can serve: their VIPs are not needed here.
    pub(crate) fn others_active(&self, now: Instant) -> Shards {
        let able = self.live_peers(now).filter(|(_, peer)| peer.ability.can_serve);
        able.fold(Shards::NONE, |shards, (_, peer)| shards | peer.kept_shards())
    }

    /// Whether another host could take over.
    pub(crate) fn other_can_serve(&self, now: Instant) -> bool {
        self.live_peers(now).any(|(_, peer)| !peer.leaving && peer.ability.can_serve)
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
            active: !self.active.is_empty(),
            shards: Some(HeartbeatShards { active: self.active, offered: self.offers.current() }),
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
        // The machine has another address now, and somebody else may have the old one.
        let timeout = self.timing.timeout();
        self.peers.retain(|_, peer| peer.host != beat.host || peer.is_alive(now, timeout));
        let first = self.peers.get(&from).map_or(now, |peer| peer.first);
        self.peers.insert(from, Peer { first, ..Peer::new(beat, now) });
        if self.peers.len() > MAX_PEERS {
            // A dead one first, then one that answers for nothing: at most one host for each shard does. Else the one that has been
            // known for the shortest time.
            let standing = |peer: &Peer| {
                let has_shards = !peer.active.is_empty();
                (peer.is_alive(now, timeout), has_shards, peer.last.duration_since(peer.first), peer.last)
            };
            let lowest = self.peers.iter().min_by_key(|(_, peer)| standing(peer)).map(|(mac, _)| *mac);
            if let Some(mac) = lowest {
                self.peers.remove(&mac);
            }
        }
    }

    /// This host is about to end: it asks another one to take over, and never takes over again.
    pub(crate) fn leave(&mut self) {
        self.leaving = true;
    }

    /// Evaluates the roles again, once in each interval at least. Returns whether one has changed, or an offer.
    pub(crate) fn evaluate(&mut self, now: Instant) -> bool {
        self.skip_pause(now);
        self.peers.retain(|_, peer| peer.is_alive(now, FORGOTTEN_AFTER));
        let before = (self.active, self.offers.current());
        let worse = self.is_worse_for_long(now);
        let next = self.next_active(worse.is_some(), now);
        if worse == Some(Worse::Unhealthy) && !(self.active - next).is_empty() {
            self.damping.on_failure(now);
        }
        if !(next - self.active).is_empty() {
            // A forged heartbeat may have the highest term. Of hosts that all have it, the name decides.
            self.term = self.highest_term.saturating_add(1);
            self.highest_term = self.term;
        }
        self.active = next;
        self.update_offers(now);
        before != (self.active, self.offers.current())
    }

    /// Whether this host has listened for long enough to hear all others. Time in which the process did not run does not count.
    pub(crate) fn has_listened(&self) -> bool {
        self.evaluated >= self.started + self.timing.timeout()
    }

    /// A process that did not run, for want of a processor or because it was stopped, has received no heartbeat: that says nothing of
    /// the others, whose heartbeats may still be in the socket's queue. So this time counts for no silence.
    fn skip_pause(&mut self, now: Instant) {
        let pause = now.saturating_duration_since(self.evaluated).saturating_sub(self.timing.interval);
        self.evaluated = now;
        if pause.is_zero() {
            return;
        }
        let skip = |time: &mut Instant| *time = (*time + pause).min(now);
        skip(&mut self.started);
        self.quiet_since.iter_mut().flatten().for_each(skip);
        self.peers.values_mut().for_each(|peer| skip(&mut peer.last));
    }

    /// `yields`: this host gives up its shards for better ones.
    fn next_active(&mut self, yields: bool, now: Instant) -> Shards {
        let own = (self.ability.can_serve, self.term, self.name.as_str(), self.mac);
        let claims: Vec<_> = self
            .live_peers(now)
            .map(|(mac, peer)| {
                (peer.kept_shards(), (peer.ability.can_serve, peer.term, peer.host.as_str(), *mac))
            })
            .collect();
        let mut quiet_since = self.quiet_since;
        let mut is_next = |shard: &Shard| {
            let is_active = self.active.contains(*shard);
            let of_shard = claims.iter().filter(|(shards, _)| shards.contains(*shard));
            let strongest = of_shard.map(|(_, strength)| *strength).max();
            let is_quiet = !is_active && strongest.is_none();
            let quiet = &mut quiet_since[shard.index()];
            *quiet = is_quiet.then(|| quiet.unwrap_or(now));
            match strongest {
                Some(peer) => is_active && !self.is_given_away(*shard) && own > peer,
                None if is_active => !yields,
                None if self.leaving || self.is_handed_over_by_better(*shard, now) => false,
                None => {
                    let listened = self.started + self.timing.timeout();
                    now >= quiet.unwrap_or(now).max(listened) + self.takeover_delay(*shard, now)
                }
            }
        };
        let next = Shard::all().filter(&mut is_next).collect();
        self.quiet_since = quiet_since;
        next
    }

    /// Whether this host answers for the shard only until another one does.
    fn is_given_away(&self, shard: Shard) -> bool {
        self.leaving || self.offers.current().contains(shard)
    }

    fn update_offers(&mut self, now: Instant) {
        let may_offer = !self.leaving && self.ability.can_serve;
        let own = may_offer.then_some((self.name.as_str(), self.ability, self.active));
        let timeout = self.timing.timeout();
        let peers = self.peers.iter().map(|(mac, peer)| KnownPeer {
            peer,
            is_alive: peer.is_alive(now, timeout),
            knows_flows: self.informed.contains(mac),
        });
        self.offers.update(own, peers, now);
    }

    /// Why this host, which has been active beside a much better one for long, should yield.
    fn is_worse_for_long(&mut self, now: Instant) -> Option<Worse> {
        let is_active = !self.active.is_empty();
        let others = || self.live_peers(now).map(|(_, peer)| peer).filter(|peer| !peer.leaving);
        let is_unable = is_active && !self.ability.can_serve && others().any(|peer| peer.ability.can_serve);
        let is_unhealthy =
            is_active && others().any(|peer| peer.ability.is_much_healthier_than(self.ability));
        let is_unhealthy_for_long = elapsed(&mut self.unhealthy_since, is_unhealthy, now)
            .is_some_and(|since| since >= self.damping.wait(now));
        let patience = self.timing.timeout().max(REPAIR_TIME);
        let is_unable_for_long =
            elapsed(&mut self.unable_since, is_unable, now).is_some_and(|since| since >= patience);
        let unhealthy = is_unhealthy_for_long.then_some(Worse::Unhealthy);
        unhealthy.or(is_unable_for_long.then_some(Worse::Unable))
    }

    /// Whether a host that can serve gives the shard away, and this one cannot: the kernel of the other one serves on without its
    /// process, as long as no host takes its VIPs.
    fn is_handed_over_by_better(&self, shard: Shard, now: Instant) -> bool {
        let is_better = |peer: &Peer| peer.given_shards().contains(shard) && peer.ability.can_serve;
        !self.ability.can_serve && self.live_peers(now).any(|(_, peer)| is_better(peer))
    }

    /// Hosts take over one after the other, as they are preferred for the shard: the first one's heartbeats stop the others. A host
    /// that is much better goes first, and has time for that.
    fn takeover_delay(&self, shard: Shard, now: Instant) -> Duration {
        // Nobody takes a shard from a host that gives it away to that host.
        let others = || {
            let live = self.live_peers(now);
            live.filter(|(_, peer)| !peer.leaving && !peer.offered.contains(shard))
        };
        let own = (shard.preference(&self.name), self.mac);
        let is_before = |(mac, peer): &(&Mac, &Peer)| {
            (shard.preference(&peer.host), **mac) > own && !self.ability.is_much_better_than(peer.ability)
        };
        let is_better = |(_, peer): (&Mac, &Peer)| peer.ability.is_much_better_than(self.ability);
        let rank = u32::try_from(others().filter(is_before).count()).unwrap_or(u32::MAX).min(10);
        let for_better = if others().any(is_better) { self.timing.timeout() } else { Duration::ZERO };
        for_better + self.timing.interval * rank
    }

    /// The other hosts that are alive.
    fn live_peers(&self, now: Instant) -> impl Iterator<Item = (&Mac, &Peer)> {
        let timeout = self.timing.timeout();
        self.peers.iter().filter(move |(_, peer)| peer.is_alive(now, timeout))
    }
}

/// For how long a condition has held; `None` if it does not hold.
fn elapsed(since: &mut Option<Instant>, holds: bool, now: Instant) -> Option<Duration> {
    *since = holds.then(|| since.unwrap_or(now));
    since.map(|since| now.duration_since(since))
}

#[cfg(test)]
mod tests;

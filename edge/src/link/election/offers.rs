// SPDX-License-Identifier: Apache-2.0
//! Which shards an active host offers to hosts that are preferred for them, so that VIPs spread again after a host has joined or
//! returned. Pure; `election` asks.
//!
//! An offer names no host: the most preferred one takes the shard, or the next one if that is silent. So a shard is offered only if the
//! most preferred host is one that should have it.
//!
//! Only a host that knows this host's flows gets an offer: else connections whose slots have moved would break. A host that fails again
//! and again waits longer each time. Shards move in batches, so that a host that serves badly is noticed before it has all of its share.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Peer;
use crate::link::ability::Ability;
use crate::link::damping::Damping;
use crate::shards::{Shard, Shards};

/// Shards that are offered at once.
const BATCH: usize = 16;
/// The time between two batches.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// An offer ends after this time, and the next one comes so much later.
const OFFER_TIME: Duration = Duration::from_secs(3);
const AFTER_REFUSAL: Duration = Duration::from_secs(30);

/// For how long another host has been able to serve.
#[derive(Debug, Default)]
struct Standing {
    able_since: Option<Instant>,
    damping: Damping,
}

/// Another host, as offers need to know it.
#[derive(Clone, Copy)]
pub(super) struct KnownPeer<'a> {
    pub(super) peer: &'a Peer,
    pub(super) is_alive: bool,
    /// Whether it has this host's flow exceptions.
    pub(super) knows_flows: bool,
}

#[derive(Debug, Default)]
pub(super) struct Offers {
    current: Shards,
    since: Option<Instant>,
    not_before: Option<Instant>,
    /// By name of the host.
    standings: BTreeMap<String, Standing>,
}

impl Offers {
    pub(super) fn current(&self) -> Shards {
        self.current
    }

    /// `peers`: all that were heard since the start; `own`: this host's name, its ability and its shards, `None` if it has nothing to
    /// offer: it is leaving, or cannot serve.
    pub(super) fn update<'a>(
        &mut self,
        own: Option<(&str, Ability, Shards)>,
        peers: impl Iterator<Item = KnownPeer<'a>> + Clone,
        now: Instant,
    ) {
        self.standings.retain(|host, _| peers.clone().any(|known| known.peer.host == *host));
        for KnownPeer { peer, is_alive, .. } in peers.clone() {
            self.note(peer, is_alive, now);
        }
        let Some((name, ability, active)) = own else {
            self.current = Shards::NONE;
            return;
        };
        let is_eligible = |known: &KnownPeer<'_>| {
            known.knows_flows
                && self.is_settled(known.peer, now)
                && !ability.is_much_healthier_than(known.peer.ability)
        };
        let takers = peers.filter(|known| known.is_alive && may_take(known.peer));
        let takers: Vec<_> = takers.map(|known| (known.peer.host.as_str(), is_eligible(&known))).collect();
        let is_preferred_elsewhere = |shard: &Shard| {
            let preference = |host| (shard.preference(host), host);
            let first = takers.iter().max_by_key(|(host, _)| preference(host));
            first.is_some_and(|(host, is_eligible)| *is_eligible && preference(host) > preference(name))
        };
        let wanted = || active.iter().filter(is_preferred_elsewhere);
        let current = self.current & wanted().collect();
        let is_refused = self.since.is_some_and(|since| now.duration_since(since) >= OFFER_TIME);
        match (self.current.is_empty(), current.is_empty()) {
            (false, true) => self.not_before = Some(now + BATCH_INTERVAL),
            (false, false) if is_refused => self.not_before = Some(now + AFTER_REFUSAL),
            (false, false) => {
                self.current = current;
                return;
            }
            (true, _) => {}
        }
        self.current = Shards::NONE;
        if self.not_before.is_none_or(|not_before| now >= not_before) {
            self.current = wanted().take(BATCH).collect();
            self.since = Some(now);
        }
    }

    fn note(&mut self, peer: &Peer, is_alive: bool, now: Instant) {
        let standing = self.standings.entry(peer.host.clone()).or_default();
        if is_alive && may_take(peer) {
            standing.able_since.get_or_insert(now);
        } else if standing.able_since.take().is_some() && !peer.leaving {
            standing.damping.on_failure(now);
        }
    }

    /// Whether the host has been able to serve for long enough.
    fn is_settled(&self, peer: &Peer, now: Instant) -> bool {
        self.standings.get(&peer.host).is_some_and(|standing| {
            let wait = standing.damping.wait(now);
            standing.able_since.is_some_and(|since| now.duration_since(since) >= wait)
        })
    }
}

/// Whether the host would take a shard that is offered, if it is alive.
fn may_take(peer: &Peer) -> bool {
    peer.ability.can_serve && !peer.leaving && !peer.is_undivided
}

// SPDX-License-Identifier: Apache-2.0
//! What other hosts with routes have told of flows. Pure, owned by `exchange`, on a host with routes.
//!
//! Routers decide which host gets a flow's packets, and may decide again at any time. So of two hosts that say different things of a
//! flow, the one that has seen a packet last is right, whoever answers for the VIP. A host tells the exceptions of which it has seen a
//! packet since another one told them, and says so where it knows better than the host that told. What it has only been told it passes
//! on once the host that told is gone, to hosts that have come since.
//!
//! What was told is repeated with each complete list. If its host is connected and does not repeat it, it ends. A host that is gone
//! cannot end what it told: its flows are those that routers move.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use steerage_edge_dataplane::Pinned;
use steerage_edge_dataplane::packet::V6;
use steerage_edge_dataplane::packet::maps::{FlowKey, TOUCH};

use super::confirmed::{SessionId, is_later};
use crate::link::mac::Mac;

/// Times of flows that two hosts have seen differ by less for no reason: the program writes one every [`TOUCH`], and messages take time.
const UNSURE: u32 = 2 * TOUCH;
/// So many complete lists without a flow end it: of two hosts that tell it, one may stop before the other begins.
const MISSING_LISTS: u32 = 2;

#[derive(Debug)]
pub(crate) struct RoutedFlows {
    flows: HashMap<FlowKey<V6>, Told>,
    /// Hosts that are connected.
    hosts: HashMap<SessionId, Mac>,
    /// What is not told again within this time ends.
    lifetime: Duration,
}

#[derive(Debug)]
struct Told {
    by: Mac,
    /// The time that this host wrote into the flow then. Only this host's own program writes later ones.
    seen: u32,
    at: Instant,
}

/// A flow that another host tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToldFlow<'a> {
    pub(crate) key: &'a FlowKey<V6>,
    /// When that host saw a packet, in this host's time of flows.
    pub(crate) seen: u32,
    /// The target's number here.
    pub(crate) target: Option<u32>,
}

/// What follows from what another host tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// This host does not know the flow.
    New,
    /// The other host has seen a later packet.
    Replaces,
    Refused,
    /// This host has seen a later packet of the flow, or was told of one, which has another target: the other host does not know.
    Outdated,
}

/// What a look at all told flows has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RoutedChanges {
    /// Packets of these come to this host now.
    pub(crate) used: Vec<(FlowKey<V6>, Pinned)>,
    /// These were not told again, and this host has seen no packet of them.
    pub(crate) ended: Vec<FlowKey<V6>>,
}

impl RoutedFlows {
    /// `list_interval`: how often each host repeats what it tells.
    pub(crate) fn new(list_interval: Duration) -> Self {
        let lifetime = list_interval * (MISSING_LISTS + 1);
        Self { flows: HashMap::new(), hosts: HashMap::new(), lifetime }
    }

    pub(crate) fn len(&self) -> usize {
        self.flows.len()
    }

    pub(crate) fn contains(&self, key: &FlowKey<V6>) -> bool {
        self.flows.contains_key(key)
    }

    /// Sessions of one host have the same address.
    pub(crate) fn begin_session(&mut self, session: SessionId, host: Mac) {
        self.hosts.insert(session, host);
    }

    pub(crate) fn end_session(&mut self, session: SessionId) {
        self.hosts.remove(&session);
    }

    /// Whether another host, which is connected, tells this flow, and this host has seen no packet of it since. `seen`: the flow's time.
    pub(crate) fn is_told_by_other(&self, key: &FlowKey<V6>, seen: u32) -> bool {
        let is_connected = |host: Mac| self.hosts.values().any(|connected| *connected == host);
        self.flows.get(key).is_some_and(|told| !is_later(seen, told.seen) && is_connected(told.by))
    }

    /// `own`: what this host's program remembers of the flow, if it would still use it.
    pub(crate) fn judge(&self, session: SessionId, told: ToldFlow<'_>, own: Option<Pinned>) -> Judgement {
        let Some(own) = own else { return Judgement::New };
        let before = self.flows.get(told.key).filter(|before| !is_later(own.seen, before.seen));
        let is_of_same_host = before.is_some_and(|before| self.hosts.get(&session) == Some(&before.by));
        // Two hosts that have a flow from a third one, which is gone, must not both leave it to the other.
        let known = before.map_or(own.seen, |before| before.seen);
        if is_of_same_host || is_later(told.seen, known.wrapping_add(UNSURE)) {
            return Judgement::Replaces;
        }
        let is_other_target = told.target.is_some_and(|target| target != own.target);
        if is_other_target && own.is_established && is_later(own.seen, told.seen.wrapping_add(UNSURE)) {
            Judgement::Outdated
        } else {
            Judgement::Refused
        }
    }

    /// The flow was written with the time `seen`, because the host of this session has told so. A flow keeps a later time, which must
    /// not look like that of a packet that came here.
    pub(crate) fn note(&mut self, session: SessionId, key: FlowKey<V6>, seen: u32, now: Instant) {
        let Some(by) = self.hosts.get(&session).copied() else { return };
        let before = self.flows.get(&key).map(|told| told.seen).filter(|before| is_later(*before, seen));
        self.flows.insert(key, Told { by, seen: before.unwrap_or(seen), at: now });
    }

    /// Looks at each told flow. `look`: what this host's program remembers of it.
    pub(crate) fn recheck(
        &mut self,
        now: Instant,
        mut look: impl FnMut(&FlowKey<V6>) -> Option<Pinned>,
    ) -> RoutedChanges {
        let connected: HashSet<Mac> = self.hosts.values().copied().collect();
        let mut changes = RoutedChanges::default();
        self.flows.retain(|key, told| {
            let Some(own) = look(key) else { return false };
            if is_later(own.seen, told.seen) {
                if own.is_established {
                    changes.used.push((*key, own));
                }
                return !own.is_established;
            }
            let is_ended =
                connected.contains(&told.by) && now.saturating_duration_since(told.at) >= self.lifetime;
            if is_ended {
                changes.ended.push(*key);
            }
            !is_ended
        });
        if self.flows.len() < self.flows.capacity() / 8 {
            self.flows.shrink_to_fit();
        }
        changes
    }

    /// This host does not have these VIPs any more.
    pub(crate) fn remove_vips(&mut self, is_gone: impl Fn(V6) -> bool) {
        self.flows.retain(|key, _| !is_gone(key.vip));
    }
}

#[cfg(test)]
impl RoutedFlows {
    /// As if all had been told so much earlier.
    pub(crate) fn make_older(&mut self, time: Duration) {
        for told in self.flows.values_mut() {
            told.at = told.at.checked_sub(time).expect("the machine has run for longer");
        }
    }
}

#[cfg(test)]
mod tests;

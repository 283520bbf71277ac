// SPDX-License-Identifier: Apache-2.0
//! Which host answers for the virtual addresses: at most one in the long run, and soon another when it is gone. Pure: it is told
//! the time, what is heard, and when to look; `peers` does the talking.
//!
//! No vote and no Lease, so that the API server is not in the way. Two active hosts for a moment are harmless, since both forward
//! alike; nobody active is an outage. So whoever hears no active host takes over, and of two the one that took over last stays:
//! its announcements are the last that the link has heard.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::heartbeat::Heartbeat;
use crate::forward::Mac;

/// A host that was heard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its name.
    pub(crate) host: String,
    /// Its own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    active: bool,
    leaving: bool,
    term: u64,
    last: Instant,
}

/// How often hosts speak, and how many beats may be missed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeartbeatTiming {
    /// Time from one beat to the next.
    pub(crate) interval: Duration,
    /// A host is gone when so many beats did not come.
    pub(crate) misses: u32,
}

impl HeartbeatTiming {
    fn timeout(self) -> Duration {
        self.interval * self.misses
    }
}

/// What one host knows of the others, and what it makes of it.
#[derive(Debug)]
pub(crate) struct Election {
    me: String,
    mac: Mac,
    group: u64,
    timing: HeartbeatTiming,
    active: bool,
    leaving: bool,
    term: u64,
    /// The highest term ever heard.
    highest: u64,
    started: Instant,
    /// Since when no active host is heard.
    quiet_since: Instant,
    peers: BTreeMap<Mac, Peer>,
}

impl Election {
    /// A host that has just started: it listens before it takes anything.
    pub(crate) fn new(me: String, mac: Mac, group: u64, timing: HeartbeatTiming, now: Instant) -> Self {
        Self {
            me,
            mac,
            group,
            timing,
            active: false,
            leaving: false,
            term: 0,
            highest: 0,
            started: now,
            quiet_since: now,
            peers: BTreeMap::new(),
        }
    }

    /// Whether this host is the active one.
    pub(crate) fn is_active(&self) -> bool {
        self.active
    }

    /// Everybody ever heard: a host that has died may still forward, and must not be taken for a stranger.
    pub(crate) fn peers(&self) -> &BTreeMap<Mac, Peer> {
        &self.peers
    }

    /// How many hosts are heard now.
    pub(crate) fn live(&self, now: Instant) -> usize {
        self.peers.values().filter(|peer| self.is_alive(peer, now)).count()
    }

    /// Whether some other host is active now.
    pub(crate) fn other_is_active(&self, now: Instant) -> bool {
        self.active_peers(now).next().is_some()
    }

    /// What to say now.
    pub(crate) fn heartbeat(&self, addresses: Vec<IpAddr>) -> Heartbeat {
        Heartbeat {
            group: self.group,
            host: self.me.clone(),
            active: self.active,
            leaving: self.leaving,
            term: self.term,
            addresses,
        }
    }

    /// A beat was heard.
    pub(crate) fn on_heartbeat(&mut self, from: Mac, beat: Heartbeat, now: Instant) {
        if beat.group != self.group || from == self.mac {
            return;
        }
        self.highest = self.highest.max(beat.term);
        let Heartbeat { host, active, leaving, term, addresses, .. } = beat;
        self.peers.insert(from, Peer { host, addresses, active, leaving, term, last: now });
    }

    /// This host is about to end: it asks for a successor, and takes nothing any more.
    pub(crate) fn leave(&mut self) {
        self.leaving = true;
    }

    /// Looks at what was heard. Returns whether this host's role has changed.
    pub(crate) fn evaluate(&mut self, now: Instant) -> bool {
        let strongest = self.active_peers(now).map(|(mac, peer)| (peer.term, peer.host.clone(), *mac)).max();
        if strongest.is_some() {
            self.quiet_since = now;
        }
        let next = match strongest {
            Some(rival) => self.active && !self.leaving && (self.term, self.me.clone(), self.mac) > rival,
            None if self.active => true,
            None if self.leaving => false,
            None => {
                now >= self.quiet_since.max(self.started + self.timing.timeout()) + self.takeover_delay(now)
            }
        };
        if next && !self.active {
            self.term = self.highest + 1;
            self.highest = self.term;
        }
        let changed = next != self.active;
        self.active = next;
        changed
    }

    /// How long to wait in silence, that those who could take over do so one after the other, by name.
    fn takeover_delay(&self, now: Instant) -> Duration {
        let before_me = |(mac, peer): &(&Mac, &Peer)| {
            self.is_alive(peer, now) && !peer.leaving && (&peer.host, *mac) < (&self.me, &self.mac)
        };
        let rank = u32::try_from(self.peers.iter().filter(before_me).count()).unwrap_or(u32::MAX).min(10);
        self.timing.interval * rank
    }

    fn is_alive(&self, peer: &Peer, now: Instant) -> bool {
        now.duration_since(peer.last) < self.timing.timeout()
    }

    /// The hosts that are active and mean to stay.
    fn active_peers(&self, now: Instant) -> impl Iterator<Item = (&Mac, &Peer)> {
        self.peers.iter().filter(move |(_, peer)| peer.active && !peer.leaving && self.is_alive(peer, now))
    }
}

#[cfg(test)]
mod tests;

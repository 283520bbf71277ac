// SPDX-License-Identifier: Apache-2.0
//! What this host knows of another one. Pure; `election` has one for each.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::host::PeerLiveness;
use crate::link::ability::Ability;
use crate::link::heartbeat::Heartbeat;
use crate::shards::Shards;

/// A host that was heard within this time may return: what depends on its absence waits for so long.
const RECENT: Duration = Duration::from_mins(1);

/// Another host, as of its last heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) host: String,
    /// The host's own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    /// The shards that it answers for.
    pub(super) active: Shards,
    /// Those of them that it wants others to take.
    pub(super) offered: Shards,
    pub(super) leaving: bool,
    pub(super) term: u64,
    pub(super) cluster: Option<u64>,
    pub(super) ability: Ability,
    /// Whether it is of an earlier version, which has all VIPs or none.
    pub(super) is_undivided: bool,
    /// When it was heard first and last.
    pub(super) first: Instant,
    pub(super) last: Instant,
}

impl Peer {
    pub(super) fn new(beat: Heartbeat, now: Instant) -> Self {
        let Heartbeat { host, addresses, active, shards, leaving, term, cluster, ability, .. } = beat;
        let is_undivided = shards.is_none();
        let undivided = if active { Shards::ALL } else { Shards::NONE };
        let (active, offered) =
            shards.map_or((undivided, Shards::NONE), |shards| (shards.active, shards.offered));
        let ability = ability.unwrap_or(Ability::UNSTATED);
        Self {
            host,
            addresses,
            active,
            offered,
            leaving,
            term,
            cluster,
            ability,
            is_undivided,
            first: now,
            last: now,
        }
    }

    /// Whether it was heard within this time.
    pub(super) fn is_alive(&self, now: Instant, timeout: Duration) -> bool {
        now.duration_since(self.last) < timeout
    }

    /// `timeout`: the time without heartbeats after which it is dead.
    pub(super) fn liveness(&self, now: Instant, timeout: Duration) -> PeerLiveness {
        if self.is_alive(now, timeout) {
            PeerLiveness::Live
        } else if self.is_alive(now, RECENT) {
            PeerLiveness::Recent
        } else {
            PeerLiveness::Dead
        }
    }

    /// The shards that it answers for and keeps.
    pub(super) fn kept_shards(&self) -> Shards {
        if self.leaving { Shards::NONE } else { self.active - self.offered }
    }

    /// The shards that it answers for until another host does.
    pub(super) fn given_shards(&self) -> Shards {
        if self.leaving { self.active } else { self.active & self.offered }
    }
}

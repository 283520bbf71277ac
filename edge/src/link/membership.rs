// SPDX-License-Identifier: Apache-2.0
//! The task that exchanges heartbeats with the other edge hosts, and passes the engine which hosts are there and which is active.
//!
//! It waits for nothing else, so that a slow kernel or API server never makes this host look dead.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::ability::AbilityReport;
use super::election::{Election, HeartbeatTiming};
use super::heartbeat;
use super::packet::PacketSocket;
use super::sending::Sending;
use crate::cluster::Cluster;
use crate::host::EdgePeer;
use crate::link::mac::{Mac, display_mac};
use crate::metrics::Metrics;
use crate::shards::{Shard, Shards};
use crate::timer::sleep_until;

/// Sending has recovered after this many heartbeats in a row: a full queue drops some of them.
const RECOVERED: u32 = 50;
/// Limit of logged MAC addresses of hosts that are misconfigured: any machine on the link can send such heartbeats.
const MAX_LOGGED: usize = 16;

/// The edge hosts on the link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Membership {
    /// The shards for which this host is active.
    pub(crate) active: Shards,
    /// The shards for which another host is active that can serve.
    pub(crate) others_active: Shards,
    /// Whether another host could take over.
    pub(crate) has_standby: bool,
    /// Whether this host has listened for long enough to know the others, and knows that they are of its cluster.
    pub(crate) settled: bool,
    /// How often another active host has gone away or stepped down. Each time the VIPs must be announced again.
    pub(crate) departures: Departures,
    /// The number of other hosts that are alive.
    pub(crate) live: usize,
    /// All other hosts that are known: one that is dead may still forward packets.
    pub(crate) peers: Vec<EdgePeer>,
    /// Until when the roles hold unless this host sends another heartbeat; `None` if others may have taken over. Wakes nobody up.
    pub(crate) roles_hold_until: Option<Instant>,
}

impl Membership {
    /// Whether no other host can have taken over unnoticed. After a time in which the process did not run, its other tasks may run
    /// before the one that listens.
    pub(crate) fn roles_hold(&self, now: Instant) -> bool {
        self.roles_hold_until.is_some_and(|until| now < until)
    }
}

/// Counts for each shard how often another host has ceased to be active for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Departures([u64; Shard::COUNT]);

impl Default for Departures {
    fn default() -> Self {
        Self([0; Shard::COUNT])
    }
}

impl Departures {
    fn count(&mut self, shards: Shards) {
        for shard in shards.iter() {
            self.0[shard.index()] += 1;
        }
    }

    /// The shards that another host has left since then.
    pub(crate) fn since(&self, before: &Self) -> Shards {
        Shard::all().filter(|shard| self.0[shard.index()] != before.0[shard.index()]).collect()
    }
}

/// This host among the edge hosts.
#[derive(Clone, Debug)]
pub(crate) struct LocalHost {
    /// The interface's.
    pub(crate) index: u32,
    pub(crate) mac: watch::Receiver<Mac>,
    pub(crate) name: String,
    pub(crate) group: u64,
    pub(crate) cluster: watch::Receiver<Cluster>,
    /// Whether the API server does not answer this host.
    pub(crate) lost_contact: watch::Receiver<bool>,
    pub(crate) timing: HeartbeatTiming,
}

#[derive(Debug)]
pub(crate) struct HeartbeatLoop {
    socket: PacketSocket,
    local: LocalHost,
    election: Election,
    sending: Sending,
    addresses: watch::Receiver<Vec<IpAddr>>,
    leaving: watch::Receiver<bool>,
    abilities: watch::Receiver<AbilityReport>,
    informed: watch::Receiver<BTreeSet<Mac>>,
    metrics: Metrics,
    membership: watch::Sender<Membership>,
    /// Why this host cannot serve.
    problem: Option<&'static str>,
    /// Other hosts with this host's name.
    duplicate_names: BTreeSet<Mac>,
    /// This host's own address, if another host has it too.
    same_mac: BTreeSet<Mac>,
    /// Hosts of other clusters with this host's group.
    of_other_clusters: BTreeSet<Mac>,
    /// Hosts with this host's group that do not say to which cluster they belong.
    without_cluster: BTreeSet<Mac>,
    /// After a heartbeat that was not sent, the number sent in a row since then, until sending has recovered.
    sent_since_failure: Option<u32>,
    /// Whether the last attempt to receive failed.
    is_receive_failing: bool,
}

impl HeartbeatLoop {
    /// `addresses`: the host's own, for the heartbeats; `leaving` turns true when the host is about to end; `abilities` are the
    /// engine's; `informed`: the hosts that know this host's flows.
    pub(crate) fn open(
        local: LocalHost,
        addresses: watch::Receiver<Vec<IpAddr>>,
        leaving: watch::Receiver<bool>,
        abilities: watch::Receiver<AbilityReport>,
        informed: watch::Receiver<BTreeSet<Mac>>,
        metrics: Metrics,
    ) -> io::Result<(Self, watch::Receiver<Membership>)> {
        let socket = PacketSocket::open(local.index, heartbeat::ETHERTYPE)?;
        socket.join(local.index, heartbeat::GROUP)?;
        let (membership, membership_rx) = watch::channel(Membership::default());
        let started = Instant::now();
        let LocalHost { name, group, timing, .. } = local.clone();
        let mac = *local.mac.borrow();
        let mut election = Election::new(name, mac, group, timing, started);
        election.set_cluster(*local.cluster.borrow());
        let host = Self {
            socket,
            local,
            election,
            sending: Sending::new(timing.timeout(), started),
            addresses,
            leaving,
            abilities,
            informed,
            metrics,
            membership,
            problem: None,
            duplicate_names: BTreeSet::new(),
            same_mac: BTreeSet::new(),
            of_other_clusters: BTreeSet::new(),
            without_cluster: BTreeSet::new(),
            sent_since_failure: None,
            is_receive_failing: false,
        };
        Ok((host, membership_rx))
    }

    /// Runs until the receivers are gone.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let mut ticks = tokio::time::interval(self.local.timing.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let (mut leaving, mut mac, mut cluster) =
            (self.leaving.clone(), self.local.mac.clone(), self.local.cluster.clone());
        while !self.membership.is_closed() {
            let death = self.election.next_death(Instant::now()).map(Into::into);
            tokio::select! {
                _ = ticks.tick() => self.send_heartbeat(),
                // Whoever takes over must not wait for its next heartbeat.
                () = sleep_until(death) => {}
                // Once true it stays true.
                Ok(()) = leaving.changed() => {
                    self.election.leave();
                    self.send_heartbeat();
                }
                Ok(()) = cluster.changed() => {
                    self.election.set_cluster(*cluster.borrow_and_update());
                    self.send_heartbeat();
                }
                // At once: others take a claim from an unknown address for a conflict.
                Ok(()) = mac.changed() => {
                    self.election.set_mac(*mac.borrow_and_update());
                    self.send_heartbeat();
                }
                frame = self.socket.receive() => match frame {
                    Ok(frame) => {
                        if std::mem::take(&mut self.is_receive_failing) {
                            tracing::info!("heartbeats received again");
                        }
                        self.on_frame(&frame);
                    }
                    Err(error) => {
                        // The interface may be down for a moment.
                        if !std::mem::replace(&mut self.is_receive_failing, true) {
                            tracing::warn!(%error, "heartbeats not received; this host may become active beside another; retrying");
                        }
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                },
            }
            self.update();
        }
        Ok(())
    }

    fn send_heartbeat(&mut self) {
        let heartbeat = self.election.heartbeat(self.addresses.borrow().clone());
        match self.socket.send(&heartbeat::encode(self.election.mac(), &heartbeat)) {
            Ok(()) => {
                self.sending.on_sent(Instant::now());
                self.sent_since_failure = self.sent_since_failure.map(|sent| sent + 1);
                if self.sent_since_failure == Some(RECOVERED) {
                    self.sent_since_failure = None;
                    tracing::info!("heartbeats sent again");
                }
            }
            // Logged once per failure: hosts without each other's heartbeats are all active.
            Err(error) => {
                if self.sent_since_failure.replace(0).is_none() {
                    tracing::warn!(%error, "heartbeat not sent; other hosts may take over; retrying");
                }
            }
        }
    }

    fn on_frame(&mut self, frame: &[u8]) {
        let Some((from, heartbeat)) = heartbeat::decode(frame) else { return };
        if from == self.election.mac()
            && heartbeat.host != self.local.name
            && note_first(&mut self.same_mac, from)
        {
            tracing::error!(
                host = heartbeat.host,
                mac = %display_mac(from),
                "another edge host on the link has the same Ethernet address; they do not see each other, and both are active"
            );
        }
        let is_foreign = self.election.is_of_other_cluster(&heartbeat);
        if is_foreign && note_first(&mut self.of_other_clusters, from) {
            tracing::info!(
                host = heartbeat.host,
                mac = %display_mac(from),
                "an edge host of another cluster on the link has the same --group; ignoring it"
            );
        }
        if self.election.is_without_cluster(&heartbeat) && note_first(&mut self.without_cluster, from) {
            tracing::warn!(
                host = heartbeat.host,
                mac = %display_mac(from),
                "an edge host with the same --group does not say to which cluster it belongs, and counts as a host of this one; upgrade \
                 the chart, and then that host"
            );
        }
        let is_duplicate_name = heartbeat.group == self.local.group
            && heartbeat.host == self.local.name
            && from != self.election.mac();
        if !is_foreign && is_duplicate_name && note_first(&mut self.duplicate_names, from) {
            tracing::warn!(
                host = heartbeat.host,
                mac = %display_mac(from),
                "another edge host on the link has the same name; set --host-name on one of them"
            );
        }
        self.election.on_heartbeat(from, heartbeat, Instant::now());
    }

    fn update_ability(&mut self, now: Instant) {
        let report = *self.abilities.borrow();
        let problem = report.problem(now);
        // The listening at the start is no time in which a host serves.
        if problem != self.problem && self.election.has_listened() {
            if let Some(problem) = problem {
                tracing::warn!(
                    problem,
                    "this host cannot serve; another host that can takes the VIPs, if there is one"
                );
            } else {
                tracing::info!("this host can serve");
            }
            self.problem = problem;
        }
        let mut ability = report.ability(now);
        if *self.local.lost_contact.borrow() {
            ability = ability.without_news();
        }
        self.metrics.able.set(ability.can_serve.into());
        self.election.set_ability(ability);
    }

    fn update(&mut self) {
        let now = Instant::now();
        self.update_ability(now);
        self.election.set_informed(self.informed.borrow().clone());
        let changed = self.election.evaluate(now);
        if changed {
            // At once: the others must know before their timeout.
            self.send_heartbeat();
        }
        let others_active = self.election.others_active(now);
        let peers = self.election.peers(now);
        let (mut departures, others_before) = {
            let before = self.membership.borrow();
            (before.departures.clone(), before.others_active)
        };
        departures.count(others_before - others_active);
        let next = Membership {
            active: self.election.active(),
            others_active,
            has_standby: self.election.other_can_serve(now),
            settled: self.election.has_listened() && !self.election.is_in_doubt(now),
            departures,
            live: self.election.live(now),
            peers,
            roles_hold_until: self.membership.borrow().roles_hold_until,
        };
        self.membership.send_if_modified(|current| {
            let changed = *current != next;
            *current = next;
            current.roles_hold_until = self.sending.roles_hold_until(now);
            changed
        });
    }
}

/// Notes a host; whether it is to be logged.
fn note_first(logged: &mut BTreeSet<Mac>, from: Mac) -> bool {
    logged.len() < MAX_LOGGED && logged.insert(from)
}

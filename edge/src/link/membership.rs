// SPDX-License-Identifier: Apache-2.0
//! Talks to the other edge hosts: sends and hears beats, and tells the engine who is there and who is active.
//!
//! Nothing else waits here, so that a slow kernel or API server never makes this host look dead.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::election::{Election, HeartbeatTiming};
use super::heartbeat;
use super::packet::PacketSocket;
use crate::forward::Mac;
use crate::host::EdgePeer;

/// What is known of the edge hosts on the link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Membership {
    /// This host is the active one.
    pub(crate) active: bool,
    /// Another host is active.
    pub(crate) other_active: bool,
    /// This host has listened for long enough to know who is there.
    pub(crate) settled: bool,
    /// Counts how often another active host has gone or stepped down: what it announced must be announced over.
    pub(crate) departures: u64,
    /// Other hosts that are heard now.
    pub(crate) live: usize,
    /// Every other host that was ever heard.
    pub(crate) peers: Vec<EdgePeer>,
}

/// Who this host is among them.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The interface's index.
    pub(crate) index: u32,
    /// Its link-layer address.
    pub(crate) mac: Mac,
    /// The host's name.
    pub(crate) host: String,
    /// The group's number.
    pub(crate) group: u64,
    /// How often to speak.
    pub(crate) timing: HeartbeatTiming,
}

/// The talking.
#[derive(Debug)]
pub(crate) struct HeartbeatLoop {
    socket: PacketSocket,
    identity: Identity,
    election: Election,
    addresses: watch::Receiver<Vec<IpAddr>>,
    leave: watch::Receiver<bool>,
    told: watch::Sender<Membership>,
    started: Instant,
}

impl HeartbeatLoop {
    /// Opens the socket. `addresses` are the host's own, to be told to the others; `leave` turns true when it wants to go.
    pub(crate) fn open(
        identity: Identity,
        addresses: watch::Receiver<Vec<IpAddr>>,
        leave: watch::Receiver<bool>,
    ) -> io::Result<(Self, watch::Receiver<Membership>)> {
        let socket = PacketSocket::open(identity.index, heartbeat::ETHERTYPE)?;
        socket.join(identity.index, heartbeat::GROUP)?;
        let (told, hear) = watch::channel(Membership::default());
        let started = Instant::now();
        let Identity { mac, host, group, timing, .. } = identity.clone();
        let election = Election::new(host, mac, group, timing, started);
        Ok((Self { socket, identity, election, addresses, leave, told, started }, hear))
    }

    /// Talks until everybody who listens has gone.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let mut ticks = tokio::time::interval(self.identity.timing.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut leave = self.leave.clone();
        while !self.told.is_closed() {
            tokio::select! {
                _ = ticks.tick() => self.send_heartbeat(),
                // Once true it stays true.
                Ok(()) = leave.changed() => {
                    self.election.leave();
                    self.send_heartbeat();
                }
                frame = self.socket.receive() => match frame {
                    Ok(frame) => self.on_frame(&frame),
                    Err(error) => {
                        // The interface may be down for a moment.
                        tracing::debug!(%error, "cannot hear other edge hosts");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                },
            }
            self.update();
        }
        Ok(())
    }

    fn send_heartbeat(&self) {
        let said = self.election.heartbeat(self.addresses.borrow().clone());
        if let Err(error) = self.socket.send(&heartbeat::encode(self.identity.mac, &said)) {
            tracing::debug!(%error, "cannot speak to other edge hosts");
        }
    }

    fn on_frame(&mut self, frame: &[u8]) {
        let Some((from, said)) = heartbeat::decode(frame) else { return };
        if said.host == self.identity.host && from != self.identity.mac {
            tracing::warn!(
                host = said.host,
                "another edge host on the link has the same name: give each its own"
            );
        }
        self.election.on_heartbeat(from, said, Instant::now());
    }

    fn update(&mut self) {
        let now = Instant::now();
        let changed = self.election.evaluate(now);
        if changed {
            // The others should know before their patience ends.
            self.send_heartbeat();
        }
        let other_active = self.election.other_is_active(now);
        let peers = self
            .election
            .peers()
            .iter()
            .map(|(mac, peer)| EdgePeer { mac: *mac, addresses: peer.addresses.clone() })
            .collect();
        let contested = self.told.borrow().other_active && !other_active;
        let next = Membership {
            active: self.election.is_active(),
            other_active,
            settled: now >= self.started + self.identity.timing.interval * self.identity.timing.misses,
            departures: self.told.borrow().departures + u64::from(contested),
            live: self.election.live(now),
            peers,
        };
        self.told.send_if_modified(|told| {
            let modified = *told != next;
            *told = next;
            modified
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Address conflict detection (RFC 5227, RFC 4862): probes for each VIP before this host answers for it, and keeps listening for claims
//! by other hosts. Edge peers are no conflict: they have the VIPs that this host may have next.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::frames::{self, ARP};
use super::membership::Membership;
use super::packet::PacketSocket;
use super::unattended::UnattendedHosts;
use crate::channel::send_if_changed;
use crate::host::{EdgePeer, PeerLiveness};
use crate::link::mac::{Mac, display_mac};
use crate::metrics::Metrics;
use crate::shards::Shard;

/// The RFCs wait longer between probes, for links that take seconds to come up.
const PROBES: u32 = 3;
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// How long after a conflict an address is probed again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// What is known of the VIPs. One that was not probed yet is in neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AddressConflicts {
    pub(crate) free: BTreeSet<IpAddr>,
    /// In use by another host.
    pub(crate) taken: BTreeMap<IpAddr, Mac>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressState {
    Probing { sent: u32, next: Instant },
    Free,
    Conflict { by: Mac, until: Instant },
}

/// The state of each VIP. Pure: its caller passes the time and what was received.
#[derive(Debug, Default)]
struct ConflictDetector {
    addresses: BTreeMap<IpAddr, AddressState>,
}

impl ConflictDetector {
    fn set_addresses(&mut self, wanted: &BTreeSet<IpAddr>, now: Instant) {
        self.addresses.retain(|vip, _| wanted.contains(vip));
        for vip in wanted {
            self.addresses.entry(*vip).or_insert(AddressState::Probing { sent: 0, next: now });
        }
    }

    /// The addresses to probe now.
    fn due_probes(&mut self, now: Instant) -> Vec<IpAddr> {
        let mut due = Vec::new();
        for (vip, state) in &mut self.addresses {
            match *state {
                AddressState::Probing { sent: PROBES, next } if now >= next => *state = AddressState::Free,
                AddressState::Probing { sent, next } if now >= next => {
                    *state = AddressState::Probing { sent: sent + 1, next: now + PROBE_INTERVAL };
                    due.push(*vip);
                }
                AddressState::Conflict { until, .. } if now >= until => {
                    *state = AddressState::Probing { sent: 1, next: now + PROBE_INTERVAL };
                    due.push(*vip);
                }
                _ => {}
            }
        }
        due
    }

    /// Another host claims an address; true where the address was free before.
    fn on_claim(&mut self, vip: IpAddr, by: Mac, now: Instant) -> bool {
        match self.addresses.get_mut(&vip) {
            Some(AddressState::Free) => true,
            Some(state) => {
                *state = AddressState::Conflict { by, until: now + RETRY_INTERVAL };
                false
            }
            None => false,
        }
    }

    /// A host that conflicted may turn out to be an edge peer.
    fn accept_peers(&mut self, peers: &[EdgePeer]) {
        for state in self.addresses.values_mut() {
            if matches!(state, AddressState::Conflict { by, .. } if peers.iter().any(|peer| peer.mac == *by))
            {
                *state = AddressState::Free;
            }
        }
    }

    fn is_probing(&self) -> bool {
        self.addresses.values().any(|state| matches!(state, AddressState::Probing { .. }))
    }

    /// An address that is probed again stays in conflict until it is free.
    fn status(&self, before: &AddressConflicts) -> AddressConflicts {
        let mut conflicts = AddressConflicts::default();
        for (vip, state) in &self.addresses {
            match state {
                AddressState::Free => drop(conflicts.free.insert(*vip)),
                AddressState::Conflict { by, .. } => drop(conflicts.taken.insert(*vip, *by)),
                AddressState::Probing { .. } => conflicts.taken.extend(before.taken.get_key_value(vip)),
            }
        }
        conflicts
    }
}

/// The task that sends probes and listens.
#[derive(Debug)]
pub(crate) struct ConflictDetection {
    /// The interface's.
    pub(crate) index: u32,
    pub(crate) mac: watch::Receiver<Mac>,
    /// The VIPs to check.
    pub(crate) vips: watch::Receiver<BTreeSet<IpAddr>>,
    pub(crate) membership: watch::Receiver<Membership>,
    pub(crate) metrics: Metrics,
    /// Receives the result.
    pub(crate) conflicts: watch::Sender<AddressConflicts>,
    /// Receives claims to VIPs that were free.
    pub(crate) claims: mpsc::UnboundedSender<(IpAddr, Mac)>,
}

impl ConflictDetection {
    /// Runs until the receivers are gone.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let arp = PacketSocket::open(self.index, ARP)?;
        let sender = PacketSocket::open(self.index, 0)?;
        // Open only while probing: a socket for IPv6's ethertype costs time for every packet.
        let mut advertisements: Option<PacketSocket> = None;
        let mut detector = ConflictDetector::default();
        let (mut unattended, mut found) = (UnattendedHosts::default(), BTreeSet::new());
        let mut ticks = tokio::time::interval(PROBE_INTERVAL / 2);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        while !self.conflicts.is_closed() {
            let mut probe = None;
            tokio::select! {
                changed = self.vips.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    detector.set_addresses(&self.vips.borrow_and_update(), Instant::now());
                }
                _ = ticks.tick() => {
                    detector.accept_peers(&self.membership.borrow().peers);
                    probe = self.due_probe(&mut unattended);
                    found = self.show(&mut unattended, found);
                }
                frame = arp.receive() => self.on_frame(&mut detector, &mut unattended, frame),
                frame = receive(advertisements.as_ref()) => self.on_frame(&mut detector, &mut unattended, frame),
            }
            let now = Instant::now();
            if !detector.is_probing() && !unattended.is_waiting(now) {
                advertisements = None;
            } else if advertisements.is_none() {
                advertisements = Some(PacketSocket::advertisements(self.index)?);
            }
            for vip in detector.due_probes(now).into_iter().chain(probe) {
                if let Err(error) = sender.send(&frames::probe(*self.mac.borrow(), vip)) {
                    tracing::debug!(%error, %vip, "address probe not sent");
                }
            }
            let status = detector.status(&self.conflicts.borrow());
            send_if_changed(&self.conflicts, status);
        }
        Ok(())
    }

    /// The VIP for which hosts may answer whose process is gone; while such hosts are known, or answer.
    fn due_probe(&self, unattended: &mut UnattendedHosts) -> Option<IpAddr> {
        let now = Instant::now();
        if !unattended.is_due(now) {
            return None;
        }
        let membership = self.membership.borrow();
        let is_gone = |peer: &EdgePeer| peer.liveness != PeerLiveness::Live;
        if !membership.peers.iter().any(is_gone) && unattended.hosts(now).is_empty() {
            return None;
        }
        let vips = self.vips.borrow();
        let served = vips.iter().filter(|vip| membership.active.contains(Shard::of(**vip)));
        unattended.next_probe(&served.copied().collect(), now)
    }

    /// Logs the hosts that were not among those found before. Returns all.
    fn show(&self, unattended: &mut UnattendedHosts, before: BTreeSet<Mac>) -> BTreeSet<Mac> {
        let found = unattended.hosts(Instant::now());
        if found == before {
            return before;
        }
        for mac in found.difference(&before) {
            tracing::warn!(
                mac = %display_mac(*mac),
                "a host on the link answers for VIPs that this host serves, and no steerage-edge runs there: clients whose packets go there \
                 reach the targets of the time when its process ended; start steerage-edge there, or run `steerage-edge cleanup`"
            );
        }
        self.metrics.unattended.set(i64::try_from(found.len()).unwrap_or(i64::MAX));
        found
    }

    fn on_frame(
        &self,
        detector: &mut ConflictDetector,
        unattended: &mut UnattendedHosts,
        frame: io::Result<Vec<u8>>,
    ) {
        let Ok(frame) = frame else { return };
        let Some((vip, by)) = frames::announced_address(&frame) else { return };
        let is_own = by == *self.mac.borrow();
        let peer =
            self.membership.borrow().peers.iter().find(|peer| peer.mac == by).map(|peer| peer.liveness);
        if !is_own && peer != Some(PeerLiveness::Live) {
            unattended.on_claim(vip, by, Instant::now());
        }
        let known = is_own || peer.is_some();
        if !known && detector.on_claim(vip, by, Instant::now()) {
            let _ = self.claims.send((vip, by));
        }
    }
}

async fn receive(socket: Option<&PacketSocket>) -> io::Result<Vec<u8>> {
    match socket {
        Some(socket) => socket.receive().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::PeerLiveness;

    const OTHER_HOST: Mac = [2, 0, 0, 0, 0, 9];

    fn vip() -> IpAddr {
        "10.0.0.100".parse().expect("address")
    }

    /// Advances by 500 ms; the number of probes sent.
    fn advance(detector: &mut ConflictDetector, now: &mut Instant) -> usize {
        (0..10)
            .map(|_| {
                *now += PROBE_INTERVAL / 2;
                detector.due_probes(*now).len()
            })
            .sum()
    }

    #[test]
    fn unanswered_probes_mean_free() {
        let (mut detector, mut now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        assert_eq!(detector.status(&AddressConflicts::default()), AddressConflicts::default());
        assert_eq!(advance(&mut detector, &mut now), 3);
        assert_eq!(detector.status(&AddressConflicts::default()).free, [vip()].into());
        assert!(detector.on_claim(vip(), OTHER_HOST, now), "a claim to a free address is reported");
        assert!(
            detector.status(&AddressConflicts::default()).free.contains(&vip()),
            "and the address stays free"
        );
    }

    #[test]
    fn answered_probe_is_a_conflict_until_unanswered() {
        let (mut detector, mut now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        detector.due_probes(now);
        assert!(!detector.on_claim(vip(), OTHER_HOST, now));
        let taken = detector.status(&AddressConflicts::default());
        assert_eq!(taken.taken, [(vip(), OTHER_HOST)].into());
        now += RETRY_INTERVAL;
        assert_eq!(detector.due_probes(now), [vip()]);
        assert_eq!(detector.status(&taken), taken, "still a conflict while it is probed again");
        advance(&mut detector, &mut now);
        assert!(detector.status(&taken).free.contains(&vip()));
    }

    #[test]
    fn conflict_with_an_edge_peer_is_cleared() {
        let (mut detector, now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        detector.due_probes(now);
        detector.on_claim(vip(), OTHER_HOST, now);
        detector.accept_peers(&[EdgePeer {
            mac: [2, 0, 0, 0, 0, 8],
            addresses: Vec::new(),
            liveness: PeerLiveness::Live,
        }]);
        assert!(detector.status(&AddressConflicts::default()).free.is_empty());
        detector.accept_peers(&[EdgePeer {
            mac: OTHER_HOST,
            addresses: Vec::new(),
            liveness: PeerLiveness::Dead,
        }]);
        assert_eq!(detector.status(&AddressConflicts::default()).free, [vip()].into());
    }

    #[test]
    fn removed_address_is_forgotten() {
        let (mut detector, now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        detector.set_addresses(&BTreeSet::new(), now);
        assert!(detector.addresses.is_empty());
        assert!(!detector.on_claim(vip(), OTHER_HOST, now));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Finds out whether a virtual address is somebody else's before this host answers for it (RFC 5227, RFC 4862), and keeps
//! listening. Other edge hosts do not count: they have the addresses that this one is about to have.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::frames::{self, ARP};
use super::packet::PacketSocket;
use crate::forward::Mac;
use crate::host::EdgePeer;

/// Probes for an address, and the time between them. Shorter than the standards say, which reckon with links that take seconds to
/// come up.
const PROBES: u32 = 3;
const APART: Duration = Duration::from_millis(100);
/// How often an address that was somebody else's is looked at again.
const AGAIN: Duration = Duration::from_secs(5);

/// What is known of the addresses that are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AddressConflicts {
    /// Nobody else has them.
    pub(crate) free: BTreeSet<IpAddr>,
    /// Somebody else has them.
    pub(crate) taken: BTreeMap<IpAddr, Mac>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressState {
    Probing { sent: u32, next: Instant },
    Free,
    Conflict { by: Mac, until: Instant },
}

/// The addresses and how far each is. Pure: told the time and what is heard.
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

    /// The addresses to send a probe for now.
    fn due(&mut self, now: Instant) -> Vec<IpAddr> {
        let mut due = Vec::new();
        for (vip, state) in &mut self.addresses {
            match *state {
                AddressState::Probing { sent: PROBES, next } if now >= next => *state = AddressState::Free,
                AddressState::Probing { sent, next } if now >= next => {
                    *state = AddressState::Probing { sent: sent + 1, next: now + APART };
                    due.push(*vip);
                }
                AddressState::Conflict { until, .. } if now >= until => {
                    *state = AddressState::Probing { sent: 1, next: now + APART };
                    due.push(*vip);
                }
                _ => {}
            }
        }
        due
    }

    /// Somebody who is no edge host conflicts an address; true when it is one that this host may be answering for.
    fn on_conflict(&mut self, vip: IpAddr, by: Mac, now: Instant) -> bool {
        match self.addresses.get_mut(&vip) {
            Some(AddressState::Free) => true,
            Some(state) => {
                *state = AddressState::Conflict { by, until: now + AGAIN };
                false
            }
            None => false,
        }
    }

    /// Edge hosts that have only now been heard are no strangers any more.
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

    /// What is known. One that is looked at again is still taken until it is free.
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

/// Asks and listens.
#[derive(Debug)]
pub(crate) struct ConflictDetection {
    /// The interface's index.
    pub(crate) index: u32,
    /// Its link-layer address.
    pub(crate) mac: Mac,
    /// The addresses that are wanted.
    pub(crate) wanted: watch::Receiver<BTreeSet<IpAddr>>,
    /// The other edge hosts, whose answers do not count.
    pub(crate) peers: watch::Receiver<Vec<EdgePeer>>,
    /// Where to tell what is known.
    pub(crate) told: watch::Sender<AddressConflicts>,
    /// Where to tell of conflicts to an address that was free.
    pub(crate) contested: mpsc::UnboundedSender<(IpAddr, Mac)>,
}

impl ConflictDetection {
    /// Runs until everybody who listens has gone.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let arp = PacketSocket::open(self.index, ARP)?;
        let sender = PacketSocket::open(self.index, 0)?;
        // For IPv6 only while probing: a socket for its ethertype costs time for every packet.
        let mut neighbours: Option<PacketSocket> = None;
        let mut detector = ConflictDetector::default();
        let mut ticks = tokio::time::interval(APART / 2);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        while !self.told.is_closed() {
            tokio::select! {
                changed = self.wanted.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    detector.set_addresses(&self.wanted.borrow_and_update(), Instant::now());
                }
                _ = ticks.tick() => detector.accept_peers(&self.peers.borrow()),
                frame = arp.receive() => self.on_frame(&mut detector, frame),
                frame = receive(neighbours.as_ref()) => self.on_frame(&mut detector, frame),
            }
            if !detector.is_probing() {
                neighbours = None;
            } else if neighbours.is_none() {
                neighbours = Some(PacketSocket::advertisements(self.index)?);
            }
            for vip in detector.due(Instant::now()) {
                if let Err(error) = sender.send(&frames::probe(self.mac, vip)) {
                    tracing::debug!(%error, %vip, "cannot ask for an address");
                }
            }
            self.told.send_if_modified(|told| {
                let next = detector.status(told);
                let modified = *told != next;
                *told = next;
                modified
            });
        }
        Ok(())
    }

    fn on_frame(&self, detector: &mut ConflictDetector, frame: io::Result<Vec<u8>>) {
        let Ok(frame) = frame else { return };
        let Some((vip, by)) = frames::announced_address(&frame) else { return };
        let known = by == self.mac || self.peers.borrow().iter().any(|peer| peer.mac == by);
        if !known && detector.on_conflict(vip, by, Instant::now()) {
            let _ = self.contested.send((vip, by));
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

    const STRANGER: Mac = [2, 0, 0, 0, 0, 9];

    fn vip() -> IpAddr {
        "10.0.0.100".parse().expect("address")
    }

    /// Steps of 50 ms until nothing is due for a while; how many probes were sent.
    fn settle(detector: &mut ConflictDetector, now: &mut Instant) -> usize {
        (0..10)
            .map(|_| {
                *now += APART / 2;
                detector.due(*now).len()
            })
            .sum()
    }

    #[test]
    fn unanswered_probes_mean_free() {
        let (mut detector, mut now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        assert_eq!(detector.status(&AddressConflicts::default()), AddressConflicts::default());
        assert_eq!(settle(&mut detector, &mut now), 3);
        assert_eq!(detector.status(&AddressConflicts::default()).free, [vip()].into());
        assert!(detector.on_conflict(vip(), STRANGER, now), "a claim now is a contest");
        assert!(
            detector.status(&AddressConflicts::default()).free.contains(&vip()),
            "and does not take it away"
        );
    }

    #[test]
    fn answered_probe_is_a_conflict_until_unanswered() {
        let (mut detector, mut now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        detector.due(now);
        assert!(!detector.on_conflict(vip(), STRANGER, now));
        let taken = detector.status(&AddressConflicts::default());
        assert_eq!(taken.taken, [(vip(), STRANGER)].into());
        now += AGAIN;
        assert_eq!(detector.due(now), [vip()]);
        assert_eq!(detector.status(&taken), taken, "still taken while it is looked at again");
        settle(&mut detector, &mut now);
        assert!(detector.status(&taken).free.contains(&vip()));
    }

    #[test]
    fn conflict_with_an_edge_peer_is_cleared() {
        let (mut detector, now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        detector.due(now);
        detector.on_conflict(vip(), STRANGER, now);
        detector.accept_peers(&[EdgePeer { mac: [2, 0, 0, 0, 0, 8], addresses: Vec::new() }]);
        assert!(detector.status(&AddressConflicts::default()).free.is_empty());
        detector.accept_peers(&[EdgePeer { mac: STRANGER, addresses: Vec::new() }]);
        assert_eq!(detector.status(&AddressConflicts::default()).free, [vip()].into());
    }

    #[test]
    fn removed_address_is_forgotten() {
        let (mut detector, now) = (ConflictDetector::default(), Instant::now());
        detector.set_addresses(&[vip()].into(), now);
        detector.set_addresses(&BTreeSet::new(), now);
        assert!(detector.addresses.is_empty());
        assert!(!detector.on_conflict(vip(), STRANGER, now));
    }
}

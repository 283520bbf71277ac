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
use crate::host::Neighbour;

/// Probes for an address, and the time between them. Shorter than the standards say, which reckon with links that take seconds to
/// come up.
const PROBES: u32 = 3;
const APART: Duration = Duration::from_millis(100);
/// How often an address that was somebody else's is looked at again.
const AGAIN: Duration = Duration::from_secs(5);

/// What is known of the addresses that are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    /// Nobody else has them.
    pub(crate) free: BTreeSet<IpAddr>,
    /// Somebody else has them.
    pub(crate) taken: BTreeMap<IpAddr, Mac>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Probing { sent: u32, next: Instant },
    Free,
    Taken { by: Mac, until: Instant },
}

/// The addresses and how far each is. Pure: told the time and what is heard.
#[derive(Debug, Default)]
struct Ledger {
    stages: BTreeMap<IpAddr, Stage>,
}

impl Ledger {
    fn want(&mut self, wanted: &BTreeSet<IpAddr>, now: Instant) {
        self.stages.retain(|vip, _| wanted.contains(vip));
        for vip in wanted {
            self.stages.entry(*vip).or_insert(Stage::Probing { sent: 0, next: now });
        }
    }

    /// The addresses to send a probe for now.
    fn due(&mut self, now: Instant) -> Vec<IpAddr> {
        let mut due = Vec::new();
        for (vip, stage) in &mut self.stages {
            match *stage {
                Stage::Probing { sent: PROBES, next } if now >= next => *stage = Stage::Free,
                Stage::Probing { sent, next } if now >= next => {
                    *stage = Stage::Probing { sent: sent + 1, next: now + APART };
                    due.push(*vip);
                }
                Stage::Taken { until, .. } if now >= until => {
                    *stage = Stage::Probing { sent: 1, next: now + APART };
                    due.push(*vip);
                }
                _ => {}
            }
        }
        due
    }

    /// Somebody who is no edge host claims an address; true when it is one that this host may be answering for.
    fn claimed(&mut self, vip: IpAddr, by: Mac, now: Instant) -> bool {
        match self.stages.get_mut(&vip) {
            Some(Stage::Free) => true,
            Some(stage) => {
                *stage = Stage::Taken { by, until: now + AGAIN };
                false
            }
            None => false,
        }
    }

    /// Edge hosts that have only now been heard are no strangers any more.
    fn forgive(&mut self, peers: &[Neighbour]) {
        for stage in self.stages.values_mut() {
            if matches!(stage, Stage::Taken { by, .. } if peers.iter().any(|peer| peer.mac == *by)) {
                *stage = Stage::Free;
            }
        }
    }

    fn is_probing(&self) -> bool {
        self.stages.values().any(|stage| matches!(stage, Stage::Probing { .. }))
    }

    /// What is known. One that is looked at again is still taken until it is free.
    fn claims(&self, before: &Claims) -> Claims {
        let mut claims = Claims::default();
        for (vip, stage) in &self.stages {
            match stage {
                Stage::Free => drop(claims.free.insert(*vip)),
                Stage::Taken { by, .. } => drop(claims.taken.insert(*vip, *by)),
                Stage::Probing { .. } => claims.taken.extend(before.taken.get_key_value(vip)),
            }
        }
        claims
    }
}

/// Asks and listens.
#[derive(Debug)]
pub(crate) struct Claimant {
    /// The interface's index.
    pub(crate) index: u32,
    /// Its link-layer address.
    pub(crate) mac: Mac,
    /// The addresses that are wanted.
    pub(crate) wanted: watch::Receiver<BTreeSet<IpAddr>>,
    /// The other edge hosts, whose answers do not count.
    pub(crate) peers: watch::Receiver<Vec<Neighbour>>,
    /// Where to tell what is known.
    pub(crate) told: watch::Sender<Claims>,
    /// Where to tell of claims to an address that was free.
    pub(crate) contested: mpsc::UnboundedSender<(IpAddr, Mac)>,
}

impl Claimant {
    /// Runs until everybody who listens has gone.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        let arp = PacketSocket::open(self.index, ARP)?;
        let sender = PacketSocket::open(self.index, 0)?;
        // For IPv6 only while probing: a socket for its ethertype costs time for every packet.
        let mut neighbours: Option<PacketSocket> = None;
        let mut ledger = Ledger::default();
        let mut ticks = tokio::time::interval(APART / 2);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        while !self.told.is_closed() {
            tokio::select! {
                changed = self.wanted.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    ledger.want(&self.wanted.borrow_and_update(), Instant::now());
                }
                _ = ticks.tick() => ledger.forgive(&self.peers.borrow()),
                frame = arp.receive() => self.hear(&mut ledger, frame),
                frame = receive(neighbours.as_ref()) => self.hear(&mut ledger, frame),
            }
            if !ledger.is_probing() {
                neighbours = None;
            } else if neighbours.is_none() {
                neighbours = Some(PacketSocket::advertisements(self.index)?);
            }
            for vip in ledger.due(Instant::now()) {
                if let Err(error) = sender.send(&frames::probe(self.mac, vip)) {
                    tracing::debug!(%error, %vip, "cannot ask for an address");
                }
            }
            self.told.send_if_modified(|told| {
                let next = ledger.claims(told);
                let modified = *told != next;
                *told = next;
                modified
            });
        }
        Ok(())
    }

    fn hear(&self, ledger: &mut Ledger, frame: io::Result<Vec<u8>>) {
        let Ok(frame) = frame else { return };
        let Some((vip, by)) = frames::claimed(&frame) else { return };
        let known = by == self.mac || self.peers.borrow().iter().any(|peer| peer.mac == by);
        if !known && ledger.claimed(vip, by, Instant::now()) {
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
    fn settle(ledger: &mut Ledger, now: &mut Instant) -> usize {
        (0..10)
            .map(|_| {
                *now += APART / 2;
                ledger.due(*now).len()
            })
            .sum()
    }

    #[test]
    fn silence_means_free() {
        let (mut ledger, mut now) = (Ledger::default(), Instant::now());
        ledger.want(&[vip()].into(), now);
        assert_eq!(ledger.claims(&Claims::default()), Claims::default());
        assert_eq!(settle(&mut ledger, &mut now), 3);
        assert_eq!(ledger.claims(&Claims::default()).free, [vip()].into());
        assert!(ledger.claimed(vip(), STRANGER, now), "a claim now is a contest");
        assert!(ledger.claims(&Claims::default()).free.contains(&vip()), "and does not take it away");
    }

    #[test]
    fn an_answer_means_taken_until_nobody_answers() {
        let (mut ledger, mut now) = (Ledger::default(), Instant::now());
        ledger.want(&[vip()].into(), now);
        ledger.due(now);
        assert!(!ledger.claimed(vip(), STRANGER, now));
        let taken = ledger.claims(&Claims::default());
        assert_eq!(taken.taken, [(vip(), STRANGER)].into());
        now += AGAIN;
        assert_eq!(ledger.due(now), [vip()]);
        assert_eq!(ledger.claims(&taken), taken, "still taken while it is looked at again");
        settle(&mut ledger, &mut now);
        assert!(ledger.claims(&taken).free.contains(&vip()));
    }

    #[test]
    fn an_edge_host_that_is_heard_late_is_forgiven() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        ledger.want(&[vip()].into(), now);
        ledger.due(now);
        ledger.claimed(vip(), STRANGER, now);
        ledger.forgive(&[Neighbour { mac: [2, 0, 0, 0, 0, 8], addresses: Vec::new() }]);
        assert!(ledger.claims(&Claims::default()).free.is_empty());
        ledger.forgive(&[Neighbour { mac: STRANGER, addresses: Vec::new() }]);
        assert_eq!(ledger.claims(&Claims::default()).free, [vip()].into());
    }

    #[test]
    fn what_is_not_wanted_is_forgotten() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        ledger.want(&[vip()].into(), now);
        ledger.want(&BTreeSet::new(), now);
        assert!(ledger.stages.is_empty());
        assert!(!ledger.claimed(vip(), STRANGER, now));
    }
}

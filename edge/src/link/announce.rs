// SPDX-License-Identifier: Apache-2.0
//! Announces VIPs on the link by gratuitous ARP and unsolicited neighbour advertisements: several times when this host begins to answer for one,
//! and every minute while it has it, because switches and routers miss and forget announcements.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::frames;
use super::membership::Membership;
use super::packet::PacketSocket;
use crate::link::mac::Mac;
use crate::shards::{Shard, Shards};
use crate::vips::VipLeases;

/// The times between the announcements of a new VIP.
const REPEATS: [Duration; 5] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(750),
    Duration::from_secs(2),
    Duration::from_secs(5),
];
/// How often every held VIP is announced.
const REFRESH_INTERVAL: Duration = Duration::from_mins(1);
/// Announcements wait for so long, again and again, while another host may have taken over unnoticed.
const ROLES_WAIT: Duration = Duration::from_millis(50);
/// Frames sent at once: more could overflow the device's queue.
const BURST: usize = 128;
const BURST_PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct Announcer {
    socket: PacketSocket,
    mac: watch::Receiver<Mac>,
    held: watch::Receiver<BTreeSet<IpAddr>>,
    membership: watch::Receiver<Membership>,
    leases: VipLeases,
    requests: mpsc::UnboundedReceiver<BTreeSet<IpAddr>>,
}

impl Announcer {
    /// `held`: the VIPs of this host; `requests`: those to announce at once. The membership comes from the heartbeats, because an
    /// engine that does not respond does not say that another host is active.
    pub(crate) fn open(
        index: u32,
        mac: watch::Receiver<Mac>,
        held: watch::Receiver<BTreeSet<IpAddr>>,
        membership: watch::Receiver<Membership>,
        leases: VipLeases,
        requests: mpsc::UnboundedReceiver<BTreeSet<IpAddr>>,
    ) -> io::Result<Self> {
        Ok(Self { socket: PacketSocket::open(index, 0)?, mac, held, membership, leases, requests })
    }

    /// Runs until the sender of requests is gone.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        // When each VIP is announced next, and how often it has been since it was requested.
        let mut schedule = BTreeMap::<IpAddr, (Instant, usize)>::new();
        let mut refresh = Instant::now() + REFRESH_INTERVAL;
        let mut not_before = Instant::now();
        loop {
            let next =
                schedule.values().map(|(due, _)| *due).min().unwrap_or(refresh).min(refresh).max(not_before);
            tokio::select! {
                request = self.requests.recv() => {
                    let Some(vips) = request else { return Ok(()) };
                    schedule.extend(vips.into_iter().map(|vip| (vip, (Instant::now(), 0))));
                }
                () = sleep_until(next) => {}
            }
            let now = Instant::now();
            if !self.membership.borrow().roles_hold(now.into_std()) {
                not_before = now + ROLES_WAIT;
                continue;
            }
            if now >= refresh {
                refresh = now + REFRESH_INTERVAL;
                schedule.extend(self.held.borrow().iter().map(|vip| (*vip, (now, REPEATS.len()))));
            }
            let announced = announced(&self.held.borrow(), &self.membership.borrow(), self.leases.lasting());
            schedule.retain(|vip, _| announced.contains(vip));
            let due: Vec<_> =
                schedule.iter().filter(|(_, (due, _))| *due <= now).map(|(vip, _)| *vip).collect();
            for (number, vip) in due.into_iter().enumerate() {
                if number % BURST == BURST - 1 {
                    sleep(BURST_PAUSE).await;
                }
                let frame = frames::announcement(*self.mac.borrow(), vip);
                if let Err(error) = self.socket.send(&frame) {
                    tracing::debug!(%error, %vip, "announcement not sent; repeating it later");
                }
                let count = schedule.get(&vip).map_or(0, |(_, count)| *count);
                match REPEATS.get(count) {
                    Some(wait) => drop(schedule.insert(vip, (now + *wait, count + 1))),
                    None => drop(schedule.remove(&vip)),
                }
            }
        }
    }
}

/// The VIPs that may be announced. One that is no longer served must not be, nor those of another active host: clients would
/// send to this one again. A host that is not active announces only what it answers for.
fn announced(held: &BTreeSet<IpAddr>, membership: &Membership, answered: Shards) -> BTreeSet<IpAddr> {
    let may_announce = membership.active | (answered - membership.others_active);
    held.iter().copied().filter(|vip| may_announce.contains(Shard::of(*vip))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standby_announces_no_vip() {
        let held = BTreeSet::from([IpAddr::from([10, 0, 0, 100])]);
        let shards = |holds| {
            if holds { [Shard::of([10, 0, 0, 100].into())].into_iter().collect() } else { Shards::NONE }
        };
        let announced = |active, other_active, answers| {
            let (active, others_active) = (shards(active), shards(other_active));
            let membership = Membership { active, others_active, settled: true, ..Membership::default() };
            announced(&held, &membership, shards(answers))
        };
        assert_eq!(announced(false, true, true), BTreeSet::new());
        assert_eq!(announced(true, false, true), held);
        assert_eq!(announced(true, false, false), held, "its lease begins just now");
        assert_eq!(announced(true, true, true), held, "two active hosts for a moment");
        assert_eq!(announced(false, false, true), held, "nobody else has them");
        assert_eq!(
            announced(false, false, false),
            BTreeSet::new(),
            "an active host that cannot serve has them"
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Tells the link where virtual addresses are: several times when this host takes one, and now and then while it has it, since a
//! switch or a router may have missed or forgotten it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::frames;
use super::packet::PacketSocket;
use crate::forward::Mac;

/// When an announcement is repeated, counted from the one before.
const REPEATS: [Duration; 5] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(750),
    Duration::from_secs(2),
    Duration::from_secs(5),
];
/// How often every address is announced without any reason.
const ROUTINE: Duration = Duration::from_mins(1);
/// Frames between two pauses, so that many addresses do not fill the device's queue.
const BURST: usize = 128;
const PAUSE: Duration = Duration::from_millis(2);

/// Announces what this host has.
#[derive(Debug)]
pub(crate) struct Announcer {
    socket: PacketSocket,
    mac: Mac,
    held: watch::Receiver<BTreeSet<IpAddr>>,
    asked: mpsc::UnboundedReceiver<BTreeSet<IpAddr>>,
}

impl Announcer {
    /// An announcer of `held`; what comes by `asked` is announced at once.
    pub(crate) fn open(
        index: u32,
        mac: Mac,
        held: watch::Receiver<BTreeSet<IpAddr>>,
        asked: mpsc::UnboundedReceiver<BTreeSet<IpAddr>>,
    ) -> io::Result<Self> {
        Ok(Self { socket: PacketSocket::open(index, 0)?, mac, held, asked })
    }

    /// Runs until nobody asks any more.
    pub(crate) async fn run(mut self) -> anyhow::Result<()> {
        // When each address is next announced, and how often it has been since it was asked for.
        let mut plan = BTreeMap::<IpAddr, (Instant, usize)>::new();
        let mut routine = Instant::now() + ROUTINE;
        loop {
            let next = plan.values().map(|(due, _)| *due).min().unwrap_or(routine).min(routine);
            tokio::select! {
                asked = self.asked.recv() => {
                    let Some(asked) = asked else { return Ok(()) };
                    plan.extend(asked.into_iter().map(|vip| (vip, (Instant::now(), 0))));
                }
                () = sleep_until(next) => {}
            }
            let now = Instant::now();
            if now >= routine {
                routine = now + ROUTINE;
                plan.extend(self.held.borrow().iter().map(|vip| (*vip, (now, REPEATS.len()))));
            }
            let held = self.held.borrow().clone();
            // Never for an address that this host has given up meanwhile.
            plan.retain(|vip, _| held.contains(vip));
            let due: Vec<_> = plan.iter().filter(|(_, (due, _))| *due <= now).map(|(vip, _)| *vip).collect();
            for (number, vip) in due.into_iter().enumerate() {
                if number % BURST == BURST - 1 {
                    sleep(PAUSE).await;
                }
                if let Err(error) = self.socket.send(&frames::announcement(self.mac, vip)) {
                    tracing::debug!(%error, %vip, "cannot announce an address");
                }
                let count = plan.get(&vip).map_or(0, |(_, count)| *count);
                match REPEATS.get(count) {
                    Some(wait) => drop(plan.insert(vip, (now + *wait, count + 1))),
                    None => drop(plan.remove(&vip)),
                }
            }
        }
    }
}

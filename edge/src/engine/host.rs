// SPDX-License-Identifier: Apache-2.0
//! How the engine follows its host: the roles that the heartbeats decide, the interface, and the network.

use std::time::{Duration, Instant};

use super::{Engine, done};
use crate::channel::send_if_changed;
use crate::link::mac::{Mac, display_mac};
use crate::link::membership::Membership;

/// A bond without members can have no address for a moment.
const NO_MAC: Mac = [0; 6];
/// A process announces VIPs of an earlier one after this time at the latest, if it cannot list the load balancers.
const ADOPTED_WAIT: Duration = Duration::from_secs(5);

impl Engine {
    pub(super) fn update_membership(&mut self, next: Membership) {
        let before = std::mem::replace(&mut self.membership, next);
        let Membership { active, live, settled, .. } = self.membership;
        let gained = active - before.active;
        if active != before.active {
            let lost = before.active - active;
            tracing::info!(
                gained = gained.len(),
                lost = lost.len(),
                shards = active.len(),
                peers = live,
                "role changed: this host is active for these shards of the VIPs"
            );
            self.metrics.takeovers.inc_by(gained.len().into());
        }
        let left = self.membership.departures.since(&before.departures) & active;
        let announced = gained | left;
        if !announced.is_empty() {
            if self.kernel.is_programmed() {
                self.vips.announce_shards(announced);
            } else {
                // Those of an earlier process: the load balancer of one may be gone, which the first plan shows.
                self.vips.announce_all_in(ADOPTED_WAIT);
            }
        }
        self.metrics.active.set((!active.is_empty()).into());
        self.metrics.shards.set(active.len().into());
        self.metrics.peers.set(i64::try_from(live).unwrap_or(i64::MAX));
        if settled {
            done(&mut self.gates.settled);
        }
    }

    /// Reads the host's network; whether it differs from what is known, or a write is to be repeated.
    pub(super) fn refresh(&mut self) -> anyhow::Result<bool> {
        self.refresh_link()?;
        self.vips.tick(Instant::now());
        let host = self.kernel.network(&self.host)?;
        send_if_changed(&self.outputs.addresses, host.own_addresses());
        let host_changed = match &self.groups {
            Some(groups) => !host.is_alike(&self.host, || groups.target_addresses(&self.assignments)),
            None => host != self.host,
        };
        self.host = host;
        let must_write = self.kernel.repair(&self.link);
        Ok(host_changed || must_write)
    }

    /// Announces the VIPs again if the interface was disconnected or has another Ethernet address: it may lead to another port of
    /// the switch, and clients' routers know the old address.
    fn refresh_link(&mut self) -> anyhow::Result<()> {
        let link = self.kernel.link(&self.link)?;
        let was_disconnected = link.carrier_changes != self.link.carrier_changes;
        if link.mac != self.link.mac && link.mac != NO_MAC {
            tracing::warn!(
                interface = link.name,
                old = %display_mac(self.link.mac),
                new = %display_mac(link.mac),
                "the interface's Ethernet address has changed; announcing the VIPs if this host is active"
            );
            self.kernel.set_mac(link.mac);
            self.outputs.mac.send_replace(link.mac);
            self.link = link;
            self.vips.announce_all();
        } else if was_disconnected && link.has_carrier {
            tracing::info!(
                interface = link.name,
                "the interface is connected again; announcing the VIPs if this host is active"
            );
            self.link = link;
            // Another host may have taken over, and its heartbeat not have come yet.
            self.vips.announce_all_when_heard();
        }
        Ok(())
    }
}

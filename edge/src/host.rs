// SPDX-License-Identifier: Apache-2.0
//! This host and its link, as plain values for the plan. `engine` gathers them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::link::mac::Mac;
use crate::reach::{RouteTable, Tunnel};
use crate::shards::Shard;
use crate::vips::WITHHELD;

/// Another edge host on the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EdgePeer {
    pub(crate) mac: Mac,
    /// Its own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) liveness: PeerLiveness,
}

/// When another edge host was heard last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PeerLiveness {
    /// It is alive.
    Live,
    /// It was alive a short time ago, and may have lost some heartbeats only.
    Recent,
    /// It is dead. Its kernel may still forward packets.
    Dead,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostNetwork {
    /// The interface's name, for messages.
    pub(crate) interface: String,
    /// The interface's index.
    pub(crate) index: u32,
    /// The host's own addresses on the interface, without what the edge has marked.
    pub(crate) addresses: Vec<IpNet>,
    /// The routes of the main table.
    pub(crate) routes: RouteTable,
    /// The MTUs of the interfaces that routes lead to, by index; none without a tunnel.
    pub(crate) mtus: BTreeMap<u32, u32>,
    pub(crate) tunnel: Tunnel,
    pub(crate) neighbours: BTreeMap<IpAddr, Mac>,
    pub(crate) peers: Vec<EdgePeer>,
    /// VIPs that another host on the link uses.
    pub(crate) conflicts: BTreeMap<IpAddr, Mac>,
}

impl HostNetwork {
    pub(crate) fn own_addresses(&self) -> Vec<IpAddr> {
        self.addresses.iter().map(IpNet::addr).collect()
    }

    /// The lease of a VIP that this host serves.
    pub(crate) fn lease(&self, vip: IpAddr) -> u32 {
        if self.conflicts.contains_key(&vip) { WITHHELD } else { Shard::of(vip).lease() }
    }

    pub(crate) fn is_local(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|own| own.addr() == address)
    }

    /// The Ethernet addresses of the gateways of default routes with one path. Other routes' gateways may be nodes, which have the
    /// networks of Pods behind them.
    pub(crate) fn default_gateways(&self) -> BTreeSet<Mac> {
        let default = self.routes.iter().filter(|route| route.net.prefix_len() == 0);
        default.filter_map(|route| self.neighbours.get(&route.next_hop?).copied()).collect()
    }

    /// The source address for probes of a target: one on its network, else any that is not link-local.
    pub(crate) fn source_for(&self, target: IpAddr) -> Option<IpAddr> {
        let is_link_local = |address: &IpAddr| match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let of_family = || self.addresses.iter().filter(move |own| own.addr().is_ipv6() == target.is_ipv6());
        of_family()
            .find(|own| own.contains(&target))
            .map(IpNet::addr)
            .or_else(|| of_family().map(IpNet::addr).find(|address| !is_link_local(address)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostNetwork {
        HostNetwork {
            interface: "eth0".to_owned(),
            index: 3,
            addresses: ["fe80::1/64", "10.0.0.5/24", "fd00::5/64"]
                .map(|net| net.parse().expect("net"))
                .into(),
            ..HostNetwork::default()
        }
    }

    #[test]
    fn probe_source_is_on_the_targets_network() {
        for (target, source) in [("10.0.0.7", "10.0.0.5"), ("fd00::7", "fd00::5"), ("fd01::7", "fd00::5")] {
            let found = host().source_for(target.parse().expect("address"));
            assert_eq!(found, Some(source.parse().expect("address")));
        }
    }
}

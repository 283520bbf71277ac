// SPDX-License-Identifier: Apache-2.0
//! This host and its link, as plain values for the plan. `engine` gathers them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::link::mac::Mac;
use crate::link::route::Route;
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
    pub(crate) routes: Vec<Route>,
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

    /// Why a target cannot be reached on the link; `None` when it can.
    pub(crate) fn off_link(&self, target: IpAddr) -> Option<String> {
        let best = self
            .routes
            .iter()
            .filter(|route| route.net.contains(&target))
            .max_by_key(|route| route.net.prefix_len());
        let what = match best {
            Some(route) if route.device == Some(self.index) && !route.gateway => return None,
            Some(route) if route.gateway => "it is behind a gateway",
            Some(_) => "it is on another interface",
            None => "there is no route to it",
        };
        Some(format!(
            "{target} is not on the link of {}: {what}. Nodes and edge hosts must share a link",
            self.interface
        ))
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
        let route = |net: &str, device, gateway| Route {
            net: net.parse().expect("net"),
            device,
            gateway,
            next_hop: None,
        };
        HostNetwork {
            interface: "eth0".to_owned(),
            index: 3,
            addresses: ["fe80::1/64", "10.0.0.5/24", "fd00::5/64"]
                .map(|net| net.parse().expect("net"))
                .into(),
            routes: vec![
                route("0.0.0.0/0", Some(3), true),
                route("10.0.0.0/24", Some(3), false),
                route("10.0.0.128/25", Some(3), true),
                route("10.9.0.0/24", Some(4), false),
                route("fd00::/64", Some(3), false),
            ],
            ..HostNetwork::default()
        }
    }

    #[test]
    fn only_connected_routes_of_the_interface_are_on_the_link() {
        for (target, said) in [
            ("10.0.0.7", None),
            ("fd00::7", None),
            ("10.0.0.200", Some("behind a gateway")),
            ("192.0.2.1", Some("behind a gateway")),
            ("10.9.0.1", Some("another interface")),
            ("fd01::1", Some("no route")),
        ] {
            let reason = host().off_link(target.parse().expect("address"));
            assert_eq!(reason.is_some(), said.is_some(), "{target}: {reason:?}");
            assert!(reason.unwrap_or_default().contains(said.unwrap_or_default()), "{target}");
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

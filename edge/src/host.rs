// SPDX-License-Identifier: Apache-2.0
//! This host and its link, as plain values for the plan. `engine` gathers them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
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
        self.routes.defaults().filter_map(|route| self.neighbours.get(&route.next_hop?).copied()).collect()
    }

    /// Whether all follows from this network that follows from another one, if these are the targets: other routes do not matter.
    pub(crate) fn is_alike(&self, other: &Self, targets: impl FnOnce() -> HashSet<IpAddr>) -> bool {
        let Self { interface, index, addresses, routes, mtus, tunnel, neighbours, peers, conflicts } = self;
        (interface, index, addresses) == (&other.interface, &other.index, &other.addresses)
            && (tunnel, neighbours) == (&other.tunnel, &other.neighbours)
            && (peers, conflicts) == (&other.peers, &other.conflicts)
            && ((routes, mtus) == (&other.routes, &other.mtus)
                || self.default_gateways() == other.default_gateways()
                    && targets().into_iter().all(|target| self.reach(target) == other.reach(target)))
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
    use crate::link::route::Route;

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

    #[test]
    fn other_routes_do_not_matter() {
        let route = |net: &str, device, gateway: Option<&str>| Route {
            net: net.parse().expect("net"),
            device: Some(device),
            gateway: gateway.is_some(),
            next_hop: gateway.map(|gateway| gateway.parse().expect("address")),
        };
        let with = |routes: &[Route]| HostNetwork {
            routes: routes.to_vec().into(),
            neighbours: [("10.0.0.1", 1), ("10.0.0.2", 2)]
                .map(|(address, number)| (address.parse().expect("address"), [2, 0, 0, 0, 0, number]))
                .into(),
            mtus: [(3, 1500), (4, 9000)].into(),
            tunnel: Tunnel::Ready { vni: 7, port: 10_361, mtu: None },
            ..host()
        };
        let link = route("10.0.0.0/24", 3, None);
        let default = route("0.0.0.0/0", 3, Some("10.0.0.1"));
        let known = with(&[default.clone(), link.clone()]);
        let is_alike = |other: &HostNetwork, targets: &[&str]| {
            let targets = targets.iter().map(|target| target.parse().expect("address")).collect();
            other.is_alike(&known, || targets)
        };
        let targets = ["10.0.0.7", "192.0.2.1"];
        let far = route("198.51.100.0/24", 4, Some("10.1.0.1"));
        let other = with(&[default.clone(), link.clone(), far]);
        assert!(is_alike(&other, &targets) && other != known);
        assert!(!is_alike(&other, &["198.51.100.7"]), "another MTU");
        let near = route("10.0.0.0/25", 3, Some("10.0.0.1"));
        assert!(!is_alike(&with(&[default.clone(), link.clone(), near]), &targets), "behind a gateway");
        assert!(!is_alike(&with(std::slice::from_ref(&link)), &targets), "no route");
        let elsewhere = route("0.0.0.0/0", 3, Some("10.0.0.2"));
        assert!(!is_alike(&with(&[elsewhere, link.clone()]), &targets), "another router");
        let grown = HostNetwork { mtus: [(3, 9000)].into(), ..known.clone() };
        assert!(!is_alike(&grown, &targets) && is_alike(&grown, &["10.0.0.7"]));
        for changed in [
            HostNetwork { addresses: Vec::new(), ..known.clone() },
            HostNetwork { neighbours: BTreeMap::new(), ..known.clone() },
            HostNetwork { tunnel: Tunnel::Off, ..known.clone() },
            HostNetwork { conflicts: known.neighbours.clone(), ..known.clone() },
        ] {
            assert!(!is_alike(&changed, &[]));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! How this host reaches a node: on its link, through the tunnel, or not at all. Pure; `plan` asks it for each target.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_edge_dataplane::Path;
use steerage_model::TunnelReceiver;
use steerage_tunnel::{mac, overhead};

use crate::host::HostNetwork;
use crate::link::route::Route;

/// No link of these protocols has a smaller MTU (RFC 791, RFC 8200).
const LEAST_MTU: [u16; 2] = [576, 1280];

/// The tunnel to nodes off the link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tunnel {
    /// No flag asks for it.
    #[default]
    Off,
    Ready {
        vni: u32,
        /// The UDP port at which nodes receive.
        port: u16,
        /// The longest packet in it, if a flag says so.
        mtu: Option<u16>,
    },
    /// Its device is missing, and why.
    Failed(String),
}

/// The routes of the main table, to find the one of an address without looking at all: nodes and routes may be thousands.
#[derive(Clone, Debug, Default)]
pub(crate) struct RouteTable(Arc<Routes>);

#[derive(Debug, Default)]
struct Routes {
    all: Vec<Route>,
    /// The first route of each destination, which has the lowest metric.
    by_net: HashMap<IpNet, usize>,
    /// The lengths of prefixes of IPv4 and of IPv6.
    lengths: [BTreeSet<u8>; 2],
    /// The interfaces that routes lead to.
    devices: BTreeSet<u32>,
}

impl From<Vec<Route>> for RouteTable {
    fn from(all: Vec<Route>) -> Self {
        let mut routes = Routes::default();
        for (position, route) in all.iter().enumerate() {
            routes.by_net.entry(route.net.trunc()).or_insert(position);
            let [v4, v6] = &mut routes.lengths;
            (if route.net.addr().is_ipv6() { v6 } else { v4 }).insert(route.net.prefix_len());
            routes.devices.extend(route.device);
        }
        Self(Arc::new(Routes { all, ..routes }))
    }
}

impl PartialEq for RouteTable {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.all == other.0.all
    }
}

impl Eq for RouteTable {}

impl RouteTable {
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Route> {
        self.0.all.iter()
    }

    /// The table as it was read again.
    pub(crate) fn updated(&self, read: Vec<Route>) -> Self {
        if read == self.0.all { self.clone() } else { read.into() }
    }

    /// The interfaces that routes lead to.
    pub(crate) fn devices(&self) -> &BTreeSet<u32> {
        &self.0.devices
    }

    /// The default routes of both families.
    pub(crate) fn defaults(&self) -> impl Iterator<Item = &Route> {
        self.0.all.iter().filter(|route| route.net.prefix_len() == 0)
    }

    /// The route with the longest prefix that has this address.
    fn best(&self, target: IpAddr) -> Option<&Route> {
        let [v4, v6] = &self.0.lengths;
        let lengths = if target.is_ipv6() { v6 } else { v4 };
        let of_length = |length: &u8| {
            let net = IpNet::new(target, *length).ok()?.trunc();
            self.0.all.get(*self.0.by_net.get(&net)?)
        };
        lengths.iter().rev().find_map(of_length)
    }
}

impl HostNetwork {
    /// How a target is reached, or why it is not.
    pub(crate) fn reach(&self, target: IpAddr) -> Result<Path, String> {
        if self.is_local(target) {
            return Ok(Path::Local);
        }
        let best = self.routes.best(target);
        let what = match best {
            Some(route) if route.device == Some(self.index) && !route.gateway => return Ok(Path::Neighbour),
            Some(route) if route.gateway => "it is behind a gateway",
            Some(_) => "it is on another interface",
            None => "there is no route to it",
        };
        let off_link = format!("{target} is not on the link of {}: {what}", self.interface);
        match (&self.tunnel, best) {
            (Tunnel::Ready { vni, mtu, port: _ }, Some(route)) => {
                let mtu = mtu.unwrap_or_else(|| self.tunnel_mtu(route, target.is_ipv6()));
                Ok(Path::Tunnel { mac: mac(*vni), mtu, vni: *vni })
            }
            (Tunnel::Failed(error), Some(_)) => {
                Err(format!("{off_link}, and the tunnel does not work: {error}"))
            }
            (Tunnel::Off, Some(_)) => Err(format!(
                "{off_link}. Nodes and edge hosts must share a link, or the edge must have a tunnel (--tunnel-vni)"
            )),
            (_, None) => Err(off_link),
        }
    }

    /// Why a target that is reached by this path gets nothing all the same: its node states that it does not receive from this host's
    /// tunnel. A node that states nothing of it is believed to receive.
    pub(crate) fn refusal(
        &self,
        target: IpAddr,
        path: &Path,
        stated: Option<TunnelReceiver>,
    ) -> Option<String> {
        let (Tunnel::Ready { vni, port, .. }, Path::Tunnel { .. }) = (&self.tunnel, path) else {
            return None;
        };
        let why = match stated? {
            TunnelReceiver::Unknown => return None,
            TunnelReceiver::Receives { vni: stated, port: at } if (stated, at) == (*vni, *port) => {
                return None;
            }
            TunnelReceiver::Receives { vni: stated, port: at } => {
                &format!("it receives VNI {stated} at port {at}, not {vni} at {port}")
            }
            TunnelReceiver::Off => "its agent runs without --edge-tunnel-vni",
            TunnelReceiver::EdgeHost => "an edge host's device steerage-vx has the port",
            TunnelReceiver::Failed => "its agent's log says why",
        };
        Some(format!("{target} is off the link, and its node does not receive from the tunnel: {why}"))
    }

    /// What the interface to which a route leads has room for.
    fn tunnel_mtu(&self, route: &Route, v6: bool) -> u16 {
        const ETHERNET: u32 = 1500;
        let device = route.device.unwrap_or(self.index);
        let mtu = self.mtus.get(&device).or(self.mtus.get(&self.index)).copied().unwrap_or(ETHERNET);
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        mtu.saturating_sub(overhead(v6)).max(LEAST_MTU[usize::from(v6)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("address")
    }

    fn route(net: &str, device: u32, gateway: bool) -> Route {
        Route { net: net.parse().expect("net"), device: Some(device), gateway, next_hop: None }
    }

    fn host(tunnel: Tunnel) -> HostNetwork {
        HostNetwork {
            interface: "eth0".to_owned(),
            index: 3,
            addresses: vec!["10.0.0.5/24".parse().expect("net"), "fd00::5/64".parse().expect("net")],
            routes: vec![
                route("0.0.0.0/0", 3, true),
                route("10.0.0.0/24", 3, false),
                route("10.0.0.0/24", 4, false),
                route("10.0.0.128/25", 3, true),
                route("10.9.0.0/24", 4, false),
                route("fd00::/64", 3, false),
                route("fd02::/64", 3, true),
                route("fd03::/64", 5, true),
            ]
            .into(),
            mtus: [(3, 1500), (4, 9000), (5, 1280)].into(),
            tunnel,
            ..HostNetwork::default()
        }
    }

    const TUNNEL: Tunnel = Tunnel::Ready { vni: 7, port: 10_361, mtu: None };

    #[test]
    fn only_connected_routes_of_the_interface_are_on_the_link() {
        for (target, said) in [
            (
                "10.0.0.200",
                "behind a gateway. Nodes and edge hosts must share a link, or the edge must have a tunnel",
            ),
            ("192.0.2.1", "behind a gateway"),
            ("10.9.0.1", "another interface"),
            ("fd01::1", "no route"),
        ] {
            let reason = host(Tunnel::Off).reach(ip(target)).expect_err(target);
            assert!(reason.contains(said), "{target}: {reason}");
        }
        for tunnel in [Tunnel::Off, TUNNEL, Tunnel::Failed("no device".to_owned())] {
            let host = host(tunnel);
            for (target, path) in
                [("10.0.0.5", Path::Local), ("10.0.0.7", Path::Neighbour), ("fd00::7", Path::Neighbour)]
            {
                assert_eq!(host.reach(ip(target)), Ok(path), "{target}");
            }
        }
    }

    #[test]
    fn nodes_off_the_link_are_tunnelled_with_what_the_way_has_room_for() {
        for (target, mtu) in [
            ("10.0.0.200", 1450),
            ("192.0.2.1", 1450),
            ("10.9.0.1", 8950),
            ("fd02::1", 1430),
            ("fd03::1", 1280),
        ] {
            let tunnelled = |mtu| Ok(Path::Tunnel { mac: [2, 0x53, 0x54, 0, 0, 7], mtu, vni: 7 });
            assert_eq!(host(TUNNEL).reach(ip(target)), tunnelled(mtu), "{target}");
            let given = Tunnel::Ready { vni: 7, port: 10_361, mtu: Some(1300) };
            assert_eq!(host(given).reach(ip(target)), tunnelled(1300), "{target}");
        }
        assert!(host(TUNNEL).reach(ip("fd01::1")).is_err_and(|reason| reason.ends_with("no route to it")));
        let failed = host(Tunnel::Failed("port in use".to_owned())).reach(ip("10.0.0.200"));
        assert!(failed.is_err_and(|reason| reason.ends_with("the tunnel does not work: port in use")));
    }

    #[test]
    fn only_nodes_off_the_link_are_refused_for_what_they_state() {
        let receives = |vni, port| Some(TunnelReceiver::Receives { vni, port });
        let (on_link, own, far) = ("10.0.0.7", "10.0.0.5", "fd02:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
        let far_host = |tunnel| HostNetwork {
            routes: vec![route("::/0", 3, true), route("10.0.0.0/24", 3, false)].into(),
            ..host(tunnel)
        };
        let refusal = |target: &str, stated| {
            let host = far_host(TUNNEL);
            host.refusal(ip(target), &host.reach(ip(target)).expect("a path"), stated)
        };
        for (stated, said) in [
            (None, None),
            (receives(7, 10_361), None),
            (Some(TunnelReceiver::Unknown), None),
            (receives(8, 10_361), Some("it receives VNI 8 at port 10361, not 7 at 10361")),
            (receives(7, 10_362), Some("it receives VNI 7 at port 10362, not 7 at 10361")),
            (receives(u32::MAX, u16::MAX), Some("it receives VNI 4294967295 at port 65535, not 7 at 10361")),
            (Some(TunnelReceiver::Off), Some("its agent runs without --edge-tunnel-vni")),
            (Some(TunnelReceiver::EdgeHost), Some("an edge host's device steerage-vx has the port")),
            (Some(TunnelReceiver::Failed), Some("its agent's log says why")),
        ] {
            let reason = refusal(far, stated);
            assert_eq!(reason.as_ref().and_then(|reason| reason.split(": ").last()), said, "{stated:?}");
            assert!(reason.is_none_or(|reason| reason.len() <= 160), "it would be cut in the status");
            assert_eq!([on_link, own].map(|target| refusal(target, stated)), [None, None]);
        }
        // The reason is another one then.
        let failed = far_host(Tunnel::Failed("port in use".to_owned()));
        let path = far_host(TUNNEL).reach(ip(far)).expect("a path");
        assert_eq!(failed.refusal(ip(far), &path, Some(TunnelReceiver::Off)), None);
    }

    proptest! {
        #[test]
        fn best_route_is_that_of_a_search_of_all(
            routes in prop::collection::vec((any::<u8>(), 0..=32_u8, 0..4_u32), 0..40),
            targets in prop::collection::vec(any::<u8>(), 1..20),
        ) {
            let routes: Vec<_> = routes
                .into_iter()
                .map(|(octet, length, device)| route(&format!("10.0.{}.{octet}/{length}", octet % 3), device, false))
                .collect();
            let table = RouteTable::from(routes.clone());
            for octet in targets {
                let target = IpAddr::from([10, 0, octet % 3, octet]);
                let has = |route: &&Route| route.net.contains(&target);
                let longest = routes.iter().filter(has).map(|route| route.net.prefix_len()).max();
                let first = routes.iter().find(|route| has(route) && Some(route.net.prefix_len()) == longest);
                prop_assert_eq!(table.best(target), first);
            }
        }
    }
}

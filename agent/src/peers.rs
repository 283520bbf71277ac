// SPDX-License-Identifier: Apache-2.0
//! Where this node can send packets so that they reach another node with their addresses unchanged. Pure: [`crate::kernel::NextHops`]
//! knows the routes, and the planner asks for each node.

use std::net::IpAddr;

use steerage_model::{Family, Node};

use crate::plan::PeerAddresses;

/// What flags say about it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardToPeers {
    /// Tunnel devices that may be used to nodes off the link.
    pub tunnel_devices: Vec<String>,
}

/// The first step on the way to an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextHop {
    /// The device that packets leave by.
    pub device: String,
    /// The address itself is a neighbour there.
    pub is_on_link: bool,
}

impl ForwardToPeers {
    /// Where a node is reached: at its own address, if that is on the link; else behind a tunnel that leads to its pods. A router would
    /// send the packet back to the load balancer.
    pub fn addresses(
        &self,
        node: &Node,
        mut next_hop: impl FnMut(IpAddr) -> Option<NextHop>,
    ) -> PeerAddresses {
        let mut of = |family| {
            let own = node.addresses.iter().copied().find(|addr| Family::of(*addr) == family);
            let own = own.filter(|addr| next_hop(*addr).is_some_and(|hop| hop.is_on_link));
            own.or_else(|| {
                let mut pods = node.pod_cidrs.iter().filter(|_| !self.tunnel_devices.is_empty());
                let pods = pods.find(|net| Family::of(net.addr()) == family)?.network();
                next_hop(pods).is_some_and(|hop| self.tunnel_devices.contains(&hop.device)).then_some(pods)
            })
        };
        PeerAddresses { v4: of(Family::V4), v6: of(Family::V6) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn nodes_are_reached_on_the_link_or_by_an_allowed_tunnel() {
        let node = Node {
            addresses: vec![addr("10.0.0.2"), addr("fd00::2")],
            pod_cidrs: vec!["10.244.2.0/24".parse().unwrap(), "fd44:2::/64".parse().unwrap()],
            ..Node::default()
        };
        let hop = |device: &str, is_on_link| Some(NextHop { device: device.to_owned(), is_on_link });
        let routed = |to: IpAddr| match to.to_string().as_str() {
            "10.0.0.2" => hop("eth0", true),
            "fd00::2" => hop("eth0", false),
            "10.244.2.0" => hop("vxlan0", false),
            "fd44:2::" => hop("vxlan0", true),
            other => panic!("{other}"),
        };
        let with = |devices: &[&str]| {
            let tunnel_devices = devices.iter().map(|name| (*name).to_owned()).collect();
            ForwardToPeers { tunnel_devices }.addresses(&node, routed)
        };
        let on_link = PeerAddresses { v4: Some(addr("10.0.0.2")), v6: None };
        assert_eq!(with(&[]), on_link);
        assert_eq!(with(&["eth0"]), on_link, "another device");
        assert_eq!(with(&["eth1", "vxlan0"]), PeerAddresses { v6: Some(addr("fd44:2::")), ..on_link });
        let unreachable = ForwardToPeers::default().addresses(&node, |_| None);
        assert_eq!(unreachable, PeerAddresses::default());
    }
}

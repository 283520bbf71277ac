// SPDX-License-Identifier: Apache-2.0
//! AgentSettings and the node's own object make the node's place in the cluster. Pure, but for [`host_addresses`].

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use steerage_model::{Family, Node, ServiceCidr};
use steerage_watch::Store;

use crate::local_node::{LocalNode, LocalPods};

/// How to tell this node's pods from everything else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetectLocal {
    /// They are in the node's `spec.podCIDRs`.
    NodeCidrs,
    /// They are in these networks: sources in them are taken for pods, wherever they run.
    ClusterCidrs(Vec<IpNet>),
    /// They send by this bridge.
    Bridge(String),
    /// They send by interfaces whose names begin so.
    InterfacePrefix(String),
    /// They are not told apart: a `ClusterIP` then keeps every client's address.
    Nothing,
}

/// On which of the node's addresses node ports are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// On the node's primary address of each family, as kube-proxy's nftables mode does.
    Primary,
    /// On the host's addresses in these networks, never on loopback.
    In(Vec<IpNet>),
}

impl FromStr for NodePortAddresses {
    type Err = ipnet::AddrParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "primary" {
            return Ok(Self::Primary);
        }
        text.split(',').map(|net| net.trim().parse()).collect::<Result<_, _>>().map(Self::In)
    }
}

/// Addresses as an address pool names them: a network, an address, or the first and the last with a dash between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressRange(pub Vec<IpNet>);

/// Why a range of addresses cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no network, no address, and no range of addresses of one family")]
pub struct BadRange(String);

impl FromStr for AddressRange {
    type Err = BadRange;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadRange(text.to_owned());
        if let Ok(net) = text.parse::<IpNet>() {
            return Ok(Self(vec![net.trunc()]));
        }
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let nets = match (first.trim().parse().map_err(|_| bad())?, last.trim().parse().map_err(|_| bad())?) {
            (IpAddr::V4(first), IpAddr::V4(last)) if first <= last => {
                Ipv4Subnets::new(first, last, 0).map(IpNet::V4).collect()
            }
            (IpAddr::V6(first), IpAddr::V6(last)) if first <= last => {
                Ipv6Subnets::new(first, last, 0).map(IpNet::V6).collect()
            }
            _ => return Err(bad()),
        };
        Ok(Self(nets))
    }
}

/// What flags say of the node.
#[derive(Debug, Clone)]
pub struct AgentSettings {
    /// The node's name.
    pub node: String,
    /// Whether all Services are served, or only those labelled for us.
    pub all_services: bool,
    /// See [`NodePortAddresses`].
    pub node_port_addresses: NodePortAddresses,
    /// See [`DetectLocal`].
    pub detect_local: DetectLocal,
    /// Networks of which only what a Service has may be reached.
    pub unserved: Vec<IpNet>,
}

impl AgentSettings {
    /// The local_node of this node. `host` are the host's own addresses.
    pub fn local_node(&self, node: &Node, host: &[IpAddr]) -> LocalNode {
        let addresses: Vec<_> = [Family::V4, Family::V6]
            .into_iter()
            .filter_map(|family| node.addresses.iter().copied().find(|addr| Family::of(*addr) == family))
            .collect();
        let node_port_addresses = match &self.node_port_addresses {
            NodePortAddresses::Primary => addresses.clone(),
            NodePortAddresses::In(nets) => {
                let usable = |addr: &IpAddr| !addr.is_loopback() && nets.iter().any(|net| net.contains(addr));
                host.iter().copied().filter(usable).collect()
            }
        };
        LocalNode {
            node: self.node.clone(),
            zone: node.zone.clone(),
            addresses,
            node_port_addresses,
            all_services: self.all_services,
        }
    }

    /// What tells this node's pods from everything else.
    pub fn pods(&self, node: &Node) -> LocalPods {
        match &self.detect_local {
            DetectLocal::NodeCidrs => LocalPods::Networks(node.pod_cidrs.clone()),
            DetectLocal::ClusterCidrs(nets) => LocalPods::Networks(nets.clone()),
            DetectLocal::Bridge(name) => LocalPods::Interface(name.clone()),
            DetectLocal::InterfacePrefix(prefix) => LocalPods::InterfacePrefix(prefix.clone()),
            DetectLocal::Nothing => LocalPods::default(),
        }
    }

    /// The networks of which only what a Service has may be reached: those of cluster IPs, too.
    pub fn unserved(&self, service_cidrs: &Store<ServiceCidr>) -> Vec<IpNet> {
        let given = service_cidrs.iter().flat_map(|cidr| &cidr.networks);
        let all: BTreeSet<_> = self.unserved.iter().chain(given).map(IpNet::trunc).collect();
        all.into_iter().collect()
    }

    /// The host's addresses, where the settings need them.
    pub fn host_addresses(&self) -> Vec<IpAddr> {
        match self.node_port_addresses {
            NodePortAddresses::Primary => Vec::new(),
            NodePortAddresses::In(_) => host_addresses(),
        }
    }
}

/// All addresses of this host's interfaces; link-local ones are left out: they mean nothing without their link.
pub fn host_addresses() -> Vec<IpAddr> {
    let interfaces = match nix::ifaddrs::getifaddrs() {
        Ok(interfaces) => interfaces,
        Err(error) => {
            tracing::warn!(%error, "the host's addresses cannot be listed");
            return Vec::new();
        }
    };
    let mut addresses: Vec<_> = interfaces
        .filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|addr| IpAddr::V4(addr.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|addr| IpAddr::V6(addr.ip())))
        })
        .filter(|addr| !matches!(addr, IpAddr::V6(addr) if addr.is_unicast_link_local()))
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

#[cfg(test)]
mod tests {
    use steerage_watch::Event;

    use super::*;

    fn settings(node_ports: &str) -> AgentSettings {
        AgentSettings {
            node: "a".to_owned(),
            all_services: true,
            node_port_addresses: node_ports.parse().unwrap(),
            detect_local: DetectLocal::NodeCidrs,
            unserved: Vec::new(),
        }
    }

    fn addrs(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|addr| addr.parse().unwrap()).collect()
    }

    #[test]
    fn node_ports_are_on_the_first_address_of_each_family() {
        let node = Node {
            addresses: addrs(&["fd00::1", "10.0.0.1", "10.0.0.2"]),
            pod_cidrs: vec!["10.244.0.0/24".parse().unwrap()],
            ..Node::default()
        };
        let local_node = settings("primary").local_node(&node, &[]);
        assert_eq!(local_node.node_port_addresses, addrs(&["10.0.0.1", "fd00::1"]));
        assert_eq!(settings("primary").pods(&node), LocalPods::Networks(node.pod_cidrs));
    }

    #[test]
    fn what_only_services_may_serve_is_named_by_flags_and_by_the_cluster() {
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect::<Vec<IpNet>>();
        let mut cidrs = Store::default();
        for (name, networks) in [("a", nets(&["10.96.0.0/16", "fd00::/112"])), ("b", nets(&["10.96.0.0/16"]))]
        {
            cidrs.apply(Event::Apply(ServiceCidr { name: name.to_owned(), networks }), |_, _| {});
        }
        let settings = AgentSettings { unserved: nets(&["192.0.2.0/24"]), ..settings("primary") };
        assert_eq!(settings.unserved(&cidrs), nets(&["10.96.0.0/16", "192.0.2.0/24", "fd00::/112"]));
        cidrs.apply(Event::Delete("a".to_owned()), |_, _| {});
        assert_eq!(settings.unserved(&cidrs), nets(&["10.96.0.0/16", "192.0.2.0/24"]));
    }

    #[test]
    fn ranges_are_named_as_in_address_pools() {
        let nets = |text: &str| {
            let range = text.parse::<AddressRange>().ok()?;
            Some(range.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
        };
        for (text, expected) in [
            ("10.0.200.7/24", Some("10.0.200.0/24")),
            ("10.0.200.7", Some("10.0.200.7/32")),
            ("10.0.200.254-10.0.201.1", Some("10.0.200.254/31 10.0.201.0/31")),
            ("fd00:200::10-fd00:200::13", Some("fd00:200::10/126")),
            ("fd00::1-10.0.0.1", None),
            ("10.0.0.2-10.0.0.1", None),
            ("example.org", None),
        ] {
            assert_eq!(nets(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn or_on_those_that_a_flag_allows_but_never_on_loopback() {
        let host = addrs(&["127.0.0.1", "::1", "10.0.0.1", "192.168.1.1", "fd00::1"]);
        let local_node = |flag: &str| settings(flag).local_node(&Node::default(), &host).node_port_addresses;
        assert_eq!(local_node("0.0.0.0/0, ::/0"), addrs(&["10.0.0.1", "192.168.1.1", "fd00::1"]));
        assert_eq!(local_node("192.168.0.0/16"), addrs(&["192.168.1.1"]));
        assert!("eth0".parse::<NodePortAddresses>().is_err());
    }
}

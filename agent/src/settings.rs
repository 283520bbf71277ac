// SPDX-License-Identifier: Apache-2.0
//! What flags say, and the [`LocalNode`] that follows from it and the Node object.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use steerage_model::{Family, Node, ServiceCidr};
use steerage_watch::Store;

use crate::kernel::host_addresses;
use crate::local_node::{LocalNode, LocalPods};
use crate::peers::ForwardToPeers;
use crate::plan::{ClusterNodes, ElementLimits, ExternalIps};

/// How to recognise traffic from local pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DetectLocal {
    /// Its source is in the node's `spec.podCIDRs`.
    NodeCidrs,
    /// Its source is in these networks, those of all nodes' pods.
    ClusterCidrs(Vec<IpNet>),
    /// It arrives by this bridge.
    Bridge(String),
    /// It arrives by an interface whose name begins so.
    InterfacePrefix(String),
    /// It is not recognised: a `ClusterIP` then keeps every client's address.
    Nothing,
}

/// The node's addresses that serve node ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// The primary address of each family, as in kube-proxy's nftables mode.
    Primary,
    /// The host's addresses in these networks, except loopback.
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

/// Addresses as an `AddressPool` names them: a network, an address, or `first-last`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressRange(pub Vec<IpNet>);

/// Text that is no [`AddressRange`].
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a network, an address, or a range first-last of one family")]
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

/// What flags say about this node.
#[derive(Debug, Clone)]
pub struct AgentSettings {
    /// The node's name.
    pub node: String,
    /// Serve all Services, not only those labelled for Steerage.
    pub kube_proxy_replacement: bool,
    /// See [`NodePortAddresses`].
    pub node_port_addresses: NodePortAddresses,
    /// See [`DetectLocal`].
    pub detect_local: DetectLocal,
    /// Clients of cluster IPs get the node's source address, local pods too.
    pub masquerade_all: bool,
    /// The node's own address of its family, in place of that in the Node's status.
    pub node_ip: Option<IpAddr>,
    /// Networks whose addresses serve nothing but Services.
    pub unassigned: Vec<IpNet>,
    /// Serve no external IPs.
    pub deny_external_ips: bool,
    /// The API server as flags name it, if they do by its address.
    pub api_server: Option<SocketAddr>,
    /// What a Service and a namespace may have of the kernel's memory.
    pub element_limits: ElementLimits,
    /// Forward packets that find no local endpoint to other nodes, and to which.
    pub forward_to_peers: Option<ForwardToPeers>,
}

impl AgentSettings {
    /// This node as its object describes it. `host` are the host's own addresses.
    pub fn local_node(
        &self,
        node: &Node,
        host: &[IpAddr],
        service_cidrs: &Store<ServiceCidr>,
        api_servers: Vec<SocketAddr>,
    ) -> LocalNode {
        // As kube-proxy: the first of each family, and an external one only where the node has no internal one.
        let given = || self.node_ip.iter().chain(&node.addresses).chain(&node.external_addresses).copied();
        let addresses: Vec<_> = [Family::V4, Family::V6]
            .into_iter()
            .filter_map(|family| given().find(|addr| Family::of(*addr) == family))
            .collect();
        let node_port_addresses = match &self.node_port_addresses {
            NodePortAddresses::Primary => addresses.clone(),
            NodePortAddresses::In(nets) => {
                let usable = |addr: &IpAddr| !addr.is_loopback() && nets.iter().any(|net| net.contains(addr));
                host.iter().copied().filter(usable).collect()
            }
        };
        let mut cidrs: Vec<_> = service_cidrs.iter().flat_map(|cidr| &cidr.networks).copied().collect();
        cidrs.sort_unstable();
        cidrs.dedup();
        let external_ips = ExternalIps {
            denied: self.deny_external_ips,
            service_cidrs: cidrs,
            pods: match &self.detect_local {
                DetectLocal::ClusterCidrs(nets) => node.pod_cidrs.iter().chain(nets).copied().collect(),
                _ => node.pod_cidrs.clone(),
            },
            node: given().collect(),
            api_servers,
            cluster: ClusterNodes::default(),
        };
        LocalNode {
            external_ips,
            node: self.node.clone(),
            zone: node.zone.clone(),
            addresses,
            node_port_addresses,
            kube_proxy_replacement: self.kube_proxy_replacement,
            masquerade_all: self.masquerade_all,
            peers: None,
            element_limits: self.element_limits,
        }
    }

    /// How traffic from local pods is recognised.
    pub fn local_pods(&self, node: &Node) -> LocalPods {
        match &self.detect_local {
            DetectLocal::NodeCidrs => LocalPods::Networks(node.pod_cidrs.clone()),
            DetectLocal::ClusterCidrs(nets) => LocalPods::Networks(nets.clone()),
            DetectLocal::Bridge(name) => LocalPods::Interface(name.clone()),
            DetectLocal::InterfacePrefix(prefix) => LocalPods::InterfacePrefix(prefix.clone()),
            DetectLocal::Nothing => LocalPods::default(),
        }
    }

    /// Networks whose addresses serve nothing but Services: those of flags and, without kube-proxy, those of cluster IPs.
    pub fn unassigned(&self, service_cidrs: &Store<ServiceCidr>) -> Vec<IpNet> {
        let given = service_cidrs.iter().flat_map(|cidr| &cidr.networks);
        let given = given.filter(|_| self.kube_proxy_replacement);
        let all: BTreeSet<_> = self.unassigned.iter().chain(given).map(IpNet::trunc).collect();
        all.into_iter().collect()
    }

    /// The host's addresses, if node ports are served at some of them.
    pub fn host_addresses(&self) -> io::Result<Vec<IpAddr>> {
        match self.node_port_addresses {
            NodePortAddresses::Primary => Ok(Vec::new()),
            NodePortAddresses::In(_) => host_addresses(),
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_watch::Event;

    use super::*;

    fn settings(node_ports: &str) -> AgentSettings {
        AgentSettings {
            node: "a".to_owned(),
            kube_proxy_replacement: true,
            node_port_addresses: node_ports.parse().unwrap(),
            detect_local: DetectLocal::NodeCidrs,
            masquerade_all: false,
            node_ip: None,
            unassigned: Vec::new(),
            deny_external_ips: false,
            api_server: None,
            element_limits: ElementLimits::default(),
            forward_to_peers: None,
        }
    }

    fn addrs(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|addr| addr.parse().unwrap()).collect()
    }

    #[test]
    fn node_ports_are_served_on_the_first_address_of_each_family() {
        let node = Node {
            addresses: addrs(&["fd00::1", "10.0.0.1", "10.0.0.2"]),
            pod_cidrs: vec!["10.244.0.0/24".parse().unwrap()],
            ..Node::default()
        };
        let local_node = settings("primary").local_node(&node, &[], &Store::default(), Vec::new());
        assert_eq!(local_node.node_port_addresses, addrs(&["10.0.0.1", "fd00::1"]));
        assert_eq!(local_node.external_ips.pods, node.pod_cidrs);
        assert_eq!(settings("primary").local_pods(&node), LocalPods::Networks(node.pod_cidrs.clone()));
        let all = DetectLocal::ClusterCidrs(vec!["10.244.0.0/16".parse().unwrap()]);
        let settings = AgentSettings { detect_local: all, ..settings("primary") };
        let local_node = settings.local_node(&node, &[], &Store::default(), Vec::new());
        assert_eq!(local_node.external_ips.pods.len(), 2, "that of the cluster, too");
    }

    #[test]
    fn node_addresses_are_internal_ones_then_external_ones() {
        let node = |internal: &[&str], external: &[&str]| Node {
            addresses: addrs(internal),
            external_addresses: addrs(external),
            ..Node::default()
        };
        for (node_ip, node, expected) in [
            (None, node(&["10.0.0.1"], &["203.0.113.1", "2001:db8::1"]), addrs(&["10.0.0.1", "2001:db8::1"])),
            (None, node(&[], &["203.0.113.1"]), addrs(&["203.0.113.1"])),
            (None, node(&[], &[]), addrs(&[])),
            (Some("10.9.0.1"), node(&["10.0.0.1", "fd00::1"], &[]), addrs(&["10.9.0.1", "fd00::1"])),
        ] {
            let node_ip = node_ip.map(|ip| ip.parse().unwrap());
            let settings = AgentSettings { node_ip, ..settings("primary") };
            let local_node = settings.local_node(&node, &[], &Store::default(), Vec::new());
            assert_eq!(local_node.node_port_addresses, expected, "{node:?}");
            for own in node.addresses.iter().chain(&node.external_addresses) {
                assert!(local_node.external_ips.node.contains(own), "no Service takes {own}");
            }
        }
    }

    #[test]
    fn networks_of_one_family_close_the_other() {
        let host = addrs(&["10.0.0.1", "fd00::1"]);
        let served = |flag: &str| {
            let local_node =
                settings(flag).local_node(&Node::default(), &host, &Store::default(), Vec::new());
            local_node.node_port_addresses
        };
        assert_eq!(served("10.0.0.0/8"), addrs(&["10.0.0.1"]));
        assert_eq!(served("10.0.0.0/8,::/0"), host);
    }

    #[test]
    fn guarded_networks_come_from_flags_and_service_cidrs() {
        let nets = |list: &[&str]| list.iter().map(|net| net.parse().unwrap()).collect::<Vec<IpNet>>();
        let mut cidrs = Store::default();
        for (name, networks) in [("a", nets(&["10.96.0.0/16", "fd00::/112"])), ("b", nets(&["10.96.0.0/16"]))]
        {
            cidrs.apply(Event::Apply(ServiceCidr { name: name.to_owned(), networks }), |_, _| {});
        }
        let settings = AgentSettings { unassigned: nets(&["192.0.2.0/24"]), ..settings("primary") };
        assert_eq!(settings.unassigned(&cidrs), nets(&["10.96.0.0/16", "192.0.2.0/24", "fd00::/112"]));
        let beside = AgentSettings { kube_proxy_replacement: false, ..settings.clone() };
        assert_eq!(beside.unassigned(&cidrs), nets(&["192.0.2.0/24"]), "kube-proxy serves the others");
        cidrs.apply(Event::Delete { key: "a".to_owned(), version: String::new() }, |_, _| {});
        assert_eq!(settings.unassigned(&cidrs), nets(&["10.96.0.0/16", "192.0.2.0/24"]));
    }

    #[test]
    fn address_ranges_parse_as_in_address_pools() {
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
    fn node_ports_are_served_on_allowed_addresses_except_loopback() {
        let host = addrs(&["127.0.0.1", "::1", "10.0.0.1", "192.168.1.1", "fd00::1"]);
        let local_node = |flag: &str| {
            settings(flag)
                .local_node(&Node::default(), &host, &Store::default(), Vec::new())
                .node_port_addresses
        };
        assert_eq!(local_node("0.0.0.0/0, ::/0"), addrs(&["10.0.0.1", "192.168.1.1", "fd00::1"]));
        assert_eq!(local_node("192.168.0.0/16"), addrs(&["192.168.1.1"]));
        assert!("eth0".parse::<NodePortAddresses>().is_err());
    }
}

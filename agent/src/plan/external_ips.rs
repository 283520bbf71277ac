// SPDX-License-Identifier: Apache-2.0
//! Which external IPs are served. Any user may name any address in `externalIPs`, and thereby take what others send there
//! (CVE-2020-8554). Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Key, Node};

/// The addresses at which no external IP is served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExternalIps {
    /// None is served at all.
    pub denied: bool,
    /// The networks of cluster IPs.
    pub service_cidrs: Vec<IpNet>,
    /// The networks of this node's pods, and those of all pods that are known. A packet that another node translated to a pod passes
    /// this node's rules once more.
    pub pods: Vec<IpNet>,
    /// Addresses of this node.
    pub node: Vec<IpAddr>,
    /// Where API servers listen.
    pub api_servers: Vec<SocketAddr>,
    /// What belongs to the cluster's nodes.
    pub cluster: ClusterNodes,
}

/// What is known of the cluster's nodes, this one among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ClusterNodes {
    /// Nothing: external IPs are served all the same.
    #[default]
    Unknown,
    /// They are being listed, and external IPs wait for that.
    Awaited,
    /// All that the Nodes say.
    Known(Arc<NodeNetworks>),
}

/// The addresses of nodes, and the networks of their pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeNetworks {
    addresses: BTreeSet<IpAddr>,
    pods: BTreeSet<IpNet>,
    /// The lengths of prefixes in `pods`: few, so that thousands of networks need not be looked at one by one.
    lengths: BTreeSet<u8>,
}

impl<'a> FromIterator<&'a Node> for NodeNetworks {
    fn from_iter<T: IntoIterator<Item = &'a Node>>(nodes: T) -> Self {
        let mut networks = Self::default();
        for node in nodes {
            networks.addresses.extend(node.addresses.iter().chain(&node.external_addresses));
            networks.pods.extend(node.pod_cidrs.iter().map(IpNet::trunc));
        }
        networks.lengths = networks.pods.iter().map(IpNet::prefix_len).collect();
        networks
    }
}

impl NodeNetworks {
    fn has_pod(&self, addr: IpAddr) -> bool {
        let nets = self.lengths.iter().filter_map(|length| IpNet::new(addr, *length).ok());
        nets.map(|net| net.trunc()).any(|net| self.pods.contains(&net))
    }

    fn refusal(&self, addr: IpAddr) -> Option<Refusal> {
        let is_node = self.addresses.contains(&addr).then_some(Refusal::OtherNode);
        is_node.or_else(|| self.has_pod(addr).then_some(Refusal::Pod))
    }
}

impl ClusterNodes {
    fn refusal(&self, addr: IpAddr) -> Option<Refusal> {
        match self {
            Self::Unknown => None,
            Self::Awaited => Some(Refusal::Awaited),
            Self::Known(networks) => networks.refusal(addr),
        }
    }
}

/// Why an external IP is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// `--deny-service-external-ips`.
    Denied,
    /// It is in the networks of cluster IPs.
    ServiceCidr,
    /// It is in a network of pods.
    Pod,
    /// This node has it.
    Node,
    /// Another node has it.
    OtherNode,
    /// An API server listens there.
    ApiServer,
    /// It may be the address of a node: see [`ClusterNodes::Awaited`].
    Awaited,
}

impl Refusal {
    /// Whether it ends by itself within seconds.
    pub fn is_temporary(self) -> bool {
        self == Self::Awaited
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Denied => "--deny-service-external-ips is set",
            Self::ServiceCidr => "it is in a ServiceCIDR, whose addresses only the API server assigns",
            Self::Pod => "it is in a network of pods",
            Self::Node => "it is an address of this node",
            Self::OtherNode => "it is an address of another node",
            Self::ApiServer => "an API server listens there",
            Self::Awaited => "the cluster's nodes are being listed, and it may be an address of one",
        })
    }
}

/// An external IP of a Service that is not served.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RefusedExternalIp {
    /// The Service.
    pub service: Key,
    /// The address.
    pub addr: IpAddr,
    /// Why.
    pub refusal: Refusal,
}

impl ExternalIps {
    /// Why an external IP is not served at a port; `None` if it is.
    pub fn refusal(&self, addr: IpAddr, port: u16) -> Option<Refusal> {
        let at_port = || self.is_api_server(addr, port).then_some(Refusal::ApiServer);
        self.refusal_everywhere(addr).or_else(at_port)
    }

    /// Whether an API server listens there.
    pub fn is_api_server(&self, addr: IpAddr, port: u16) -> bool {
        self.api_servers.contains(&SocketAddr::new(addr, port))
    }

    /// Whether an API server listens at one of these ports at least.
    pub fn is_api_server_at_any(&self, addr: IpAddr, ports: &BTreeSet<u16>) -> bool {
        self.api_servers.iter().any(|server| server.ip() == addr && ports.contains(&server.port()))
    }

    /// Why an external IP is served at no port.
    pub fn refusal_everywhere(&self, addr: IpAddr) -> Option<Refusal> {
        self.refusal_by_this_node(addr).or_else(|| self.cluster.refusal(addr))
    }

    /// The same, as far as other nodes do not matter.
    pub fn refusal_by_this_node(&self, addr: IpAddr) -> Option<Refusal> {
        let reasons = [
            (self.denied, Refusal::Denied),
            (self.service_cidrs.iter().any(|net| net.contains(&addr)), Refusal::ServiceCidr),
            (self.pods.iter().any(|net| net.contains(&addr)), Refusal::Pod),
            (self.node.contains(&addr), Refusal::Node),
        ];
        reasons.into_iter().find(|(applies, _)| *applies).map(|(_, refusal)| refusal)
    }
}

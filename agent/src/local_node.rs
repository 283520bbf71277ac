// SPDX-License-Identifier: Apache-2.0
//! What the plan and the rules need to know of this node. [`crate::settings`] makes it from flags and the Node object.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::plan::{ElementLimits, ExternalIps, PeerNodes};

/// This node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalNode {
    /// The node's name.
    pub node: String,
    /// Its zone.
    pub zone: Option<String>,
    /// Its own addresses, one per family.
    pub addresses: Vec<IpAddr>,
    /// The addresses that serve node ports.
    pub node_port_addresses: Vec<IpAddr>,
    /// Serve all Services, not only those labelled for Steerage.
    pub kube_proxy_replacement: bool,
    /// Clients of cluster IPs get the node's source address, local pods too.
    pub masquerade_all: bool,
    /// Which external IPs are served.
    pub external_ips: ExternalIps,
    /// The nodes to which packets are forwarded that find no local endpoint; `None`: they are dropped.
    pub peers: Option<Arc<PeerNodes>>,
    /// What Services may have of the kernel's memory.
    pub element_limits: ElementLimits,
}

/// How traffic from this node's pods is recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalPods {
    /// By source networks, of both families. In a family without any it is not recognised.
    Networks(Vec<IpNet>),
    /// By the interface that it arrives by: a bridge.
    Interface(String),
    /// By the beginning of the name of that interface.
    InterfacePrefix(String),
}

impl Default for LocalPods {
    fn default() -> Self {
        Self::Networks(Vec::new())
    }
}

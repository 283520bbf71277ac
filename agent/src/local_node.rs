// SPDX-License-Identifier: Apache-2.0
//! What the plan and the rules need to know of this node. [`crate::settings`] makes it from flags and the Node object.

use std::net::IpAddr;

use ipnet::IpNet;

/// This node's place in the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalNode {
    /// The node's name.
    pub node: String,
    /// Its zone.
    pub zone: Option<String>,
    /// Its own addresses, one per family.
    pub addresses: Vec<IpAddr>,
    /// The addresses on which node ports are served.
    pub node_port_addresses: Vec<IpAddr>,
    /// Whether it serves all Services (or only those labelled for it).
    pub all_services: bool,
}

/// How this node's pods are told from everything else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalPods {
    /// They send from these networks, of both families. In a family without any, they are not told from others.
    Networks(Vec<IpNet>),
    /// They send by this interface: a bridge.
    Interface(String),
    /// They send by interfaces whose names begin so.
    InterfacePrefix(String),
}

impl Default for LocalPods {
    fn default() -> Self {
        Self::Networks(Vec::new())
    }
}

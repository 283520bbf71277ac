// SPDX-License-Identifier: Apache-2.0
//! The structure of a load balancer as planned: everything but its targets.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use steerage_model::{Affinity, Family, Key, Protocol};

/// Whose load balancer it is. The UID tells a Service from one made anew under the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// The Service.
    pub service: Key,
    /// Its UID.
    pub uid: String,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.service, self.uid)
    }
}

/// One port that clients connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Listener {
    /// The Service port's name; empty for an unnamed one.
    pub name: String,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port that clients use.
    pub port: u16,
    /// The port on the nodes, where one is allocated.
    pub node_port: Option<u16>,
}

/// What a health check speaks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HealthProtocol {
    /// Healthy when a connection opens.
    Tcp,
    /// Healthy when a GET of this path answers 200.
    Http {
        /// The path, beginning with a slash.
        path: String,
    },
}

/// How targets are probed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HealthCheck {
    /// The protocol.
    pub protocol: HealthProtocol,
    /// The port on the node.
    pub port: u16,
    /// Time from one probe to the next.
    pub interval: Duration,
    /// How long one probe may take.
    pub timeout: Duration,
    /// How many good probes in a row make a target healthy.
    pub healthy_threshold: u32,
    /// How many bad probes in a row make it unhealthy.
    pub unhealthy_threshold: u32,
}

/// A load balancer as it should be, without its targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancer {
    /// The Service that it serves.
    pub owner: Owner,
    /// The IP families to serve, in the Service's order.
    pub families: Vec<Family>,
    /// The listeners, in the Service's order.
    pub listeners: Vec<Listener>,
    /// How targets are probed.
    pub health_check: HealthCheck,
    /// Whether a client keeps its target.
    pub affinity: Option<Affinity>,
    /// Addresses that the user asked for; empty to let the provider choose.
    pub requested_addresses: Vec<IpAddr>,
    /// The address pool that the user asked for.
    pub pool: Option<String>,
    /// The addresses published in the Service's status: the provider keeps them where it can.
    pub published: Vec<IpAddr>,
    /// Whose packets may come in; empty for everybody's.
    pub source_ranges: Vec<IpNet>,
    /// The Service's annotations, of which each provider reads its own.
    pub annotations: BTreeMap<String, String>,
}

// SPDX-License-Identifier: Apache-2.0
//! The planned load balancer.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use steerage_model::{Affinity, Family, Key, Protocol};

use crate::TargetSet;

/// The owner of a load balancer. The UID distinguishes a Service from one created again under the same name.
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
    /// The Service port's name; empty if it has none.
    pub name: String,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port that clients use.
    pub port: u16,
    /// The node port, if one is allocated.
    pub node_port: Option<u16>,
}

/// The protocol of a health check.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HealthProtocol {
    /// Passes when a connection opens.
    Tcp,
    /// Passes when a GET request is answered with status 200.
    Http {
        /// The path, with its leading slash.
        path: String,
    },
}

/// How targets are checked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HealthCheck {
    /// The protocol.
    pub protocol: HealthProtocol,
    /// The port on the node.
    pub port: u16,
    /// Whether the port answers for this Service on the node; otherwise it answers for the node's service proxy.
    pub is_of_service: bool,
    /// Time between two checks.
    pub interval: Duration,
    /// Time after which a check fails.
    pub timeout: Duration,
    /// Consecutive successful checks that make a target healthy.
    pub healthy_threshold: u32,
    /// Consecutive failed checks that make a target unhealthy.
    pub unhealthy_threshold: u32,
}

/// A load balancer as it should be: its structure, and its targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancer {
    /// The Service.
    pub owner: Owner,
    /// The IP families, in the Service's order.
    pub families: Vec<Family>,
    /// The listeners, in the Service's order.
    pub listeners: Vec<Listener>,
    /// How targets are checked.
    pub health_check: HealthCheck,
    /// Session affinity by client address.
    pub affinity: Option<Affinity>,
    /// The addresses that the user requested; if empty, the provider chooses.
    pub requested_addresses: Vec<IpAddr>,
    /// The address pool that the user requested.
    pub pool: Option<String>,
    /// The addresses in the Service's status, which the provider keeps if possible.
    pub published: Vec<IpAddr>,
    /// Source addresses that are admitted; empty admits all.
    pub source_ranges: Vec<IpNet>,
    /// The Service's annotations; each provider reads its own.
    pub annotations: BTreeMap<String, String>,
    /// The targets. All else is the structure.
    pub targets: TargetSet,
}

impl LoadBalancer {
    /// Whether both request the same structure. The published addresses are a result, not a request.
    pub fn has_structure_of(&self, other: &Self) -> bool {
        let Self {
            owner,
            families,
            listeners,
            health_check,
            affinity,
            requested_addresses,
            pool,
            published: _,
            source_ranges,
            annotations,
            targets: _,
        } = self;
        *owner == other.owner
            && *families == other.families
            && *listeners == other.listeners
            && *health_check == other.health_check
            && *affinity == other.affinity
            && *requested_addresses == other.requested_addresses
            && *pool == other.pool
            && *source_ranges == other.source_ranges
            && *annotations == other.annotations
    }
}
